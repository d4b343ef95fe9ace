"""SFT, DPO and GRPO on a tiny model in real runs of this machine: torchrun, bridge, points, checkpoints, hf_export."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_packages import need_training_packages
from trl_lab import TrlLab, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_training_packages()
    return make_tiny_model(tmp_path_factory.mktemp("shared files"))


def test_sft_of_two_ranks(tmp_path: Path, shared: Path) -> None:
    lab = TrlLab(tmp_path, "trl/sft", shared)
    words = lab.words("sft.jsonl", "max_steps=6", "eval_steps=3", "save_total_limit=5")
    run = lab.submit(*words, "--validation-data", shared / "held [out].jsonl")
    assert run.ended()["code"] == 0, run.log()
    print(run.log())
    print(run.checkpoints(), list(run.out.iterdir()), list(run.metrics().series))
