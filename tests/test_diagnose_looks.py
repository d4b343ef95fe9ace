"""The looks that evidence is made of: Slurm's words, committed code, points, outputs, interpreters, processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from git_lab import GitLab

from tuneplane.capsule import build_capsule
from tuneplane.diagnose import probe
from tuneplane.diagnose.committed import read_code
from tuneplane.diagnose.evidence import Node
from tuneplane.diagnose.interpreters import read_interpreters
from tuneplane.diagnose.look import MOST_ENTRIES, read_outputs, read_points, read_space
from tuneplane.diagnose.processes import parse_processes, read_processes
from tuneplane.diagnose.silence import silence_s
from tuneplane.diagnose.slurmwords import parse_fields, parse_steps

JOB = (
    "JobId=7 JobName=a b=c UserId=alice(1001) Priority=5 Reason=ReqNodeNotAvail,_UnavailableNodes:n[1-2] "
    "Dependency=(null) TimeLimit=1-00:00:00 Command=/x y/z WorkDir=/lustre/a b/run Comment=x=y "
    "TRES=cpu=8,gres/gpu=1"
)


def test_fields_of_scontrol_are_read_whole_and_empty_ones_left_out() -> None:
    found = parse_fields(JOB)
    assert found["Reason"] == "ReqNodeNotAvail,_UnavailableNodes:n[1-2]"
    assert found["WorkDir"] == "/lustre/a b/run"
    assert found["TRES"] == "cpu=8,gres/gpu=1"
    assert "Dependency" not in found
    assert parse_fields(JOB, frozenset(["Priority"])) == {"Priority": "5"}
    assert parse_fields("") == {}


def test_rows_of_another_run_s_job_with_the_same_number_are_passed_over() -> None:
    said = (
        "7|TIMEOUT|0:0|None|n1||8G|01:00:00|01:00:00|/old/run\n"
        "7.batch|CANCELLED|0:15||n1|3K|||01:00:01|\n"
        "7|FAILED|1:0|None|n2||8G|00:00:02|01:00:00|/this/run\n"
        "7.0|FAILED|1:0||n2|9K||00:00:02||\n"
        "broken line\n"
    )
    assert [(s.job_id, s.state) for s in parse_steps(said, "/this/run")] == [
        ("7", "FAILED"),
        ("7.0", "FAILED"),
    ]
    assert len(parse_steps(said)) == 4


def test_what_the_code_says_is_of_this_experiment_and_the_lab_s_common_code(tmp_path: Path) -> None:
    lab = GitLab(tmp_path / "lab")
    lab.write(
        "experiments/ring/train.sh", "#!/bin/bash\n# python2 is old\nexec /opt/venv/bin/python3 train.py\n"
    )
    lab.write("experiments/ring/train.py", "from tuneplane.report import log\n")
    lab.write("experiments/other/train.py", "import tuneplane\nfrom tuneplane.report import log\n")
    lab.write("common/losses/__init__.py", "x = 1\n")
    lab.write("common/data.bin", b"tuneplane.report " * 100_000)
    lab.commit()
    build_capsule(lab.root, tmp_path / "capsule.tar")
    found = read_code(tmp_path / "capsule.tar", "experiments/ring/train.sh")
    assert found.reports == ("experiments/ring/train.py",)
    assert found.pythons == ("/opt/venv/bin/python3",)
    assert "common/losses" in found.own_modules
    assert not any("other" in name for name in found.own_modules)


def points_file(folder: Path, run: str = "r", token: str = "t", points: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"v": 1, "run_id": run, "token_sha256": token, "attempt": 0, "rank": 0})]
    lines += [
        json.dumps({"n": n, "t": 1.0, "s": n, "m": {"loss": 0.5}}, separators=(",", ":"))
        for n in range(points)
    ]
    path = folder / f"0-n1-0-{points}-{run}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_whether_there_are_points_is_told_by_a_cheap_look(tmp_path: Path) -> None:
    ingest = tmp_path / "ingest"
    points_file(ingest, points=0)
    assert not read_points(ingest, "r", "t").points
    points_file(ingest, points=3)
    found = read_points(ingest, "r", "t")
    assert (found.files, found.points, found.refused) == (2, True, "")
    assert found.newest_age_s is not None
    assert "token" in read_points(ingest, "r", "another").refused
    assert "another run" in read_points(ingest, "other", "t").refused


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b"{}", b"[1]", b"not json\n", b'{"v": 1}\n'])
def test_files_that_are_no_points_are_told_and_harm_nothing(tmp_path: Path, content: bytes) -> None:
    ingest = tmp_path / "ingest"
    ingest.mkdir()
    (ingest / "x.jsonl").write_bytes(content)
    (ingest / "link.jsonl").symlink_to("/etc/passwd")
    found = read_points(ingest, "r", "t")
    assert (found.files, found.points) == (1, False)


def test_an_output_folder_is_looked_at_within_bounds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoints" / "step-1").mkdir(parents=True)
    (out / "checkpoints" / "step-2").mkdir()
    (out / "checkpoints" / "README.md").touch()
    (out / "inside").symlink_to(out / "checkpoints")
    (out / "logs").symlink_to(tmp_path)
    found = read_outputs(out)
    assert found.checkpoints == 2
    assert found.outside == (f"logs -> {tmp_path}",)
    many = tmp_path / "many"
    many.mkdir()
    for number in range(MOST_ENTRIES + 500):
        (many / str(number)).touch()
    before = time.monotonic()
    assert len(read_outputs(many).entries) <= 40
    assert time.monotonic() - before < 2


def test_free_space_and_inodes_are_told(tmp_path: Path) -> None:
    found = read_space("storage", tmp_path)
    assert 0 < found.free_bytes <= found.size_bytes
    with pytest.raises(OSError, match="No such file"):
        read_space("storage", tmp_path / "nothing")


def test_the_pythons_of_a_machine_are_asked_for_a_module() -> None:
    found = read_interpreters("json", "none", "", (), "", "/usr/bin:/bin:/nowhere")
    assert isinstance(found, tuple)
    assert any(i.has_module for i in found)
    assert sum(i.default for i in found) == 1
    missing = read_interpreters("no_such_module_anywhere", "none", "", (), "", "/usr/bin")
    assert isinstance(missing, tuple)
    assert not any(i.has_module for i in missing)


@pytest.mark.parametrize("name", ["os; echo", "a b", "", "../x", "x" * 200])
def test_a_name_that_is_no_module_is_never_given_to_a_shell(name: str) -> None:
    assert "is no name of a module" in read_interpreters(name, "none", "", (), "", "/usr/bin")


def test_a_runtime_that_is_not_here_is_told() -> None:
    assert isinstance(
        read_interpreters("x", "apptainer", "/nowhere/apptainer", (), "/x.sif", "/usr/bin"), str
    )


RANKED = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    for rank in ("0", "1"):
        subprocess.Popen([sys.executable, __file__, rank], env={**os.environ, "RANK": rank})
    time.sleep(60)
elif sys.argv[1] == "1":
    while True: pass
else:
    time.sleep(60)
"""


@pytest.mark.slow
def test_of_a_launcher_s_tree_each_rank_is_looked_at(tmp_path: Path) -> None:
    script = tmp_path / "launch.py"
    script.write_text(RANKED)
    launcher = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while len(probe.below(launcher.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        found = read_processes(sys.executable, {0: (os.uname().nodename, launcher.pid)}, "")
        assert isinstance(found, tuple), found
        assert [p.rank for p in found] == [0, 1]
        assert found[1].cpu_percent > found[0].cpu_percent
    finally:
        os.killpg(launcher.pid, 9)
        launcher.wait()


@pytest.mark.slow
def test_processes_elsewhere_or_gone_are_told() -> None:
    assert "ask there" in read_processes(sys.executable, {0: ("another-host", 1)}, "")
    gone = subprocess.Popen(["true"])
    gone.wait()
    said = read_processes(sys.executable, {0: (os.uname().nodename, gone.pid)}, "")
    assert isinstance(said, str)
    assert "cannot be run" not in said
    assert isinstance(read_processes("/nowhere/python3", {0: (os.uname().nodename, 1)}, ""), str)


def test_what_other_programs_print_beside_the_answer_is_passed_over() -> None:
    line = json.dumps({"node": 1, "processes": [
        {"pid": 5, "rank": None, "name": "python", "state": "S", "cpu_percent": 1.0, "wait_channel": "",
         "stack": ["main (x.py:1)"], "no_stack": ""}]})  # fmt: skip
    assert [p.node for p in parse_processes(f"a banner\n{line}\n")] == [1]
    assert parse_processes("") == ()


def test_silence_is_the_youngest_sign_and_a_command_that_just_began_is_not_silent() -> None:
    from tuneplane.diagnose.evidence import Log, Points

    node = Node(0, "n1", "running", command_started_at=900.0)
    log = Log(0, "n1", 1, 1, age_s=500.0)
    assert silence_s(1000.0, (node,), (log,), Points()) == 100.0
    assert silence_s(2000.0, (node,), (log,), Points(newest_age_s=20.0)) == 20.0
    assert silence_s(2000.0, (), (), Points()) == 0.0
