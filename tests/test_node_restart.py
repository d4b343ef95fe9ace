"""Restarts as an attempt ends: by which cause, and whatever is killed half-way. Slurm is a small program here,
which keeps its jobs in a file and kills whom a test says."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_fixture import Run, make_run

from tuneplane.kernel.runfolder import noted_jobs
from tuneplane.node import chain, outcome
from tuneplane.node.outcome import judge
from tuneplane.node.progress import Progress, has_progressed, read_progress
from tuneplane.node.restart import NODE_FAILURE, PREEMPTION, WALLTIME, SlurmWord, cause_of, read_word
from tuneplane.spec import Output, Restart, dump

JOB = "4242"

SLURM = f"""#!{sys.executable} -I
import json, os, pathlib, signal, sys, time
state = pathlib.Path(__file__).resolve().parent / "slurm.json"
known = json.loads(state.read_text())
name, words = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
said = " ".join([name, *(w for w in words if not w.startswith("-"))][:2])

def kill(when):
    if known["kills"] and known["kills"][0] == [said, when]:
        known["kills"].pop(0)
        state.write_text(json.dumps(known))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)

kill("before")
known["calls"].append([name, *words])
refused = known["refuses"].get(said)
out, code = "", 0
if refused:
    print(refused, file=sys.stderr)
    code = 1
elif said == "scontrol show":
    job = known["jobs"][words[-1]]
    out = f"JobId={{words[-1]}} JobName=x JobState={{job['state']}} StartTime={{int(time.time()) - 100}} "
    out += f"TimeLimit=00:03:00 PreemptTime={{job.get('preempted', 'None')}} "
    out += f"Restarts={{job.get('restarts', 0)}}"
elif said == "scontrol requeue":
    known["jobs"][words[-1]]["state"] = "PENDING"
elif name == "sbatch" and sum(w.count(",") + 1 for w in words if "--exclude=" in w) > known["nodes"]:
    print("sbatch: error: Requested node configuration is not available", file=sys.stderr)
    code = 1
elif name == "sbatch":
    new = str(5000 + len(known["jobs"]))
    known["jobs"][new] = {{"state": "PENDING", "folder": str(pathlib.Path(words[-1]).parent)}}
    out = new
elif name == "squeue":
    there = [(i, j) for i, j in known["jobs"].items() if j["state"] in ("PENDING", "RUNNING", "COMPLETING")]
    out = "\\n".join(f"{{i}}|{{i}}_N/A|{{j['state']}}|{{j['folder']}}" for i, j in there)
state.write_text(json.dumps(known))
kill("after")
if out:
    print(out)
sys.exit(code)
"""


class Slurm:
    """The small Slurm of one run, whose own job is JOB."""

    def __init__(self, run: Run) -> None:
        self.run, self.state = run, run.bin / "slurm.json"
        run.bin.mkdir(exist_ok=True)
        for name in ("scontrol", "squeue", "sbatch", "scancel"):
            path = run.bin / name
            path.unlink(missing_ok=True)
            path.write_text(SLURM)
            path.chmod(0o755)
        job = {"state": "RUNNING", "folder": str(run.path)}
        self.write({"jobs": {JOB: job}, "calls": [], "kills": [], "refuses": {}, "nodes": 4})

    def read(self) -> dict[str, Any]:
        return dict(json.loads(self.state.read_text()))

    def write(self, known: dict[str, Any]) -> None:
        self.state.write_text(json.dumps(known))

    def set(self, **values: Any) -> None:
        self.write({**self.read(), **values})

    def waiting(self) -> list[str]:
        """Jobs of the run that will start."""
        return [job_id for job_id, job in self.read()["jobs"].items() if job["state"] == "PENDING"]

    def calls(self, name: str) -> list[list[str]]:
        return [call[1:] for call in self.read()["calls"] if call[0] == name]


def goes_on(run: Run, way: str = "requeue", most: int = 3) -> Slurm:
    """Attempt 0 of a run that may go on has saved and ended with 0 after the stop marker."""
    outputs = [Output("checkpoints", "checkpoints/*")]
    spec = dataclasses.replace(run.job.spec, restart=Restart(most, way), outputs=outputs)
    run.folder.job.chmod(0o600)
    run.folder.job.write_text(dump(dataclasses.replace(run.job, spec=spec)))
    slurm = Slurm(run)
    assert run.claimed(job_id=int(JOB)) == 0
    write_node(run, 0, code=0)
    run.attempt().stop_marker.touch()
    save(run, "checkpoint-10")
    return slurm


def write_node(run: Run, rank: int, **values: Any) -> None:
    record = {"rank": rank, "host": f"n{rank + 1}", "state": "ended", "told_to_stop": False, "ended_at": 1.0}
    run.attempt().node_record(rank).write_text(json.dumps({**record, **values}))


def save(run: Run, name: str) -> None:
    (run.folder.out / "checkpoints" / name).parent.mkdir(parents=True, exist_ok=True)
    (run.folder.out / "checkpoints" / name).write_text("weights")


def end(run: Run) -> Any:
    """`kernel.pyz end`, as often as the batch script calls it."""
    for _ in range(3):
        done = run.end(code=0)
        if done.returncode <= 128 and done.returncode >= 0:
            break
    return done


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path, "true", nodes=1)


def test_a_run_that_saved_before_its_walltime_is_requeued_once(run: Run) -> None:
    slurm = goes_on(run)
    assert end(run).stdout == "0\n"
    assert slurm.calls("scontrol")[-1] == ["requeue", JOB]
    assert slurm.waiting() == [JOB]
    assert run.end_of()["cause"] == WALLTIME
    assert json.loads(run.attempt().restart.read_text())["cause"] == WALLTIME
    assert json.loads(run.attempt().restarted.read_text())["job_id"] == JOB
    end(run)
    assert len([call for call in slurm.calls("scontrol") if call[0] == "requeue"]) == 1


def test_a_successor_is_the_very_same_script(run: Run) -> None:
    slurm = goes_on(run, way="successor")
    end(run)
    assert slurm.calls("sbatch") == [["--parsable", str(run.folder.script)]]
    assert len(slurm.waiting()) == 1


def test_where_slurm_requeues_no_job_a_successor_does(run: Run) -> None:
    slurm = goes_on(run)
    slurm.set(refuses={"scontrol requeue": "Requested operation is presently disabled for job 4242"})
    end(run)
    assert len(slurm.calls("sbatch")) == 1
    assert json.loads(run.attempt().restarted.read_text())["way"] == "successor"


def next_attempt_loses(run: Run, slurm: Slurm, host: str) -> None:
    """Attempt 0, whose job waits for its lost node, was followed by attempt 1, which loses `host`."""
    jobs = {JOB: "COMPLETING", "4300": "RUNNING"}
    slurm.set(jobs={i: {"state": state, "folder": str(run.path)} for i, state in jobs.items()})
    (run.path / "attempts/0/fence.json").write_text(
        json.dumps({"nodes": [{"rank": 1, "host": "n2"}], "by": 0})
    )
    (run.path / "attempts/0/restarted.json").write_text(json.dumps({"way": "successor", "job_id": "4300"}))
    (run.path / "attempts/0/end.json").write_text(json.dumps({"code": 137, "for_good": False}))
    assert run.claimed(job_id=4300) == 1
    dead = {"nodes": [{"rank": 0, "host": host, "silent_s": 99.0}], "by": 0, "at": time.time() - 99}
    run.attempt(1).fence.write_text(json.dumps(dead))


def test_a_former_job_that_still_waits_for_its_lost_node_is_no_successor(run: Run) -> None:
    slurm = goes_on(run)
    next_attempt_loses(run, slurm, "n3")
    assert run.end(attempt=1, code=137).returncode == 0
    assert slurm.calls("sbatch") == [["--parsable", "--exclude=n2,n3", str(run.folder.script)]]
    assert json.loads(run.attempt(1).restarted.read_text())["job_id"] == slurm.waiting()[0]


def test_where_too_few_nodes_are_left_the_last_dead_one_alone_is_avoided(run: Run) -> None:
    slurm = goes_on(run)
    next_attempt_loses(run, slurm, "n3")
    slurm.set(nodes=1)
    assert run.end(attempt=1, code=137).returncode == 0
    assert slurm.calls("sbatch")[-1] == ["--parsable", "--exclude=n3", str(run.folder.script)]
    assert run.attempt(1).restarted.exists()


STEPS = [
    ("scontrol show", "before"),
    ("scontrol show", "after"),
    ("squeue", "before"),
    ("squeue", "after"),
    ("scontrol requeue", "before"),
    ("scontrol requeue", "after"),
]


@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_an_ender_killed_at_any_step_takes_up_again_and_starts_the_run_once(
    run: Run, step: tuple[str, str]
) -> None:
    slurm = goes_on(run)
    slurm.set(kills=[list(step)])
    assert end(run).stdout == "0\n"
    assert slurm.read()["kills"] == []
    assert slurm.waiting() == [JOB]
    assert len([call for call in slurm.calls("scontrol") if call[0] == "requeue"]) == 1
    assert run.attempt().restarted.exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_ender_killed_around_sbatch_submits_one_successor(run: Run, when: str) -> None:
    slurm = goes_on(run, way="successor")
    slurm.set(kills=[["sbatch", when]])
    slurm.set(kills=[[f"sbatch {run.folder.script}", when]])
    end(run)
    assert slurm.read()["kills"] == []
    assert len(slurm.waiting()) == 1
    assert json.loads(run.attempt().restarted.read_text())["job_id"] == slurm.waiting()[0]


def test_an_intent_that_slurm_refuses_is_kept_with_its_words(run: Run) -> None:
    slurm = goes_on(run, way="successor")
    slurm.set(refuses={f"sbatch {run.folder.script}": "sbatch: error: Invalid account"})
    done = end(run)
    assert "Invalid account" in done.stderr
    assert "Invalid account" in run.attempt().restart_error.read_text()
    assert run.attempt().restart.exists()
    assert not run.attempt().restarted.exists()
    slurm.set(refuses={})
    end(run)
    assert len(slurm.waiting()) == 1


@pytest.mark.parametrize("full", ["note_intent", "write_json"])
def test_a_run_that_saved_onto_a_full_disk_is_not_called_complete(
    run: Run, full: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an end record Slurm's word alone tells of it, and that is the script's exit code."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    goes_on(run)
    monkeypatch.setattr(outcome, "WRITE_S", 0.2)
    monkeypatch.setattr(chain if full == "note_intent" else outcome, full, refuse)
    assert outcome.end(run.folder, 0, 0, run.environment()) == outcome.NOT_NOTED
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert f"tp job resume {run.folder.run_id} goes on" in told


@pytest.mark.parametrize("note", ["stopped", "paused"])
def test_what_was_stopped_or_paused_does_not_go_on(run: Run, note: str) -> None:
    slurm = goes_on(run)
    (run.path / note).write_text(f"{JOB}\n")
    assert noted_jobs(run.path / note) == {JOB}
    end(run)
    assert slurm.waiting() == []
    assert not run.attempt().restart.exists()


def test_a_run_without_progress_ends_with_that_reason_and_keeps_no_secret(run: Run) -> None:
    slurm = goes_on(run)
    (run.folder.out / "checkpoints/checkpoint-10").unlink()
    run.folder.secrets.write_text("A=b\n")
    end(run)
    assert slurm.waiting() == []
    assert run.end_of()["not_restarted"].startswith("no progress: no new checkpoint")
    assert not run.folder.secrets.exists()


def test_a_chain_is_no_longer_than_max_restarts(run: Run) -> None:
    slurm = goes_on(run, most=0)
    end(run)
    assert slurm.waiting() == []
    assert run.end_of()["not_restarted"] == "restarts are off (max_restarts is 0)"


@pytest.mark.slow
def test_a_requeue_by_slurm_itself_is_refused_beyond_it(run: Run) -> None:
    goes_on(run, most=1)
    end(run)
    os.utime(run.attempt().start, (1, 1))
    assert run.claimed(job_id=int(JOB), SLURM_RESTART_COUNT="1") == 1
    os.utime(run.attempt(1).start, (1, 1))
    done = run.claim(job_id=int(JOB), SLURM_RESTART_COUNT="2")
    assert done.returncode == 1
    assert "max_restarts (1) is reached" in done.stderr


def test_a_preemption_after_which_slurm_requeues_by_itself_is_told(run: Run) -> None:
    """Its controller forgets why: what slurmstepd printed of this attempt alone says so."""
    slurm = goes_on(run)
    job = {"state": "COMPLETING", "folder": str(run.path), "restarts": 1}
    slurm.set(jobs={JOB: job})
    run.attempt().stop_marker.unlink()
    write_node(run, 0, code=143, told_to_stop=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%S")
    (run.folder.slurm / f"{JOB}.out").write_text(
        f"error: *** JOB {JOB} ON n1 CANCELLED AT 2001-01-01T00:00:00 DUE TO NODE FAILURE ***\n"
        f"slurmstepd-n1: error: *** JOB {JOB} ON n1 CANCELLED AT {at} DUE TO PREEMPTION ***\n"
    )
    assert run.end(code=143).returncode == 0
    assert run.end_of()["cause"] == PREEMPTION
    assert not run.attempt().restart.exists()
    assert run.end_of()["not_restarted"] == ""
    os.utime(run.attempt().start, (1, 1))
    assert run.claimed(job_id=int(JOB), SLURM_RESTART_COUNT="1") == 1
    assert run.start_of(1)["follows"] == PREEMPTION


def test_a_preemption_beyond_max_restarts_says_that_the_run_stays_ended(run: Run) -> None:
    slurm = goes_on(run, most=0)
    slurm.set(jobs={JOB: {"state": "COMPLETING", "folder": str(run.path), "restarts": 1}})
    write_node(run, 0, code=143, told_to_stop=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%S")
    text = f"*** JOB {JOB} ON n1 CANCELLED AT {at} DUE TO PREEMPTION ***\n"
    (run.folder.slurm / f"{JOB}.out").write_text(text)
    assert run.end(code=143).returncode == 0
    assert run.end_of()["not_restarted"] == "restarts are off (max_restarts is 0)"
    refused = run.claim(job_id=int(JOB), SLURM_RESTART_COUNT="1")
    assert "attempt 0: no restart after it: restarts are off" in refused.stderr


def test_a_restart_that_comes_after_the_runs_end_claims_nothing(run: Run) -> None:
    goes_on(run, way="successor")
    end(run)
    successor = json.loads(run.attempt().restarted.read_text())["job_id"]
    record = json.loads(run.attempt().end.read_text())
    run.attempt().end.write_text(json.dumps({**record, "for_good": True}))
    done = run.claim(job_id=int(successor))
    assert (done.returncode, done.stdout) == (0, "over\n")


NOW = 1_000_000.0
ASKED = {
    "asked_at": NOW,
    "dead": False,
    "warned_s": 120,
    "now": NOW,
}


@pytest.mark.parametrize(
    ("word", "changes", "cause"),
    [
        (SlurmWord("RUNNING", limit_at=NOW + 100), {}, WALLTIME),
        (SlurmWord("RUNNING", limit_at=NOW + 5000), {}, ""),  # USR2 by hand
        (SlurmWord("RUNNING", preempted=True, limit_at=NOW + 5000), {}, PREEMPTION),
        (SlurmWord("COMPLETING", limit_at=NOW + 100), {}, ""),  # scancel by hand, shortly before the limit
        (SlurmWord("COMPLETING", limit_at=NOW - 10), {}, WALLTIME),
        (SlurmWord("COMPLETING", preempted=True), {}, PREEMPTION),
        (SlurmWord("TIMEOUT"), {}, WALLTIME),
        (SlurmWord("CANCELLED"), {}, ""),
        (SlurmWord("NODE_FAIL"), {}, NODE_FAILURE),
        (SlurmWord(), {}, ""),
        (SlurmWord("RUNNING"), {}, ""),  # without a limit
        (SlurmWord(), {"asked_at": None}, ""),
        (SlurmWord("CANCELLED"), {"dead": True}, NODE_FAILURE),
    ],
)
def test_the_cause_decides_whether_a_run_goes_on(
    word: SlurmWord, changes: dict[str, Any], cause: str
) -> None:
    assert cause_of(**{**ASKED, "word": word, **changes}) == cause


def test_slurms_word_is_read_from_its_text() -> None:
    text = "JobId=7 JobName=a b JobState=RUNNING Reason=None TimeLimit=1-02:00:00 StartTime=1000 PreemptTime=None"
    assert read_word(text) == SlurmWord("RUNNING", False, 1000 + 26 * 3600)
    assert read_word("JobState=PENDING StartTime=Unknown TimeLimit=UNLIMITED").limit_at is None
    assert read_word("JobState=RUNNING PreemptTime=1796000000").preempted
    assert read_word("") == SlurmWord()


def test_dead_nodes_are_told_before_those_that_failed_for_want_of_them() -> None:
    nodes = [{"rank": 0, "host": "n1", "code": 1, "ended_at": 5.0}, {"rank": 1, "host": "n2"}]
    found = judge(nodes, 1, False, [{"rank": 1, "host": "n2", "silent_s": 30.2}])
    assert (found.node or {})["host"] == "n2"
    assert found.reason == "n2 has been silent for 30 s: it is dead or cut off"
    assert not found.for_good


@pytest.mark.parametrize(
    ("now", "before", "progressed"),
    [
        (Progress(step=10), [], True),
        (Progress(step=10), [Progress(step=10)], False),
        (Progress(step=11), [Progress(step=10), Progress(step=4)], True),
        (Progress(checkpoints=["c/2"]), [Progress(checkpoints=["c/1"])], True),
        (Progress(step=9, checkpoints=["c/1"], saved_at=99), [Progress(step=9, checkpoints=["c/1"])], False),
        (Progress(checkpoints=["c/last"], saved_at=99), [Progress(checkpoints=["c/last"])], True),
        (Progress(checkpoints=["c/last"], saved_at=10), [Progress(checkpoints=["c/last"])], False),
        (Progress(), [], False),
    ],
)
def test_progress_is_a_new_step_or_a_new_checkpoint(
    now: Progress, before: list[Progress], progressed: bool
) -> None:
    assert has_progressed(now, before, started_at=50) is progressed


def test_progress_is_read_from_points_and_checkpoints_whatever_lies_between_them(run: Run) -> None:
    save(run, "checkpoint-20")
    (run.folder.out / "checkpoints/empty").mkdir()
    (run.folder.out / "checkpoints/gone").symlink_to("/nowhere")
    lines = ['{"n":1,"s":7,"m":{}}', "torn {", '{"s":NaN}', "[1]", "\0\0\0", '{"s":12.0}', '{"s":"x"}']
    (run.folder.ingest / "0-n1-0-1-a.jsonl").write_text("\n".join(lines))
    (run.folder.ingest / "1-n1-0-1-a.jsonl").write_text('{"s":99}\n')
    spec = dataclasses.replace(run.job.spec, outputs=[Output("checkpoints", "checkpoints/*")])
    found = read_progress(run.folder, dataclasses.replace(run.job, spec=spec), 0)
    assert found.step == 12
    assert found.checkpoints == ["checkpoints/checkpoint-20", "checkpoints/gone"]
