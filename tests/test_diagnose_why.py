"""`tp job why` as a user says it, on runs of this machine that are made here and now."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.record_cases import FINAL, URL, Place

from tuneplane.diagnose.case import read_case
from tuneplane.diagnose.verdict import diagnose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FLAGS = ("--profile", "local", "--observability-url", URL)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A lab of one user; runs that still run are ended afterwards."""
    made = Place("")
    yield made
    made.close()


def start(
    place: Place, name: str, train: str | None, *, until: str = "", files: dict[str, str] | None = None
) -> str:
    """Submit an experiment and wait for its end, or for a line of its log; the run's id."""
    given = {} if train is None else {"train.sh": f"#!/bin/bash\nset -euo pipefail\n{train}\n"}
    place.write(name, {**given, **(files or {})})
    said = json.loads(place.sh(["tp", "submit", name, *FLAGS, "--json"]).partition("note:")[0])
    run = str(said["run_id"])
    deadline = time.monotonic() + 60
    while True:
        if until and until in place.sh(["tp", "job", "logs", run], code=None):
            return run
        if place.state(run) in FINAL:
            assert not until, place.sh(["tp", "job", "logs", run], code=None)
            return run
        assert time.monotonic() < deadline
        time.sleep(0.2)


def why(place: Place, run: str, *more: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(place.sh(["tp", "job", "why", run, "--json", *more]))
    return value


def test_one_sentence_first_then_where_by_what_evidence_and_what_to_do(place: Place) -> None:
    run = start(place, "scaffold", None)
    lines = place.sh(["tp", "job", "why", run]).splitlines()
    assert lines[0] == f"{run}: train.sh is the scaffold as it was made: it starts no training yet"
    assert lines[1].split()[:2] == ["where", "node"]
    assert any(line.split(None, 1) == ["evidence", "no training command yet"] for line in lines)
    assert any(
        line.strip().startswith("remedy") and "experiments/scaffold/train.sh" in line for line in lines
    )


@pytest.mark.contract("C46")
def test_why_takes_whatever_names_a_run(place: Place) -> None:
    run = start(place, "named", "echo trying\nexit 4")
    folder = str(place.folder(run))
    for text in (run, run[:-2], "named", folder):
        found = why(place, text)
        assert found["run_id"] == run
        assert found["finding"]["cause"] == "command-failed"
        assert "exit code 4" in found["finding"]["sentence"]
        assert found["finding"]["evidence"][-1] == "trying"


def test_a_run_that_does_not_exist_is_told(place: Place) -> None:
    assert "no run 'nothing' of yours" in place.sh(["tp", "job", "why", "nothing"], code=2)


@pytest.mark.contract("J")
def test_a_healthy_run_is_said_to_be_healthy(place: Place) -> None:
    train = 'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"\nexec python3 "$TUNEPLANE_EXP_DIR/train.py"'
    code = (
        "import time\nfrom tuneplane.report import log\nfor step in range(600):\n"
        "    log({'loss': 1.0}, step=step)\n    print('step', step, flush=True)\n    time.sleep(0.1)\n"
    )
    run = start(place, "healthy", train, until="step 5", files={"train.py": code})
    found = why(place, run)["finding"]
    assert found["cause"] == "healthy"
    assert found["sentence"].startswith("nothing is wrong that can be seen: it runs on")
    assert "points arrive" in found["sentence"]
    place.sh(["tp", "job", "stop", run])
    assert why(place, run)["finding"]["sentence"] == "it was stopped by tp job stop"


PEAK = """
import json, re, sys, time
from pathlib import Path
from tuneplane.cli.main import main
before = time.monotonic()
try:
    main()
finally:
    status = Path("/proc/self/status").read_text()
    megabytes = int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) / 1024
    print(json.dumps({"seconds": time.monotonic() - before, "megabytes": megabytes}))
"""


@pytest.mark.slow
@pytest.mark.contract("J")
def test_a_run_with_a_log_of_ten_gigabytes_is_told_in_seconds(place: Place) -> None:
    code = "raise ValueError('label 7 is not one of 5 classes')\n"
    run = start(place, "big", 'exec python3 "$TUNEPLANE_EXP_DIR/train.py"', files={"train.py": code})
    log = place.folder(run) / "attempts" / "0" / "node-0.log"
    said = log.read_bytes()
    with log.open("r+b") as file:  # with holes: every byte is read, and no disk is filled
        file.truncate(10 << 30)
        file.seek((10 << 30) - len(said) - 1)
        file.write(b"\n" + said)
    argv = ["env", f"PYTHONPATH={os.pathsep.join(sys.path)}", sys.executable, "-c", PEAK, "job", "why", run]
    lines = place.sh(argv).splitlines()
    cost = json.loads(next(line for line in lines if line.startswith('{"seconds"')))
    print(cost)
    assert "the program raised ValueError" in lines[0]
    assert cost["seconds"] < 5.0
    assert cost["megabytes"] < 200


@pytest.mark.contract("J")
def test_a_silent_run_is_looked_at_where_it_runs(place: Place) -> None:
    run = start(place, "silent", "echo step 1\nexec sleep 300", until="step 1")
    time.sleep(1)
    then = time.time() - 1000
    folder = place.folder(run)
    os.utime(folder / "attempts" / "0" / "node-0.log", (then, then))
    record = folder / "attempts" / "0" / "node-0.json"
    value = json.loads(record.read_text())
    record.write_text(json.dumps({**value, "command_started_at": then - 60}))
    found = why(place, run)["finding"]
    place.sh(["tp", "job", "stop", run])
    assert found["cause"] == "no-progress"
    assert "nothing was printed or reported for 17 min" in found["sentence"]
    assert "sleep" in "".join(found["evidence"])
    assert "last line, 17 min ago: step 1" in found["evidence"]


@pytest.mark.contract("J")
def test_the_first_rank_that_failed_is_told_and_not_its_victim(place: Place) -> None:
    code = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank)]) for rank in range(2)]
    sys.exit(max(abs(rank.wait()) for rank in ranks))
prefix = f"[rank{sys.argv[1]}]: "
def hook(kind, value, trace):
    import traceback
    for line in "".join(traceback.format_exception(kind, value, trace)).splitlines():
        print(prefix + line, file=sys.stderr, flush=True)
sys.excepthook = hook
if sys.argv[1] == "0":
    raise RuntimeError("Connection closed by peer [10.0.0.2]:4711")
time.sleep(0.5)
raise ValueError("label 7 is not one of 5 classes")
"""
    run = start(place, "ranks", 'exec python3 "$TUNEPLANE_EXP_DIR/train.py"', files={"train.py": code})
    found = why(place, run)["finding"]
    assert (found["cause"], found["rank"]) == ("first-failing-rank", 1)
    assert found["sentence"].endswith("ValueError: label 7 is not one of 5 classes")
    assert any("rank 0" in line and "victim" in line for line in found["evidence"])


def test_a_secret_that_a_program_printed_is_masked(place: Place) -> None:
    train = 'echo "using $TUNEPLANE_JOB_TOKEN now"\nexit 3'
    run = start(place, "talks", train)
    said = place.sh(["tp", "job", "why", run])
    assert "using ••• now" in said


def test_a_case_is_saved_and_judged_again_without_the_run(place: Place, tmp_path: Path) -> None:
    run = start(place, "kept", 'python3 -c "import json; json.loads(chr(123))"')
    folder = tmp_path / "for the maintainers"
    said = place.sh(["tp", "job", "why", run, "--save-case", str(folder)])
    assert "read it before you send it" in said
    found = diagnose(read_case(folder))[0]
    assert found.cause == "python-exception"
    assert "JSONDecodeError" in found.sentence
    text = (folder / "evidence.json").read_text()
    for private in (run, str(place.base), os.uname().nodename):
        assert private not in text
    assert "is there already" in place.sh(["tp", "job", "why", run, "--save-case", str(folder)], code=2)


def test_a_run_folder_that_is_half_gone_is_answered_all_the_same(place: Place) -> None:
    run = start(place, "half", "exit 9")
    folder = place.folder(run)
    (folder / "capsule.tar").unlink()
    (folder / "attempts/0/node-0.log").write_bytes(b"\x00\xff\n" * 10)
    found = why(place, str(folder))
    assert found["finding"]["cause"] == "command-failed"
    assert any("capsule.tar" in told for told in found["unread"])
    (folder / "job.json").chmod(0o644)
    (folder / "job.json").write_text("{")
    for name in ("attempts/0/node-0.json", "attempts/0/end.json"):
        (folder / name).unlink()
    found = why(place, str(folder))
    assert found["finding"]["sentence"]
    assert any("job.json" in told for told in found["unread"])
    shutil.rmtree(folder)


def test_nothing_heavy_is_imported_to_say_why() -> None:
    import subprocess

    code = (
        "import sys, tuneplane.diagnose.gather, tuneplane.diagnose.verdict, tuneplane.cli.why\n"
        "print([m for m in ('hydra', 'omegaconf', 'submitit', 'msgspec', 'rich', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
