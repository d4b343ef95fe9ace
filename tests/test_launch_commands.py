"""Slurm's commands as tp calls them: the words of each answer, silence, refusal, a scrubbed environment.

What squeue and sacct are made to print here was printed by Slurm 22.05.8; test_launch_testbed.py asks it anew.
"""

from __future__ import annotations

import json
import os
import pwd
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tuneplane.kernel.errors import OperationError, UsageError
from tuneplane.launch.inflight import check_in_flight, gpus_in_flight
from tuneplane.launch.slurm_commands import (
    FOLDER_MARK,
    Answer,
    SlurmJob,
    estimate_start,
    parse_code,
    parse_sacct,
    parse_squeue,
    query_accounting,
    query_queue,
    run_slurm,
    slurm_environment,
    submit_script,
)

pytestmark = pytest.mark.timeout(60)

Program = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Put an executable on an otherwise empty PATH; it notes how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, body: str = "") -> Path:
        calls = tmp_path / f"{name}.calls"
        path = folder / name
        path.write_text(
            f"#!/usr/bin/python3 -IS\nimport json, os, sys, time\n"
            f"print(json.dumps([sys.argv[1:], dict(os.environ)]), file=open({str(calls)!r}, 'a'))\n{body}\n"
        )
        path.chmod(0o755)
        return calls

    return make


def calls_of(path: Path) -> list[tuple[list[str], dict[str, str]]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def fault_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(OperationError) as caught:
        call()
    (fault,) = caught.value.faults
    return fault.what, fault.remedy


# The environment of a call


def test_what_would_change_a_request_does_not_reach_slurm() -> None:
    given = {
        "PATH": "/usr/bin",
        "HOME": "/home/alice",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_CONF_SERVER": "ctl",
        "SLURM_JOB_ID": "5",
        "SLURM_CLUSTERS": "other",
        "SLURM_TIME_FORMAT": "%s",
        "SBATCH_PARTITION": "debug",
        "SBATCH_EXPORT": "ALL",
        "SQUEUE_FORMAT": "%A",
        "SQUEUE_STATES": "RUNNING",
        "SACCT_FORMAT": "jobid",
        "SCANCEL_STATE": "PENDING",
        "SRUN_CONTAINER": "x",
        "SALLOC_QOS": "x",
        "SLURMISH": "kept",
    }
    assert set(slurm_environment(given)) == {"PATH", "HOME", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURMISH"}


@pytest.mark.parametrize("name", ["sbatch", "squeue", "sacct"])
def test_every_command_is_called_without_it(
    program: Program, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = program(name, "print('Submitted batch job 7')")
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SQUEUE_FORMAT", "%A")
    {
        "sbatch": lambda: (submit_script(Path("/x/job.sbatch")), estimate_start(Path("/x/job.sbatch"))),
        "squeue": lambda: query_queue(["7"]),
        "sacct": lambda: query_accounting(["7"]),
    }[name]()
    for _, environ in calls_of(calls):
        assert not {"SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT"} & set(environ)


# sbatch


def test_a_job_id_is_taken_from_what_sbatch_says(program: Program) -> None:
    calls = program("sbatch", "print('Submitted batch job 1234 on cluster alpha')")
    assert submit_script(Path("/x/a b/job.sbatch")) == "1234"
    assert [argv for argv, _ in calls_of(calls)] == [["/x/a b/job.sbatch"]]


def test_what_sbatch_refuses_is_told_in_its_own_words(program: Program) -> None:
    program(
        "sbatch",
        "sys.exit('sbatch: error: invalid partition specified: nope\\n"
        "sbatch: error: Batch job submission failed: Invalid partition name specified')",
    )
    what, _ = fault_of(lambda: submit_script(Path("job.sbatch")))
    assert what == (
        "sbatch refused: error: invalid partition specified: nope "
        "error: Batch job submission failed: Invalid partition name specified"
    )


def test_a_refusal_without_a_word_or_with_bytes_that_are_no_text(program: Program) -> None:
    program("sbatch", "sys.exit(3)")
    assert fault_of(lambda: submit_script(Path("x")))[0] == "sbatch refused: exit code 3"
    program("sbatch", "os.write(2, b'sbatch: error: caf\\xe9'); sys.exit(1)")
    assert fault_of(lambda: submit_script(Path("x")))[0] == "sbatch refused: error: caf\ufffd"


def test_an_answer_without_a_job_id_is_no_submission(program: Program) -> None:
    program("sbatch", "print('nothing to see')")
    assert (
        fault_of(lambda: submit_script(Path("x")))[0] == "sbatch answered without a job id: 'nothing to see'"
    )


def test_a_machine_without_slurm_is_told_what_to_do(program: Program) -> None:
    what, remedy = fault_of(lambda: submit_script(Path("x")))
    assert what == "sbatch is not on this machine's PATH"
    assert remedy == "run tp on a login node of the cluster, or use --profile local"


def test_an_sbatch_that_may_not_be_run(program: Program) -> None:
    program("sbatch").parent.joinpath("bin/sbatch").chmod(stat.S_IRUSR)
    assert fault_of(lambda: submit_script(Path("x")))[0] == "sbatch cannot be run: Permission denied"


def test_an_sbatch_that_hangs_is_ended_and_the_doubt_is_told(program: Program) -> None:
    program("sbatch", "time.sleep(60)")
    begun = time.monotonic()
    what, remedy = fault_of(lambda: run_slurm(["sbatch", "x"], timeout_s=0.5))
    assert time.monotonic() - begun < 10
    assert what == "sbatch did not answer within 0.5 s, and may have queued the job all the same"
    assert remedy == "look with: squeue --me"


def test_an_estimate_is_one_line_and_never_an_error(program: Program) -> None:
    program(
        "sbatch",
        "sys.exit('sbatch: Job 7 to start at 2026-01-14T09:30:12 using 64 processors on nodes n[1-2]')",
    )
    assert estimate_start(Path("x")) == "2026-01-14 09:30:12 on n[1-2]"
    program(
        "sbatch",
        "sys.exit('sbatch: Job 7 to start at 2026-01-14T09:30:12 using 8 processors on nodes n1 in partition a')",
    )
    assert estimate_start(Path("x")) == "2026-01-14 09:30:12 on n1, partition a"
    program(
        "sbatch", "sys.exit('sbatch: error: QOSMaxGRESPerUser\\nallocation failure: Job violates limits')"
    )
    assert estimate_start(Path("x")) == "error: QOSMaxGRESPerUser allocation failure: Job violates limits"


def test_an_estimate_that_nobody_gives(program: Program) -> None:
    assert estimate_start(Path("x")) == "no estimate: sbatch is not on this machine's PATH"


# squeue

SQUEUE = """\
18|FAILED|n2|NonZeroExitCode
19|RUNNING|n[2-3]|None
20_0|RUNNING|n2|None
20_[2-3%1]|PENDING||JobArrayTaskLimit
22|PENDING||(ReqNodeNotAvail, UnavailableNodes:n1)
23|CANCELLED||JobHeldUser
24|COMPLETING|n2|None
25|PENDING||a site's | own reason

slurm_load_jobs error: nonsense
"""


def test_squeues_lines_are_jobs() -> None:
    found = parse_squeue(SQUEUE)
    assert found == {
        "18": SlurmJob("18", "FAILED", "NonZeroExitCode", None, "n2"),
        "19": SlurmJob("19", "RUNNING", "", None, "n[2-3]"),
        "20_0": SlurmJob("20_0", "RUNNING", "", None, "n2"),
        "20_[2-3%1]": SlurmJob("20_[2-3%1]", "PENDING", "JobArrayTaskLimit", None, ""),
        "22": SlurmJob("22", "PENDING", "(ReqNodeNotAvail, UnavailableNodes:n1)", None, ""),
        "23": SlurmJob("23", "CANCELLED", "", None, ""),
        "24": SlurmJob("24", "COMPLETING", "", None, "n2"),
        "25": SlurmJob("25", "PENDING", "a site's | own reason", None, ""),
    }


def test_many_jobs_are_asked_for_in_few_calls(program: Program) -> None:
    calls = program(
        "squeue", "ids = sys.argv[4].split('=')[1].split(',')\nprint(ids[0] + '|RUNNING|n1|None')"
    )
    answer = query_queue([str(n) for n in range(12_000)])
    argvs = [argv for argv, _ in calls_of(calls)]
    assert len(argvs) == 3
    assert argvs[0][:3] == ["--noheader", "--array", "--states=all"]
    assert argvs[0][4:] == ["--all", f"--format=%i|%T|%N|%r{FOLDER_MARK}%Z"]
    assert set(answer.jobs) == {"0", "5000", "10000"} and answer.refused == ""


def test_a_single_unknown_job_is_no_silence_of_slurm(program: Program) -> None:
    program("squeue", "sys.exit('slurm_load_jobs error: Invalid job id specified')")
    assert query_queue(["99999"]) == Answer({}, "")


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (
            "sys.exit('slurm_load_jobs error: Unable to contact slurm controller (connect failure)')",
            "squeue refused: slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        ),
        (None, "squeue is not on this machine's PATH"),
    ],
)
def test_silence_of_slurm_is_told_apart_from_its_not_knowing(
    program: Program, body: str | None, refused: str
) -> None:
    if body:
        program("squeue", body)
    assert query_queue(["7"]) == Answer({}, refused)


# sacct

SACCT = """\
18|FAILED|3:0|n2|None
19|CANCELLED by {uid}|0:15|n2|None
20_1|COMPLETED|0:0|n2|None
20_[2-3%1]|PENDING|0:0|None assigned|None
21|FAILED|0:9|n2|None
22|TIMEOUT|0:0|n1|TimeLimit
23|FAILED|0:53|n2|JobLaunchFailure
24|CANCELLED by 4294967294|0:0|None assigned|None
25|OUT_OF_MEMORY|0:125|n1|OutOfMemory
26|COMPLETED|junk||
27
"""


def test_saccts_lines_are_jobs_with_exit_codes_as_a_shell_has_them() -> None:
    found = parse_sacct(SACCT.format(uid=os.getuid()))
    me = pwd.getpwuid(os.getuid()).pw_name
    assert found == {
        "18": SlurmJob("18", "FAILED", "", 3, "n2"),
        "19": SlurmJob("19", "CANCELLED", f"by {me}", 143, "n2"),
        "20_1": SlurmJob("20_1", "COMPLETED", "", 0, "n2"),
        "20_[2-3%1]": SlurmJob("20_[2-3%1]", "PENDING", "", 0, ""),
        "21": SlurmJob("21", "FAILED", "", 137, "n2"),
        "22": SlurmJob("22", "TIMEOUT", "TimeLimit", 0, "n1"),
        "23": SlurmJob("23", "FAILED", "JobLaunchFailure", 53, "n2"),
        "24": SlurmJob("24", "CANCELLED", "by 4294967294", 0, ""),
        "25": SlurmJob("25", "OUT_OF_MEMORY", "OutOfMemory", 137, "n1"),
        "26": SlurmJob("26", "COMPLETED", "", None, ""),
    }


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(("0:0", 0), ("1:0", 1), ("255:0", 255), ("0:9", 137), ("0:15", 143), ("0:53", 53), ("0:125", 137)),
        *(("7", 7), ("2:9", 2)),
        *((text, None) for text in ("", ":", "x:0", "-1:0", "0:x", "0:", "²:0", "0:0:0")),
    ],
)
def test_an_exit_code_of_slurm(text: str, code: int | None) -> None:
    assert parse_code(text) == code


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ("sys.exit('Slurm accounting storage is disabled')", ""),
        (None, ""),
        (
            "sys.exit('sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection')",
            "sacct refused: error: slurm_persist_conn_open_without_init: failed to open persistent connection",
        ),
    ],
)
def test_a_site_without_accounting_has_nothing_to_say_and_one_whose_database_is_down_does(
    program: Program, body: str | None, refused: str
) -> None:
    if body:
        program("sacct", body)
    assert query_accounting(["7"]) == Answer({}, refused)


def test_of_sacct_only_jobs_are_asked_not_their_steps(program: Program) -> None:
    calls = program("sacct", "print('7|COMPLETED|0:0|n1|None')")
    assert query_accounting(["7", "8"]).jobs == {"7": SlurmJob("7", "COMPLETED", "", 0, "n1")}
    ((argv, _),) = calls_of(calls)
    assert argv == [
        *("--noheader", "--parsable2", "--allocations", "--jobs=7,8"),
        "--format=JobID,State,ExitCode,NodeList,Reason,WorkDir",
    ]


def test_a_job_is_a_runs_only_where_it_works_in_its_folder(tmp_path: Path) -> None:
    """Another cluster of the same files, or a controller that was set up anew, counts from 1 again."""
    mine = f"7|RUNNING|n1|None{FOLDER_MARK}{tmp_path}"
    other = f"8|RUNNING|n1|a | b{FOLDER_MARK}/home/somebody"
    answer = Answer(
        {**parse_squeue(f"{mine}\n{other}\n"), **parse_sacct("9|FAILED|3:0|n1|None|/elsewhere\n")}
    )
    assert answer.job_of(tmp_path, "7") == SlurmJob("7", "RUNNING", "", None, "n1", str(tmp_path))
    assert answer.jobs["8"].reason == "a | b"
    assert (
        answer.job_of(tmp_path, "8") is answer.job_of(tmp_path, "9") is answer.job_of(tmp_path, "10") is None
    )


def test_nobody_is_asked_for_no_job(program: Program) -> None:
    assert query_queue([]) == query_accounting([]) == Answer()


# GPUs in flight


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("2    gres:gpu:h200:8    cpu=96,mem=3000G,node=2,billing=96,gres/gpu=16", 16),
        ("2    gres:gpu:h200:8    cpu=96,gres/gpu=16,gres/gpu:h200=16", 16),
        ("2    gres:gpu:h200:8    cpu=96,gres/gpu:h200=16", 16),
        ("2    gres:gpu:h200:8    cpu=96,mem=3000G,node=2,billing=96", 16),
        ("2    gres:gpu:h200:8(S:0-1)    N/A", 16),
        ("2    gres/gpu:8    N/A", 16),
        ("3    gres:gpu    N/A", 3),
        ("1    gres:gpu:a100:2,gres:gpu:v100:1    N/A", 3),
        ("1    gres:gpu:2g.10gb:4    N/A", 4),
        ("2    N/A    cpu=2,node=2,gres/gpu=4", 4),
        ("1    N/A    cpu=1,mem=4G,node=1,billing=1", 0),
        ("1    gres:shard:4    gres/gpumem=80", 0),
        ("", 0),
        ("one two three", 0),
    ],
)
def test_gpus_of_a_line_of_squeue(line: str, gpus: int) -> None:
    assert gpus_in_flight(line) == gpus


@pytest.mark.contract("C45")
def test_a_users_cap_on_gpus_in_flight_is_refused_with_the_numbers(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = program("squeue", "print('2  gres:gpu:8  gres/gpu=16')\nprint('1  N/A  gres/gpu=4')")
    monkeypatch.setenv("LOGNAME", "somebody-else")
    check_in_flight(24, 4, "hpc@example.org")
    with pytest.raises(UsageError) as caught:
        check_in_flight(24, 8, "hpc@example.org")
    (fault,) = caught.value.faults
    assert fault.what == "you have 20 GPUs in flight and ask for 8: this site's cap on a user is 24"
    assert fault.remedy == "wait for a run to end, stop one (tp job ls), or ask hpc@example.org"
    assert all(f"--user={os.getuid()}" in argv for argv, _ in calls_of(calls)), "whoever $LOGNAME says one is"


def test_a_cap_that_cannot_be_counted_is_told(program: Program) -> None:
    program("squeue", "sys.exit('squeue: error: Unable to contact slurm controller')")
    with pytest.raises(OperationError, match="Unable to contact slurm controller"):
        check_in_flight(8, 1, "x")
