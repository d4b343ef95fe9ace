"""A method whose training is a shell script and whose evaluation is the real one, but for lm-eval itself.

`python3` of the profile's PATH is a script that tells the two apart; the rules of operations are tested with it
where no training library is. `tests/test_evaluation.py` runs the real lm-eval.
"""

from __future__ import annotations

from pathlib import Path

METHOD = "toy/model"

MANIFEST = """schema: tuneplane/recipe/v1
id: toy/model
version: 1.0.0
title: A model of no worth
adapter: evalkit
entrypoint: {kind: experiment, value: train.sh}
requires: {core: ">=0.4"}
observability: platform
operations: [train, eval]
parameters: {}
runtime: {default_version: "1", versions: {"1": {id: toy-1}}}
"""

TRAIN = 'mkdir -p "$TUNEPLANE_OUT_DIR/hf_export" && echo {} >"$TUNEPLANE_OUT_DIR/hf_export/config.json"\n'
"""Training of a moment, whose model can be exported nowhere but is there."""

PYTHON3 = """#!/bin/bash
case " $* " in
  *" --subject="*) PYTHONPATH="$PYTHONPATH:@LIBRARY@" exec /usr/bin/python3 "$@" ;;
  *" -m tuneplane.evalkit "*) exec bash "$TUNEPLANE_EXP_DIR/train.sh" ;;
esac
exec /usr/bin/python3 "$@"
"""

LM_EVAL = """
import json, os, sys, time
asked = json.load(open(sys.argv[sys.argv.index("--config") + 1]))
for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    assert os.environ[name] == "1", name
tasks = asked["tasks"]
if "raises" in tasks:
    raise SystemExit("no such task: raises")
time.sleep(float(os.environ.get("EVAL_DATA_DIR") or 0))
values = {task: {"alias": task, "acc,none": 0.25 + n, "acc_stderr,none": 0.125} for n, task in enumerate(tasks)}
found = {
    "results": values,
    "n-shot": {task: 0 for task in tasks},
    "n-samples": {task: {"original": 9, "effective": int(asked.get("limit") or 9)} for task in tasks},
    "higher_is_better": {task: {"acc": True} for task in tasks},
    "config": {"model_sha": ""},
}
with open(asked["output_path"].replace(".json", "_2026-01-01.json"), "w") as file:
    json.dump(found, file)
print("evaluated", asked["model_args"]["pretrained"])
"""


def files(library: Path) -> dict[str, str]:
    """Path below the folder `library` → text: what stands in for lm-eval, and `bin/python3`."""
    return {
        "lm_eval/__init__.py": "",
        "lm_eval/__main__.py": LM_EVAL,
        "bin/python3": PYTHON3.replace("@LIBRARY@", str(library)),
    }


SCAFFOLD = {"train.sh": TRAIN, "config.yaml": "", "README.md": "A toy.\n"}
"""The method's scaffold."""
