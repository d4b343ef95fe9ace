"""Hardware metrics of a run: the SDK's own sampler of rank 0, the node agent's one a node, never both."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import H200, FakeNvml
from interpreters import pythons
from report_job import TOKEN_SHA256, ReportJob
from run_fixture import Run, runs_below, wait_until

from tuneplane.collect.metrics import Metrics, read_metrics
from tuneplane.diagnose.look import read_points
from tuneplane.kernel import env
from tuneplane.kernel.runfolder import is_hardware_file
from tuneplane.node.progress import read_progress
from tuneplane.report import hardware
from tuneplane.report.hardware import monitor, sampler

EVERY_PYTHON = sorted(pythons((3, 9)).items())
HOST = {"cpu_percent", "memory_used_bytes", "disk_read_bytes_per_s", "disk_write_bytes_per_s"}
GPU = {
    f"gpu0/{what}"
    for what in (
        "utilization_percent",
        "memory_used_bytes",
        "memory_percent",
        "power_watts",
        "temperature_celsius",
    )
}

TRAINER = """
import sys, time
from tuneplane.report import init, log, finish
init({"lr": 1}, monitor_hardware=True)
init(monitor_hardware=True)
log({"loss": 0.5}, step=1)
time.sleep(float(sys.argv[1]))
finish()
"""


class OwnJob(ReportJob):
    """Of its own run id: processes are known by it, and tests run side by side."""

    run_id = ""

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(**{"TUNEPLANE_JOB_RUN_ID": self.run_id, **more})

    def metrics(self) -> Metrics:
        return read_metrics(self.folder, self.run_id, TOKEN_SHA256)


@pytest.fixture
def job(tmp_path: Path) -> ReportJob:
    made = OwnJob(tmp_path / "run")
    made.run_id = f"ring-20261129-120000-{secrets.token_hex(2)}"
    return made


def hardware_of(metrics: Metrics, node: int = 0) -> set[str]:
    prefix = f"system/node{node}/"
    return {name[len(prefix) :] for name in metrics.series if name.startswith(prefix)}


def files(folder: Path) -> list[str]:
    """Files of hardware samplers."""
    return sorted(path.name for path in folder.glob("*.jsonl") if is_hardware_file(path.name))


@pytest.mark.contract("C20")
@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
def test_a_trainer_that_asks_for_it_has_hardware_beside_its_loss(
    job: ReportJob, tmp_path: Path, version: str, python: str
) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    done = job.run(TRAINER, "1.5", python=python, **fake.environment)
    assert done.stderr == ""
    metrics = job.metrics()
    assert hardware_of(metrics) >= HOST | GPU
    assert {"network_received_bytes_per_s", "network_sent_bytes_per_s"} <= hardware_of(metrics)
    assert list(metrics.series["loss"].values) == [0.5]
    watts = metrics.series["system/node0/gpu0/power_watts"]
    assert list(watts.values) == [pytest.approx(H200["power"] / 1000)]
    assert watts.steps[0] == pytest.approx(time.time(), abs=30) and watts.steps[0] == int(watts.times_s[0])
    assert (metrics.gaps, metrics.refused) == (0, {})


@pytest.mark.contract("C20")
@pytest.mark.parametrize(
    ("launcher", "samples"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "1", "LOCAL_RANK": "1"}, False),
        ({"RANK": "8", "LOCAL_RANK": "0", "TUNEPLANE_MACHINE_RANK": "1"}, False),
        # Two launchers that know nothing of each other, one on each node: both have a rank 0.
        ({"RANK": "0", "LOCAL_RANK": "0", "TUNEPLANE_MACHINE_RANK": "1"}, False),
        ({"TUNEPLANE_JOB_HARDWARE_BRIDGE": "1"}, False),
        ({"TUNEPLANE_JOB_HARDWARE_BRIDGE": "yes"}, False),
        ({"TUNEPLANE_JOB_HARDWARE_BRIDGE": "0"}, True),
        ({"TUNEPLANE_JOB_HARDWARE_BRIDGE": " False "}, True),
        ({"TUNEPLANE_JOB_TOKEN": ""}, False),
    ],
    ids=str,
)
def test_one_process_of_a_job_samples_and_none_where_the_platform_does(
    job: ReportJob, launcher: dict[str, str], samples: bool
) -> None:
    done = job.run(
        """
        import threading
        from tuneplane.report import init
        init(monitor_hardware=True, all_ranks=True)
        print([t.name for t in threading.enumerate() if t.name == "tuneplane-hardware"])
        """,
        **launcher,
    )
    assert done.stdout == ("['tuneplane-hardware']\n" if samples else "[]\n")
    assert done.stderr == ""


def test_it_is_started_by_who_asks_alone(job: ReportJob) -> None:
    job.run("import time; from tuneplane.report import init, log; init(); log({'a': 1}); time.sleep(1.3)")
    assert files(job.ingest) == []


def test_finish_ends_it_and_init_begins_anew(job: ReportJob) -> None:
    done = job.run(
        """
        import threading, time
        from tuneplane.report import init, finish
        def sampling():
            time.sleep(0.2)
            return sum(t.name == "tuneplane-hardware" for t in threading.enumerate())
        init(monitor_hardware=True)
        print(sampling())
        finish()
        print(sampling())
        for _ in range(5):
            init(monitor_hardware=True)
            finish()
        print(sum(t.name == "tuneplane-report" for t in threading.enumerate()) <= 2)
        init(monitor_hardware=True)
        print(sampling())
        """
    )
    assert done.stdout == "1\n0\nTrue\n1\n"


def test_forked_workers_do_not_sample_what_their_parent_samples(job: ReportJob) -> None:
    done = job.run(
        """
        import os, sys, threading, time
        from tuneplane.report import init, log
        init(monitor_hardware=True)
        time.sleep(0.2)
        child = os.fork()
        if not child:
            init(monitor_hardware=True); log({"worker": 1})
            names = [t.name for t in threading.enumerate()]
            os._exit("tuneplane-hardware" in names)
        _, status = os.waitpid(child, 0)
        time.sleep(1.2)
        print(os.waitstatus_to_exitcode(status))
        """
    )
    assert done.stdout == "0\n"
    assert len(files(job.ingest)) == 1


INTERVALS = [("1.5", 1.5), ("", 10.0), ("0", None), ("0.2", None), ("-3", None), ("nan", None), ("1e9", None)]


@pytest.mark.parametrize(("text", "interval_s"), [*INTERVALS, ("ten\nseconds", None), ("60", 60.0)])
def test_the_interval_is_the_environments_and_nonsense_is_said_once(
    job: ReportJob, text: str, interval_s: float | None
) -> None:
    program = """
    from tuneplane.report import init, finish, _process
    init(monitor_hardware=True); init(monitor_hardware=True)
    print(_process.session._monitor._interval_s)
    finish()
    """
    done = job.run(program, TUNEPLANE_JOB_MONITOR_INTERVAL=text)
    assert float(done.stdout) == (interval_s or 10.0)
    if interval_s is None:
        assert done.stderr == (
            f"tuneplane: TUNEPLANE_JOB_MONITOR_INTERVAL is {text!r}, no number of seconds from 1 to 86400:"
            " hardware is sampled every 10 s\n"
        )
    else:
        assert done.stderr == ""


@pytest.mark.slow
def test_it_samples_at_the_interval(job: ReportJob) -> None:
    job.run(TRAINER, "3.6", TUNEPLANE_JOB_MONITOR_INTERVAL="1")
    assert len(job.metrics().series["system/node0/cpu_percent"]) in (3, 4)


def test_a_gpu_that_hangs_holds_up_neither_training_nor_its_end(job: ReportJob, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    fake.gpus([H200], hang_s=60)
    done = job.run(
        """
        import time
        start = time.perf_counter()
        from tuneplane.report import init, log, finish
        init(monitor_hardware=True)
        longest = 0
        for step in range(200):
            before = time.perf_counter()
            log({"loss": 1}, step=step)
            longest = max(longest, time.perf_counter() - before)
            time.sleep(0.002)
        finish()
        print(longest, time.perf_counter() - start)
        """,
        **fake.environment,
    )
    longest, whole = map(float, done.stdout.split())
    assert longest < 0.5 and whole < 10
    assert len(job.metrics().series["loss"]) == 200


@pytest.mark.slow
def test_a_gone_ingest_folder_is_no_matter_of_the_trainers(job: ReportJob) -> None:
    done = job.run(TRAINER, "1.3", TUNEPLANE_JOB_ENDPOINT="file:///nowhere/at/all")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_where_training_took_up_again_hardware_of_earlier_attempts_stays(job: ReportJob) -> None:
    for attempt, step in (("0", 10), ("1", 5)):
        job.run(
            """
            import sys, time
            from tuneplane.report import init, log
            init(monitor_hardware=True, resume_step=int(sys.argv[1]))
            log({"loss": 1}, step=int(sys.argv[1]))
            time.sleep(1.4)
            """,
            str(step),
            TUNEPLANE_JOB_ATTEMPT=attempt,
        )
    series = job.metrics().series
    memory = series["system/node0/memory_used_bytes"]
    assert list(memory.attempts) == [0, 1] and not memory.hidden
    assert len(series["loss"].hidden[0]) == 1


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("0-n1-hardware0-12-abc.jsonl", True),
        ("10-n_1-hardware31-12-abc.jsonl", True),
        ("0-n1-0-12-abc.jsonl", False),
        ("0-hardware1-0-12-abc.jsonl", False),  # a host of this name
        ("0-hardware1-hardware0-12-abc.jsonl", True),
        ("-hardware", False),
        ("", False),
    ],
)
def test_a_hardware_file_is_known_by_its_name(name: str, is_one: bool) -> None:
    assert is_hardware_file(name) == is_one


def test_the_names_are_those_of_the_contract() -> None:
    assert (monitor.INTERVAL, hardware.BRIDGE) == (env.MONITOR_INTERVAL, env.HARDWARE_BRIDGE)
    assert sampler.CPUS in {variable.name for variable in env.VARIABLES}
    assert sampler.VISIBLE_DEVICES in {variable.name for variable in env.VARIABLES}


# The node agent's


MakeRun = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:

        def run(train: str, **more: object) -> Run:
            environment = {"TUNEPLANE_JOB_MONITOR_INTERVAL": "1", **more.pop("environment", {})}  # type: ignore[dict-item]
            given = {"observability": "platform", "url": None, "environment": environment, **more}
            return make_one(train, **given)

        yield run


ASKS = f"""\
echo up "bridge=$TUNEPLANE_JOB_HARDWARE_BRIDGE"
{sys.executable} -c '
import threading, time
from tuneplane.report import init, log, finish
init(monitor_hardware=True)
log({{"loss": 0.5}}, step=7)
print("threads", [t.name for t in threading.enumerate() if "hardware" in t.name])
time.sleep(1.6)
finish()'
"""


def metrics_of(run: Run) -> Metrics:
    return read_metrics(run.path, run.job.metadata.run_id, run.job.spec.reporting.token_sha256)


@pytest.mark.slow
@pytest.mark.contract("C20")
def test_the_agent_samples_each_node_and_the_trainer_then_does_not(make: MakeRun) -> None:
    run = make(ASKS, nodes=2)
    run.claimed()
    nodes = [run.start_node(nodes=2, rank=rank) for rank in (0, 1)]
    for node in nodes:
        assert run.finish(node).returncode == 0, run.log()
    for rank in (0, 1):
        assert "up bridge=1\n" in run.log(rank) and "threads []\n" in run.log(rank)
    names = files(run.folder.ingest)
    assert [name.split("-")[2] for name in sorted(names, key=lambda n: n.split("-")[2])] == [
        "hardware0",
        "hardware1",
    ]
    metrics = metrics_of(run)
    assert hardware_of(metrics, 0) >= HOST and hardware_of(metrics, 1) >= HOST
    assert not any(name.startswith("gpu") for name in hardware_of(metrics)), "the run has no GPUs"
    assert not any("@rank" in name for name in metrics.series)
    assert metrics.refused == {} and metrics.gaps == 0
    assert run.record()["code"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "agent", "trainer"),
    [
        ({"observability": "external", "url": ""}, False, True),
        ({"reporting": False}, False, False),
        ({"environment": {"TUNEPLANE_JOB_HARDWARE_BRIDGE": "1"}}, False, False),
        ({"environment": {"TUNEPLANE_JOB_HARDWARE_BRIDGE": "0"}}, False, True),
    ],
    ids=["external", "reporting is off", "the site has its own", "the site leaves it to the trainer"],
)
def test_where_the_agent_does_not_sample_the_trainer_may(
    make: MakeRun, more: dict[str, Any], agent: bool, trainer: bool
) -> None:
    on_path = f'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"\n{ASKS}'
    run = make(on_path, **more)
    assert run.run_once().returncode == 0, run.log()
    assert ("threads ['tuneplane-hardware']" in run.log()) == trainer
    assert len(files(run.folder.ingest)) == int(agent or trainer)


@pytest.mark.slow
def test_the_gpus_are_those_that_slurm_gave_to_the_node(make: MakeRun, tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml")
    fake.gpus([{**H200, "power": 1000 * (index + 1)} for index in range(4)])
    run = make("sleep 1.7", device="gpu", per_node=2)
    given = {"CUDA_VISIBLE_DEVICES": "3,1", "SLURM_GPUS_ON_NODE": "2", **fake.environment}
    assert run.run_once(**given).returncode == 0, run.log()
    series = metrics_of(run).series
    assert {name.split("/")[2] for name in series if "/gpu" in name} == {"gpu0", "gpu1"}
    assert [series[f"system/node0/gpu{i}/power_watts"].values[0] for i in (0, 1)] == [4, 2]


@pytest.mark.slow
def test_a_trainer_that_hangs_and_one_that_reports_nothing_are_still_seen_as_such(make: MakeRun) -> None:
    """Samples are no sign of life of the training, no points of it, and no progress."""
    run = make("sleep 1.7")
    assert run.run_once().returncode == 0
    assert len(files(run.folder.ingest)) == 1
    seen = read_points(run.folder.ingest, run.job.metadata.run_id, run.job.spec.reporting.token_sha256)
    assert (seen.files, seen.points, seen.newest_age_s) == (0, False, None)
    assert read_progress(run.folder, run.job, 0).step is None


@pytest.mark.slow
def test_its_last_sample_is_written_and_nothing_waits_for_it(make: MakeRun) -> None:
    run = make("echo up; trap 'exit 3' TERM; while :; do sleep 0.05; done")
    node = run.start_node(run.claimed())
    run.wait_for_line("up")
    wait_until(lambda: hardware_of(metrics_of(run)), "the first sample")
    told_at = time.monotonic()
    node.send_signal(signal.SIGTERM)
    assert run.finish(node).returncode == 3
    assert time.monotonic() - told_at < 5
    (path,) = list(run.folder.ingest.glob("*.jsonl"))
    assert json.loads(path.read_text().splitlines()[-1])["m"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_an_ingest_that_cannot_be_written_is_no_matter_of_the_run(make: MakeRun) -> None:
    run = make('rm -r "$TUNEPLANE_OUT_DIR/../ingest"; sleep 1.5; echo done')
    done = run.run_once()
    assert (done.returncode, done.stderr) == (0, "")
    assert run.log().endswith("done\n") and run.record()["code"] == 0
