"""Evaluating an exported model with lm-eval: what `evalkit/benchmark` starts in the image.

`python3 -m tuneplane.evalkit` runs the real lm-eval, offline, and writes `eval/report.json`. It travels in the
kernel: standard library, Python 3.9. `report.py` is read by the login side too.
"""
