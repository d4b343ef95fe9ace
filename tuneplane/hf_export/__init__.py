"""What a run of a language model leaves for others: `hf_export`, whole or not there, and from what it was made.

The trl adapter, the bridge's hook `saves` and `python3 -m tuneplane.hf_export` (`tp export`) share it.
"""
