"""The ground of a run's records: files whole or not at all, jobs noted once, processes told apart."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreters import pythons
from small_disk import run_on_small_disk

from tuneplane.kernel.errors import Fault, OperationError, UsageError, raise_faults
from tuneplane.kernel.files import json_text, read_json, write_atomic, write_json
from tuneplane.kernel.process import is_alive, start_ticks
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.secret_names import is_secret_name
from tuneplane.kernel.submission import Submission, read_submissions, record_submission

ROOT = Path(__file__).resolve().parents[1]
RUN_ID = "ring-20260114-093012-x3k9"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / RUN_ID)
    made.submissions.mkdir(parents=True)
    return made


# Files


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o444, 0o644])
def test_a_file_has_its_mode_whatever_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_atomic(tmp_path / "x", "text", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode


def test_a_secret_is_never_readable_by_others_not_even_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    fchmod = os.fchmod

    def watch(descriptor: int, mode: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        fchmod(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", watch)
    before = os.umask(0)
    try:
        write_atomic(tmp_path / "secrets.env", "x", 0o600)
    finally:
        os.umask(before)
    assert seen == [0o600]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    texts = ["a" * 200_000, "b" * 100_000]
    write_atomic(path, texts[0])

    def write(number: int) -> None:
        write_atomic(path, texts[number % 2])

    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(write, number) for number in range(60)]
        while not all(w.done() for w in writes):
            assert path.read_text() in texts
        for w in writes:
            w.result()
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_link_in_the_way_is_replaced_and_what_it_names_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "x").symlink_to("victim")
    write_atomic(tmp_path / "x", "new")
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "x").is_symlink()


@pytest.mark.parametrize("name", ["x" * 255, "实" * 85, "a\nb", "-x", "…"])
def test_a_name_as_long_as_the_filesystem_takes(tmp_path: Path, name: str) -> None:
    write_atomic(tmp_path / name, "text")
    assert (tmp_path / name).read_text() == "text"


@pytest.mark.parametrize("place", ["nowhere/x", "file/x", "folder"])
def test_a_place_where_nothing_can_be_written_leaves_nothing(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError):
        write_atomic(tmp_path / place, "text")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder", "full"]


FULL = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tuneplane.kernel.files import write_atomic
root = Path(sys.argv[2])
write_atomic(root / "x", "old")
try:
    write_atomic(root / "x", "n" * 1_000_000)
except OSError as error:
    print(error.strerror)
print(sorted(p.name for p in root.iterdir()), (root / "x").read_text())
"""


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    command = [sys.executable, "-c", FULL, str(ROOT), str(disk)]
    done = run_on_small_disk(disk, 64 << 10, command, {"PATH": os.environ["PATH"]})
    assert done.stdout == "No space left on device\n['x'] old\n", done.stderr


plain = st.none() | st.booleans() | st.integers() | st.text()


@pytest.mark.slow
@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_is_utf8_and_reads_as_it_was(value: Any) -> None:
    assert json.loads(json_text(value).encode("utf-8")) == value


def test_bytes_that_are_no_text_stand_in_json_as_python_has_them(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9 \xe5\xae\x9e")
    write_json(tmp_path / "x.json", {"name": name})
    assert (tmp_path / "x.json").read_bytes() == '{\n  "name": "caf\\udce9 实"\n}\n'.encode()
    assert read_json(tmp_path / "x.json") == {"name": name}


def test_what_is_no_json_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ValueError):
        read_json(tmp_path / "x")
    with pytest.raises(ValueError):
        json_text(float("nan"))


# Errors


def test_every_fault_is_one_line_and_its_remedy_another() -> None:
    error = UsageError(Fault("is wrong", "x.yaml:3", "write it right"), Fault("alone"), "plain")
    assert str(error) == "x.yaml:3: is wrong\n  → write it right\nalone\nplain"
    assert (int(UsageError("x").exit_code), int(OperationError("x").exit_code)) == (2, 1)
    raise_faults([])
    with pytest.raises(UsageError) as caught:
        raise_faults(Fault(text) for text in ("a", "b"))
    assert [fault.what for fault in caught.value.faults] == ["a", "b"]


# Attempts


def test_only_numbers_are_attempts_and_they_are_in_their_order(run: RunFolder) -> None:
    assert run.attempts() == []
    for name in ("0", "10", "2", "01", "²", "٣", "x", ".3.tmp", "-1", "1e3", ""):
        (run.attempts_folder / name).mkdir(parents=True, exist_ok=True)
    assert [attempt.number for attempt in run.attempts()] == [0, 2, 10]


# Jobs of a run


def test_a_job_is_noted_with_who_started_it_when_and_where(run: RunFolder) -> None:
    record_submission(run, "4242", "tp", os.getpid())
    record_submission(run, f"local-{os.getpid()}", "hand", os.getpid())
    slurm, local = read_submissions(run)
    assert (slurm.job_id, slurm.by, slurm.host, slurm.pid) == ("4242", "tp", os.uname().nodename, 0)
    assert not slurm.is_local and not slurm.is_alive_here()
    assert abs(slurm.at - time.time()) < 10
    assert (local.by, local.pid, local.pid_start) == ("hand", os.getpid(), start_ticks(os.getpid()))
    assert local.is_local and local.is_here and local.is_alive_here()


@pytest.mark.parametrize("order", [("tp", "hand"), ("hand", "tp"), ("hand", "hand")])
def test_whoever_comes_first_what_tp_says_stays(run: RunFolder, order: tuple[str, str]) -> None:
    for by in order:
        record_submission(run, "4242", by)
    (noted,) = read_submissions(run)
    assert noted.by == ("tp" if "tp" in order else "hand")
    assert [p.name for p in run.submissions.iterdir()] == ["4242.json"]


def test_a_race_of_the_job_and_of_tp_ends_with_tps_word(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job saw no note, then tp noted it, then the job writes."""
    link = os.link

    def late(source: Path, target: Path) -> None:
        record_submission(run, "4242", "tp")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    record_submission(run, "4242", "hand")
    assert [noted.by for noted in read_submissions(run)] == ["tp"]
    assert [p.name for p in run.submissions.iterdir()] == ["4242.json"]


def test_a_filesystem_without_hard_links_does(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    record_submission(run, "4242", "hand")
    assert [noted.by for noted in read_submissions(run)] == ["hand"]
    assert [p.name for p in run.submissions.iterdir()] == ["4242.json"]


def test_a_pid_that_a_former_start_had_is_noted_anew(run: RunFolder) -> None:
    job_id = f"local-{os.getpid()}"
    old = {
        "job_id": job_id,
        "by": "tp",
        "at": 5.0,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "pid_start": 1,
    }
    write_json(run.submissions / f"{job_id}.json", old)
    assert not read_submissions(run)[0].is_alive_here()
    record_submission(run, job_id, "hand", os.getpid())
    (noted,) = read_submissions(run)
    assert noted.is_alive_here() and noted.by == "hand"


def test_jobs_are_oldest_first_and_damaged_notes_are_passed_over(run: RunFolder) -> None:
    for job_id, at in (("9", 1.0), ("10", 3.0), ("8", 2)):
        write_json(
            run.submissions / f"{job_id}.json", {"job_id": job_id, "at": at, "of_a_later_version": True}
        )
    for name, data in {"a": b"", "b": b"[]", "c": b"5", "d": b'{"job_id": "x"}', "e": b"\xff"}.items():
        (run.submissions / f"{name}.json").write_bytes(data)
    (run.submissions / ".11.abcd.tmp").write_text('{"job_id": "11", "at": 1}')
    assert [noted.job_id for noted in read_submissions(run)] == ["9", "8", "10"]
    assert read_submissions(RunFolder(run.path / "nowhere")) == []


def test_a_job_of_another_machine_is_not_looked_for_here() -> None:
    noted = Submission("local-1", "tp", 0.0, "elsewhere", os.getpid(), start_ticks(os.getpid()))
    assert noted.is_local and not noted.is_here and not noted.is_alive_here()


# Processes


def test_a_process_is_alive_until_it_ends_and_a_zombie_is_not() -> None:
    process = subprocess.Popen(["sleep", "60"])
    ticks = start_ticks(process.pid)
    assert ticks is not None and is_alive(process.pid, ticks) and is_alive(process.pid)
    assert not is_alive(process.pid, ticks + 1)
    process.kill()
    deadline = time.monotonic() + 10
    while is_alive(process.pid, ticks):
        assert time.monotonic() < deadline
    assert Path(f"/proc/{process.pid}").exists(), "nobody has waited for it"
    process.wait()
    assert start_ticks(process.pid) is None


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 5])
def test_what_is_no_process_is_not_alive(pid: int) -> None:
    assert not is_alive(pid)


def test_a_process_with_an_odd_name_is_read_right(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/usr/bin/sleep")
    process = subprocess.Popen([program, "60"])
    try:
        deadline = time.monotonic() + 10
        while "a) R 1 (b" not in Path(f"/proc/{process.pid}/stat").read_text():
            assert time.monotonic() < deadline
        assert is_alive(process.pid, start_ticks(process.pid))
    finally:
        process.kill()
        process.wait()
    assert start_ticks(os.getpid()) != start_ticks(1)


# Names of secrets


@pytest.mark.contract("C11")
@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "WANDB_API_KEY",
            "WANDB_APIKEY",
            "AWS_SECRET_ACCESS_KEY",
            "GITHUB_TOKEN",
            "HFTOKEN",
            "TOKEN",
        ),
        *(
            "KEY",
            "S3_KEY",
            "S3KEY",
            "KEY2",
            "DB_PASSWORD",
            "PGPASSWORD",
            "MYSQL_PWD",
            "MY_SECRET",
            "SECRETS_X",
        ),
        *("GOOGLE_APPLICATION_CREDENTIALS", "SSH_KEY_PASSPHRASE", "api.key", "apiKey", "authToken", "passwd"),
        *("SECRETS_X", "TUNEPLANE_JOB_TOKEN"),
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PWD",
            "OLDPWD",
            "PATH",
            "HOME",
            "MAX_TOKENS",
            "TOKENIZERS_PARALLELISM",
            "MONKEY",
            "KEYMAP",
            "HOTKEY",
        ),
        *(
            "KEYBOARD",
            "SSH_AUTH_SOCK",
            "HF_HOME",
            "NCCL_DEBUG",
            "TUNEPLANE_OUT_DIR",
            "LS_COLORS",
            "SECRETARY",
        ),
    ],
)
def test_ordinary_variables_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_the_ground_runs_on_every_python_of_compute_nodes(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tuneplane.kernel import env, errors, files, process, runfolder, secret_names, submission\n"
        "run = runfolder.RunFolder(Path(sys.argv[2])); run.submissions.mkdir(parents=True)\n"
        "submission.record_submission(run, '7', 'hand'); submission.record_submission(run, '7', 'tp')\n"
        "print([s.by for s in submission.read_submissions(run)], secret_names.is_secret_name('HF_TOKEN'))\n"
    )
    for version, python in pythons((3, 9)).items():
        done = subprocess.run(
            [python, "-I", "-S", "-c", code, str(ROOT), str(tmp_path / version)],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert done.stdout == "['tp'] True\n", version
