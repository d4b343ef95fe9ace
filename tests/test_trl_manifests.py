"""Every parameter that the TRL methods declare is TRL's own, of that type, with these choices and defaults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_packages import need_training_packages

from tuneplane.packaged import packaged_configs
from tuneplane.recipes.adapters import trl
from tuneplane.recipes.catalog import load_catalog
from tuneplane.recipes.recipe import Parameter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

METHODS = ("sft", "dpo", "grpo")

NOT_TRLS_DEFAULT = {
    *("dataset_test_split", "eval_strategy", "bf16", "steps_per_generation"),  # null: adapter or TRL decides
    *("eval_steps", "save_total_limit", "logging_steps"),  # what suits runs on clusters better
}


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    """Asks TRL's parsers, which take seconds to import, in a process of their own."""
    need_training_packages()
    program = Path(__file__).parent / "trainers/trl_config.py"
    environ = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    asked: list[tuple[str, str, Any]] = []

    def answers() -> list[tuple[str, Any, Any]]:
        lines = [json.dumps({"script": s, "config": c, "ask": a}) for s, c, (a, _) in asked]
        done = subprocess.run(
            [sys.executable, str(program)],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=100,
            env=environ,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(told) == len(asked)
        return [(f"{s}: {a} = {v!r}", v, t) for (s, _, (a, v)), t in zip(asked, told, strict=True)]

    yield asked, answers


def samples(parameter: Parameter) -> list[Any]:
    """Values that TRL must take, as the manifest says."""
    if parameter.choices and not parameter.type.startswith("list["):
        return list(parameter.choices)
    whole = parameter.default if parameter.type == "int" and parameter.default else 0
    of_type: dict[str, list[Any]] = {
        "bool": [True, False],
        "int": [2 * whole if whole > 0 else 4],
        "float": [0.25, *([3.0] if parameter.maximum is None else [])],
        "str": ["some text"],
        "list[str]": [list(parameter.choices) or ["one", "two"]],
        "list[float]": [[0.5, 1.0]],
    }
    return of_type[parameter.type]


def test_trl_takes_every_parameter_with_its_values_and_defaults(parser: Any) -> None:
    asked, answers = parser
    catalog = load_catalog([packaged_configs()])
    base = {"output_dir": "/tmp/none", "use_cpu": True, "bf16": False, "report_to": "none"}
    for method in METHODS:
        for parameter in catalog.get(f"trl/{method}").parameters:
            name = parameter.name
            for value in samples(parameter):
                config = {**base, "per_device_train_batch_size": 16, name: value}  # GRPO: whole groups
                asked.append((method, trl.yaml_of(config), (name, value)))
            if name not in NOT_TRLS_DEFAULT and not parameter.required:
                asked.append((method, trl.yaml_of(base), (name, parameter.default)))
    different = [f"{what}: TRL has {told}" for what, value, told in answers() if told != {"value": value}]
    assert different == []
