"""The bridge: `python -m tuneplane.bridge [--hook NAME]... (script.py | -m module) args...`.

Enters the interpreter that trains, in every rank, and runs there what Python would have run by itself.
"""
