"""`hf_export` is whole or not there: what `tp export` makes of what a run left, on whatever it meets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_data_check import make_model

from tuneplane.hf_export.__main__ import main
from tuneplane.hf_export.checkpoints import TO_RESUME
from tuneplane.hf_export.folder import EXPORT, Origin, read_origin, written_whole
from tuneplane.hf_export.weights import model_problems


def checkpoint(out: Path, step: int, weights: bytes | None = None) -> Path:
    folder = make_model(out / f"checkpoints/checkpoint-{step}")
    for name in (*TO_RESUME, "rng_state_0.pth", "training_args.bin", "README.md"):
        (folder / name).write_bytes(b"x")
    (folder / "chat_template.jinja").write_text(f"step {step}")
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


def exported(out: Path) -> str:
    """Of which step the export is, by its content."""
    return (out / EXPORT / "chat_template.jinja").read_text()


@pytest.mark.contract("C13")
def test_the_last_complete_checkpoint_becomes_a_model_without_what_is_for_going_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out put"
    checkpoint(out, 9)
    checkpoint(out, 10)
    (checkpoint(out, 11) / "trainer_state.json").unlink()
    assert main([str(out)]) == 0
    assert exported(out) == "step 10" and "checkpoint-10 (step 10)" in capsys.readouterr().out
    assert {path.name for path in (out / EXPORT).iterdir()} == {
        *(
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "chat_template.jinja",
            "tuneplane_export.json",
        )
    }
    assert model_problems(out / EXPORT) == []
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", EXPORT]


def test_a_later_checkpoint_takes_the_place_of_an_earlier_export(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    assert main([str(tmp_path)]) == 0
    checkpoint(tmp_path, 2)
    assert main([str(tmp_path)]) == 0
    assert exported(tmp_path) == "step 2"
    origin = read_origin(tmp_path / EXPORT)
    assert origin is not None and (origin.source, origin.step) == ("checkpoint-2", 2)


def test_a_final_model_stays_as_it_is_and_a_damaged_one_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path, 5)
    with written_whole(tmp_path / EXPORT, Origin("final", 6)) as new:
        make_model(new)
    assert main([str(tmp_path)]) == 0
    assert "is the final model already" in capsys.readouterr().out
    assert not (tmp_path / EXPORT / "chat_template.jinja").exists()
    (tmp_path / EXPORT / "model.safetensors").write_bytes(b"cut")
    assert main([str(tmp_path)]) == 0
    assert exported(tmp_path) == "step 5"


def test_weights_that_a_full_disk_cut_off_are_not_exported_but_those_before_them(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2, weights=(1 << 20).to_bytes(8, "little") + b"{")
    assert main([str(tmp_path)]) == 0
    assert exported(tmp_path) == "step 1"


@pytest.mark.parametrize("left", ["nothing", "links", "damaged"])
def test_where_there_is_nothing_to_export_it_says_so(
    tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    if left == "links":
        (out / "checkpoints/checkpoint-3").symlink_to(checkpoint(tmp_path / "elsewhere", 3))
    elif left == "damaged":
        checkpoint(out, 3, weights=b"")
    assert main([str(out)]) == 1
    assert "has no final model and no complete checkpoint" in capsys.readouterr().err
    assert not (out / EXPORT).exists()


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    assert main([str(tmp_path)]) == 0
    with (
        pytest.raises(OSError, match="disk full"),
        written_whole(tmp_path / EXPORT, Origin("final", 9)) as new,
    ):
        make_model(new)
        raise OSError("disk full")
    assert exported(tmp_path) == "step 1"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_killed_export_leaves_nothing_that_looks_whole_and_is_cleared_in_time(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path;"
        "from tuneplane.hf_export.folder import Origin, written_whole\n"
        "with written_whole(Path(sys.argv[1]), Origin('final', 1)) as new:\n"
        "    (new / 'config.json').write_text('{}'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[1])}
    place = tmp_path / EXPORT
    done = subprocess.run([sys.executable, "-c", code, place], env=environ, timeout=30, check=False)
    assert done.returncode == -9 and not place.exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f".{EXPORT}.")
    with written_whole(place, Origin("final", 1)) as new:
        make_model(new)
    assert left.exists(), "another may be writing it"
    os.utime(left, (time.time() - 90_000,) * 2)
    with written_whole(place, Origin("final", 2)) as new:
        make_model(new)
    assert not left.exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    elsewhere = make_model(tmp_path / "elsewhere")
    out = tmp_path / "out"
    checkpoint(out, 1)
    (out / EXPORT).symlink_to(elsewhere)
    assert main([str(out)]) == 0
    assert not (out / EXPORT).is_symlink() and exported(out) == "step 1"
    assert not (elsewhere / "chat_template.jinja").exists()


def test_readers_of_exports_that_are_made_again_and_again_never_see_half_of_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1)
    assert main([str(tmp_path)]) == 0
    stop = threading.Event()
    seen: list[list[str]] = []

    def which() -> tuple[int, int] | None:
        """The folder that has the name now; none between the two renames of an exchange."""
        try:
            found = (tmp_path / EXPORT).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_ctime_ns

    def read() -> None:
        while not stop.is_set():
            before = which()
            origin = read_origin(tmp_path / EXPORT)
            problems = [p for p in model_problems(tmp_path / EXPORT) if "has no" not in p]
            if before is not None and origin is not None and which() == before:  # one folder all the while
                seen.append(problems)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        assert main([str(tmp_path)]) == 0
    stop.set()
    reader.join(10)
    assert seen and not any(seen)


def test_a_record_of_another_shape_is_no_record(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", json.dumps({"source": "final", "step": "x"}), "\0"):
        (tmp_path / "tuneplane_export.json").write_text(text)
        assert read_origin(tmp_path) is None
