"""`tests/live/gpu_check.py`: what a GPU machine is checked by, run here on CPUs for a few steps."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "live"))

from gpu_check import CPU, Check, methods
from gpu_data import write_images

LIVE = Path(__file__).parent / "live"


def check(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(LIVE / "gpu_check.py"), *words],
        env={**os.environ, **({"PATH": path} if path else {})},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.contract("C47")
def test_both_methods_train_and_leave_curves_and_artifacts(tmp_path: Path) -> None:
    if importlib.util.find_spec("trl") is None:
        reason = "tests/requirements-training.txt is not installed: `make test` does so"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
        pytest.skip(reason)
    folder = tmp_path / "a check"
    done = check("--cpu", "--folder", str(folder))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("both trained, nothing is missing\n")
    for name in ("validation/accuracy", "train/tokens", "train/grad_norm"):
        assert re.search(rf"(?m)^  {name} +\S+ +\d+ points$", done.stdout), name
    assert re.search(r"throughput +[\d,]+ images/s", done.stdout)
    assert re.search(r"throughput +[\d,]+ tokens/s", done.stdout)
    assert re.search(r"hf_export +hf_export +[\d,]+ bytes", done.stdout)
    assert re.search(r"torch 2\.\d+", done.stdout)
    assert not folder.exists(), "where nothing is missing nothing is kept"


def test_without_scikit_learn_there_are_images_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    write_images(tmp_path)
    classes = [sorted(path.name for path in (tmp_path / part).iterdir()) for part in ("train", "validation")]
    assert classes == [[str(label) for label in range(10)]] * 2
    assert len(list(tmp_path.glob("train/*/*.png"))) == 1200
    image = next(tmp_path.glob("validation/3/*.png")).read_bytes()
    pixels = zlib.decompress(image[image.index(b"IDAT") + 4 : -16])
    assert [
        pixels[row + 1 : row + 11].index(max(pixels[row + 1 : row + 11])) for row in range(0, 110, 11)
    ] == [3] * 10


def test_without_a_gpu_it_says_so_and_fails(tmp_path: Path) -> None:
    done = check("--folder", str(tmp_path / "x"), path=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no GPU here: ")


class Told:
    """A machine whose `tp` says what a test wants."""

    def __init__(self, cpu: bool = True, **said: object) -> None:
        self.cpu, self.said = cpu, {"status": {"state": "COMPLETED"}, "submit": {"run_id": "r"}, **said}

    def submit(self, *words: object) -> str:
        return "r"

    def wait(self, run_id: str) -> str:
        return str(self.said["status"])

    def tp(self, *words: str, **how: object) -> str:
        return json.dumps(self.said.get(words[1], "it broke"))


def curve(name: str, *values: float | str) -> dict[str, object]:
    steps = list(range(len(values)))
    return {"name": name, "steps": steps, "values": list(values), "times": [float(step) for step in steps]}


def missing(**said: object) -> list[str]:
    """What the check of image classification misses."""
    images, _ = methods(CPU, Path("/data"))
    one = Check(Told(**said), images)  # type: ignore[arg-type]
    one.run(8, 0.0)
    return one.missing


WHOLE = [curve(name, 1.0, 0.5) for name in ("train/loss", "validation/loss", "validation/accuracy")]
SPEED = curve("train/images_per_second", 10.0, 12.0)
CHECKPOINT = {"name": "checkpoints", "path": "checkpoints/step-8", "size_bytes": 1}


def test_what_a_run_lacks_is_told_each(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"status": "COMPLETED", "artifacts": {"artifacts": [CHECKPOINT]}}
    assert missing(metrics={"metrics": [*WHOLE, SPEED]}, **good) == []
    assert missing(status="FAILED") == ["r is FAILED"]
    said = missing(metrics={"metrics": WHOLE[:2]}, status="COMPLETED", artifacts={"artifacts": []})
    assert said == [
        "no metric train/images_per_second: train/loss, validation/loss",
        "no metric validation/accuracy: train/loss, validation/loss",
        "no artifact checkpoints of r",
    ]
    said = missing(metrics={"metrics": [*WHOLE, curve("train/images_per_second", 0.0)]}, **good)
    assert said == ["no throughput by train/images_per_second"]
    said = missing(metrics={"metrics": [curve("train/loss", 1.0, "NaN"), *WHOLE[1:], SPEED]}, **good)
    assert said == ["train/loss has values that are no finite numbers"]
    said = missing(metrics={"metrics": [*WHOLE, SPEED]}, cpu=False, **good)
    assert said == ["no GPU was seen at work: system/node0/gpu…/utilization_percent"]
    assert "MISSING     no GPU was seen at work" in capsys.readouterr().out
