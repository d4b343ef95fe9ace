"""Which rank failed first: by torchrun's error files and summary, in the exit record and in `tp job why`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_runs import JOINED, rank_run, run_nodes, start_nodes
from run_fixture import Run, runs_below

from tuneplane.diagnose.gather import gather
from tuneplane.diagnose.verdict import diagnose
from tuneplane.node.failure import RankEnd, read_failure

pytestmark = pytest.mark.timeout(120)
slow = pytest.mark.slow


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with runs_below(tmp_path) as make_one:
        yield make_one


def ended(run: Run, codes: list[int]) -> dict[str, Any]:
    """The end record, as the batch script's last step writes it."""
    assert any(codes)
    run.end(code=max(codes))
    assert run.processes() == []
    assert run.left_in_scratch() == []
    return run.end_of()


def error_file(folder: Path, local: int, text: str | bytes) -> Path:
    """The error file of one rank, below torchrun's log folder."""
    path = folder / "none_abc" / "attempt_0" / str(local) / "error.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def torchs_form(message: str, stack: object = "Traceback…") -> str:
    extra = {"py_callstack": stack, "timestamp": "1796030996"}
    return json.dumps({"message": {"message": message, "extraInfo": extra}})


SUMMARY = """\
Failures:
[0]:
  time      : 2026-11-30_09:30:15
  host      : localhost
  rank      : 5 (local_rank: 1)
  exitcode  : 3 (pid: 4248)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-11-30_09:30:14
  host      : localhost
  rank      : 4 (local_rank: 0)
  exitcode  : -15 (pid: 4246)  (SIGTERM)
"""
"""As torchrun prints it: its own root cause is the victim, which had noted an earlier time."""


def read(tmp_path: Path, log: str = "") -> RankEnd | None:
    (tmp_path / "node-0.log").write_text(log)
    return read_failure(tmp_path / "ranks", tmp_path / "node-0.log", "n1", 2, 2)


def test_torchruns_root_cause_is_not_believed_where_it_is_a_victim(tmp_path: Path) -> None:
    error_file(tmp_path / "ranks", 0, torchs_form("RuntimeError: Connection closed by peer [::1]:1"))
    found = read(tmp_path, SUMMARY)
    assert found is not None
    assert (found.rank, found.exitcode, found.victim) == (5, 3, False)
    assert found.sentence() == "rank 5 ended with exit code 3"


def test_a_rank_that_torchrun_had_to_kill_is_a_victim(tmp_path: Path) -> None:
    log = "W1 api.py:1047] Unable to shutdown process 4248 via 15, forcefully exiting via 9\n" + SUMMARY
    found = read(tmp_path, log.replace("exitcode  : 3 ", "exitcode  : -9 "))
    assert found is not None
    assert found.victim is True


def test_ranks_beyond_the_node_s_own_count_are_looked_at_too(tmp_path: Path) -> None:
    found = read(tmp_path, SUMMARY.replace("local_rank: 1", "local_rank: 7"))
    assert found is not None
    assert (found.local_rank, found.exitcode, found.victim) == (7, 3, False)


@pytest.mark.parametrize(("said", "victim"), [("EOFError: Ran out of input", False), ("EOFError: ", True)])
def test_a_file_that_was_cut_off_is_a_ranks_own_failure_and_a_closed_pipe_is_none(
    tmp_path: Path, said: str, victim: bool
) -> None:
    error_file(tmp_path / "ranks", 1, torchs_form(said))
    found = read(tmp_path)
    assert found is not None
    assert (found.exception, found.victim) == ("EOFError", victim)


def test_without_a_summary_the_error_file_alone_tells(tmp_path: Path) -> None:
    error_file(
        tmp_path / "ranks", 1, torchs_form("ValueError: no: such", "Traceback\nValueError: no: such\n")
    )
    found = read(tmp_path)
    assert found is not None
    assert found.as_dict() | {"at": None} == {
        **{"rank": 5, "local_rank": 1, "host": "n1", "at": None, "exception": "ValueError"},
        **{"message": "no: such", "traceback": "Traceback\nValueError: no: such\n"},
        **{"exitcode": None, "victim": False},
    }


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"message": null}', '{"message": {}}', '{"message": {"message": 3}}'),
        *('{"message": ' * 100_000, b"\xff\xfe", b"\0" * (5 << 20)),
    ],
    ids=range(10),
)
def test_an_error_file_of_another_form_says_nothing(tmp_path: Path, content: str | bytes) -> None:
    error_file(tmp_path / "ranks", 0, content)
    assert read(tmp_path) is None


def test_an_error_file_that_is_none_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "ranks" / "none_abc" / "attempt_0"
    for local in (0, 1):
        (folder / str(local)).mkdir(parents=True)
    os.mkfifo(folder / "0" / "error.json")
    (tmp_path / "elsewhere").write_text(torchs_form("ValueError: not ours"))
    (folder / "1" / "error.json").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path) is None


def test_what_it_says_is_short_and_does_nothing_to_a_terminal(tmp_path: Path) -> None:
    stack = "Traceback (most recent call last):\n" + "x\x1b[2J\n" * 100_000 + "ValueError: the end\n"
    error_file(tmp_path / "ranks", 0, torchs_form("ValueError: a\nb\x1b]0;x\x07 " + "y" * 10_000, stack))
    found = read(tmp_path)
    assert found is not None
    assert len(found.traceback.encode()) <= 8192
    assert found.traceback.startswith("Traceback (most")
    assert found.traceback.endswith("ValueError: the end\n")
    text = json.dumps(found.as_dict(), ensure_ascii=False) + found.sentence()
    assert "\x1b" not in text
    assert "\n" not in found.sentence()
    assert len(found.sentence()) < 260


@slow
def test_the_rank_that_raised_on_the_second_node_is_named_with_its_traceback(
    make: Callable[..., Run],
) -> None:
    program = JOINED + (
        "if rank == 3:\n    raise ValueError('batch of 3 does not divide into 2')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    run = rank_run(make, program, nodes=2)
    end = ended(run, run_nodes(run))
    failure = end["failure"]
    assert (failure["rank"], failure["local_rank"], failure["host"]) == (3, 1, "n2")
    assert failure["exception"] == "ValueError"
    assert failure["traceback"].rstrip().endswith("ValueError: batch of 3 does not divide into 2")
    assert "/bridge/" not in failure["traceback"]
    assert end["first_failing_rank"] == 1
    assert end["reason"].endswith(": rank 3 raised ValueError: batch of 3 does not divide into 2")
    assert run.record(0)["failure"]["victim"] is True
    log = run.log(1)
    assert "[rank2]: joined 2\n" in log
    assert "[rank3]: joined 3\n" in log
    first = diagnose(gather(run.folder))[0]
    assert (first.cause, first.node, first.rank) == ("first-failing-rank", 1, 3)
    assert "rank 3 failed first" in first.sentence
    assert "ValueError: batch of 3 does not divide into 2" in first.sentence
    assert any("train.py" in line for line in first.evidence)


@slow
def test_an_exit_code_of_a_ranks_own_is_before_what_its_peers_raised(make: Callable[..., Run]) -> None:
    program = JOINED + "if rank == 1:\n    sys.exit(3)\ndist.all_reduce(torch.ones(1))\n"
    run = rank_run(make, program)
    end = ended(run, run_nodes(run))
    assert end["reason"].endswith(": rank 1 ended with exit code 3")


@slow
def test_a_launcher_that_is_killed_leaves_no_rank_and_its_last_lines_are_told(
    make: Callable[..., Run],
) -> None:
    run = rank_run(make, JOINED + "time.sleep(100)\n")
    agents = start_nodes(run)
    run.wait_for_line("joined 1")
    os.kill(int(run.record()["command_pid"]), signal.SIGKILL)
    codes = [run.finish(agent).returncode for agent in agents]
    assert codes == [137]
    end = ended(run, codes)
    assert end["reason"] == "the command was ended by SIGKILL (exit code 137)"


@slow
def test_a_hung_rank_is_the_one_that_is_in_no_collective(make: Callable[..., Run]) -> None:
    program = JOINED + (
        "def reads_data_for_ever():\n    while True: time.sleep(1)\n"
        "if rank == 1:\n    reads_data_for_ever()\ndist.all_reduce(torch.ones(1))\n"
    )
    run = rank_run(make, program, hang_limit_s=4.0)
    end = ended(run, run_nodes(run))
    assert end["code"] == 124
    assert end["reason"].startswith("no output and no point for 4 s")
    first = diagnose(gather(run.folder))[0]
    assert (first.cause, first.node, first.rank) == ("hang-limit", 0, 1)
    assert "rank 1 was in reads_data_for_ever (train.py:" in first.sentence
    assert "rank 0 waited in all_reduce" in first.sentence


@slow
def test_threads_for_each_rank_and_what_the_site_says_reach_the_ranks(make: Callable[..., Run]) -> None:
    names = ("OMP_NUM_THREADS", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME")
    program = f"import os, json\nprint(json.dumps([os.environ.get(n) for n in {names!r}]), flush=True)\n"
    run = rank_run(make, program, ranks=1, environment={"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo"})
    assert run_nodes(run) == [0]
    cpus = min(2, len(os.sched_getaffinity(0)))
    assert f"[rank0]: {json.dumps([str(cpus), 'WARN', 'lo'])}\n" in run.log()
