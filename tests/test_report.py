"""`tuneplane.report` as a trainer sees it: init, log, finish, should_stop in a real process of a job."""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from interpreters import pythons
from report_job import REPOSITORY, RUN_ID, TOKEN_SHA256, ReportJob

from tuneplane.kernel import env
from tuneplane.report import ingest

EVERY_PYTHON = sorted(pythons((3, 9)).items())


@pytest.fixture
def job(tmp_path: Path) -> ReportJob:
    return ReportJob(tmp_path / "run")


@pytest.mark.contract("C15")
def test_a_trainer_logs_and_finds_its_curves(job: ReportJob) -> None:
    done = job.run(
        """
        from tuneplane.report import init, log, finish
        init(hparams={"lr": 0.1, "model": {"layers": 2}})
        for step in range(10):
            log({"loss": 1 / (step + 1), "optim": {"lr": 0.1}}, step=step)
        log({"loss": 0.5, "eval/loss": 0.6}, step=9, prefix="validation")
        finish()
        """
    )
    assert (done.stdout, done.stderr) == ("", "")
    metrics = job.metrics()
    assert sorted(metrics.series) == ["eval/loss", "loss", "optim/lr", "validation/loss"]
    loss = metrics.series["loss"]
    assert list(loss.steps) == list(range(10))
    assert list(loss.values) == pytest.approx([1 / (step + 1) for step in range(10)], rel=1e-8)
    assert metrics.hparams == {"lr": 0.1, "model": {"layers": 2}}
    assert (metrics.gaps, metrics.torn_lines, metrics.dropped_points, metrics.dropped_values) == (0, 0, 0, 0)
    assert 0 <= metrics.age_s() < 60  # type: ignore[operator]


@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
def test_every_python_of_an_image_reports_the_same(job: ReportJob, version: str, python: str) -> None:
    job.run(
        """
        from tuneplane.report import init, log, finish
        init({"lr": 0.1})
        log({"loss": 0.5, "nan": float("nan"), "word": "x"})
        finish()
        """,
        python=python,
    )
    metrics = job.metrics()
    assert list(metrics.series["loss"].values) == [0.5]
    assert math.isnan(metrics.series["nan"].values[0])
    assert (metrics.hparams, metrics.dropped_values) == ({"lr": 0.1}, 1)


def test_log_without_init_or_finish_is_enough(job: ReportJob) -> None:
    job.run("from tuneplane.report import log; log({'loss': 0.5})")
    assert list(job.metrics().series["loss"].values) == [0.5]


def test_without_a_step_log_counts_by_itself_and_goes_on_from_steps_given(job: ReportJob) -> None:
    job.run(
        """
        from tuneplane.report import log
        for _ in range(3):
            log({"a": 1})
        log({"a": 1}, step=10)
        log({"a": 1}, step=4)   # late, and legal
        log({"a": 1})
        """
    )
    assert list(job.metrics().series["a"].steps) == [0, 1, 2, 4, 10, 11]


def test_steps_may_be_what_libraries_make_of_them(job: ReportJob) -> None:
    done = job.run(
        """
        from decimal import Decimal
        from tuneplane.report import log
        class Zero_d:
            def item(self): return 7
        for step in (True, 2.0, 2.5, Decimal(6), Zero_d(), -3, 2**62):
            log({"a": 1}, step=step)
        for step in ("8", None.__class__, float("nan"), float("inf"), 2**63, object(), [1, "x"]):
            log({"a": 1}, step=step)
        """
    )
    assert list(job.metrics().series["a"].steps) == [-3, 1, 2, 2.5, 6, 7, 2**62]
    assert job.metrics().dropped_points == 7
    assert done.stderr.count("\n") == 1 and "step '8' is no 64-bit number" in done.stderr


@pytest.mark.contract("C15")
def test_init_is_idempotent_and_keeps_hparams_told_later(job: ReportJob) -> None:
    job.run(
        """
        from tuneplane.report import init, log
        log({"a": 1})
        for _ in range(3):
            init({"lr": 0.1})
        init()
        init({"lr": 0.1, "seed": 7})
        log({"a": 2})
        """
    )
    assert len(list(job.ingest.iterdir())) == 1
    assert [line for line in job.lines() if "h" in line] == [
        {"n": 1, "t": pytest.approx(time.time(), abs=60), "h": {"lr": 0.1}},
        {"n": 2, "t": pytest.approx(time.time(), abs=60), "h": {"lr": 0.1, "seed": 7}},
    ]
    assert job.metrics().hparams == {"lr": 0.1, "seed": 7}


def test_finish_is_not_the_end_of_logging(job: ReportJob) -> None:
    job.run(
        """
        from tuneplane.report import log, finish
        finish()
        log({"a": 1}); finish(); finish()
        log({"a": 2})
        """
    )
    assert len(list(job.ingest.iterdir())) == 1
    assert list(job.metrics().series["a"].values) == [1, 2] and job.metrics().gaps == 0


def test_the_first_line_says_whose_file_it_is_and_only_the_user_may_read_it(job: ReportJob) -> None:
    job.run("from tuneplane.report import log; log({'a': 1})", TUNEPLANE_JOB_ATTEMPT="2")
    (path,) = job.ingest.iterdir()
    import json

    header = json.loads(path.read_text().splitlines()[0])
    assert header.pop("pid") > 0 and header.pop("host") and header.pop("tuneplane")
    assert header.pop("started") == pytest.approx(time.time(), abs=60)
    assert header == {"v": 1, "run_id": RUN_ID, "attempt": 2, "rank": 0, "token_sha256": TOKEN_SHA256}
    assert path.name.startswith("2-") and path.suffix == ".jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "a-token-that-nobody-else-has" not in path.read_text()


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ({}, [0]),
        ({"TUNEPLANE_MACHINE_RANK": "1"}, []),
        ({"RANK": "0", "TUNEPLANE_MACHINE_RANK": "1"}, [0]),
        ({"RANK": "8", "LOCAL_RANK": "0", "TUNEPLANE_MACHINE_RANK": "1"}, []),
        ({"LOCAL_RANK": "1"}, []),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", "TUNEPLANE_MACHINE_RANK": "1"}, []),
        ({"RANK": "not a number"}, [0]),
    ],
    ids=str,
)
def test_the_global_rank_0_alone_reports(job: ReportJob, launcher: dict[str, str], ranks: list[int]) -> None:
    job.run("from tuneplane.report import init, log; init({'lr': 1}); log({'a': 1})", **launcher)
    assert bool(list(job.ingest.iterdir())) == bool(ranks)


def test_every_rank_reports_where_asked_to(job: ReportJob) -> None:
    for rank in ("0", "1", "10"):
        job.run(
            """
            import os
            from tuneplane.report import init, log
            log({"early": 1})
            init(all_ranks=True)
            log({"loss": int(os.environ["RANK"])})
            """,
            RANK=rank,
        )
    series = job.metrics().series
    assert sorted(series) == ["early", "loss", "loss@rank1", "loss@rank10"]
    assert [list(series[name].values) for name in ("loss", "loss@rank1", "loss@rank10")] == [[0], [1], [10]]


OUTSIDE = [
    {"TUNEPLANE_JOB_TOKEN": ""},
    {"TUNEPLANE_JOB_ENABLED": "0"},
    {"TUNEPLANE_JOB_TOKEN": "", "TUNEPLANE_JOB_ENABLED": "", "TUNEPLANE_JOB_ENDPOINT": ""},
]


@pytest.mark.contract("C17")
@pytest.mark.parametrize("outside", OUTSIDE, ids=str)
def test_outside_a_job_every_call_does_nothing_and_costs_next_to_nothing(
    job: ReportJob, outside: dict[str, str]
) -> None:
    done = job.run(
        """
        import sys, time
        before = set(sys.modules)
        from tuneplane.report import init, log, finish, should_stop
        class Explosive:
            def __getattribute__(self, name): raise AssertionError("it was touched")
        init(Explosive(), monitor_hardware=True)
        log(Explosive()); finish(); assert should_stop() is False
        metrics = {"loss": 0.5}
        start = time.process_time()
        for step in range(100_000):
            log(metrics, step=step)
        print((time.process_time() - start) / 100_000 * 1e6)
        new = {name for name in set(sys.modules) - before if name.startswith("tuneplane.")}
        assert new == {"tuneplane.report", "tuneplane.report.forks", "tuneplane.report.ingest",
                       "tuneplane.report.stop"}, new
        assert "threading" not in sys.modules and "json" not in sys.modules
        """,
        **outside,
    )
    assert float(done.stdout) < 5, f"{done.stdout} µs a call"
    assert done.stderr == "" and not list(job.ingest.iterdir())


@pytest.mark.contract("C18")
@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
def test_nothing_beyond_the_standard_library_is_imported(job: ReportJob, version: str, python: str) -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from tuneplane.report import init, log, finish, should_stop
init({"lr": 1}); log({"loss": 1}); should_stop(); finish()
names = getattr(sys, "stdlib_module_names", None)
loaded = {name.split(".")[0] for name in sys.modules} - {"tuneplane", "__main__"}
print(sorted(loaded - names) if names else sorted(loaded & {"torch", "transformers", "ray", "numpy"}))
ours = ("tuneplane.report", "tuneplane.kernel")
print(sorted(n for n in sys.modules if n.startswith("tuneplane.") and not n.startswith(ours)))
"""
    done = subprocess.run(
        [python, "-I", "-S", "-c", program, str(REPOSITORY)],
        env=job.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n[]\n"
    assert list(job.metrics().series) == ["loss"]


def test_importing_it_takes_a_few_milliseconds(job: ReportJob) -> None:
    """In CPU time, which other work on the machine stretches little; the figure itself is in make bench."""

    def cheapest(program: str) -> float:
        costs = []
        for _ in range(12):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-I", "-c", program], timeout=60, check=True, cwd="/")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(costs)

    place = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})"
    bare = cheapest(place)
    assert cheapest(f"{place}; import tuneplane.report") - bare < 0.015


@pytest.mark.parametrize(
    "endpoint",
    ["", "/no/scheme", "http://example.org/ingest", "file://other-host/x", "file:///a%00b", "file:"],
)
def test_an_endpoint_that_is_no_folder_is_told_once(job: ReportJob, endpoint: str) -> None:
    done = job.run(
        "from tuneplane.report import init, log; init(); log({'a': 1}); log({'a': 1})",
        TUNEPLANE_JOB_ENDPOINT=endpoint,
    )
    assert done.stderr.count("\n") == 1
    assert "tuneplane: reporting has stopped: TUNEPLANE_JOB_ENDPOINT is" in done.stderr


def test_an_ingest_folder_under_any_name_is_found(weird_dir: Path) -> None:
    job = ReportJob(weird_dir / "a\nb #?&+ ~ ü")
    job.run("from tuneplane.report import log; log({'a': 1})")
    assert list(job.metrics().series) == ["a"]


def test_should_stop_needs_only_its_file_and_may_be_asked_at_every_step(
    job: ReportJob, tmp_path: Path
) -> None:
    marker = tmp_path / "stop marker"
    program = """
        import sys, time
        from tuneplane.report import should_stop
        start, steps = time.perf_counter(), 0
        assert should_stop() is False
        while not should_stop():
            steps += 1
            if steps == 1000:
                open(sys.argv[1], "w").close()
                written = time.perf_counter()
            assert time.perf_counter() - start < 30
            time.sleep(0.0001)
        assert should_stop() is True
        print(time.perf_counter() - written)
        """
    bare = {"TUNEPLANE_JOB_TOKEN": "", "TUNEPLANE_JOB_ENDPOINT": "", "TUNEPLANE_STOP_FILE": str(marker)}
    assert float(job.run(program, str(marker), **bare).stdout) < 5
    done = job.run("from tuneplane.report import should_stop; print(should_stop())", **bare)
    assert done.stdout == "True\n", "asked once, it must know at once"


def test_without_a_stop_file_nobody_is_asked_to_stop(job: ReportJob) -> None:
    assert job.run("from tuneplane.report import should_stop; print(should_stop())").stdout == "False\n"


def test_a_forked_worker_asks_for_itself(job: ReportJob, tmp_path: Path) -> None:
    marker = tmp_path / "stop"
    job.run(
        """
        import os, sys
        from tuneplane.report import should_stop
        assert not should_stop()
        open(sys.argv[1], "w").close()
        child = os.fork()
        if not child:
            os._exit(0 if should_stop() else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        str(marker),
        TUNEPLANE_STOP_FILE=str(marker),
    )


def test_the_names_of_the_environment_are_those_of_the_contract() -> None:
    assert (ingest.ENABLED, ingest.ENDPOINT, ingest.RUN_ID, ingest.TOKEN) == (
        env.ENABLED,
        env.ENDPOINT,
        env.RUN_ID,
        env.TOKEN,
    )
    assert (ingest.ATTEMPT, ingest.MACHINE_RANK, ingest.GPUS_PER_NODE) == (
        env.ATTEMPT,
        env.MACHINE_RANK,
        env.GPUS_PER_NODE,
    )
    from tuneplane.report import stop

    assert stop.STOP_FILE == env.STOP_FILE


@pytest.mark.contract("C21")
def test_a_point_is_seen_within_five_seconds_while_the_job_runs(job: ReportJob) -> None:
    trainer = job.start(
        """
        import sys, time
        from tuneplane.report import log
        log({"loss": 0.5})
        print("logged", flush=True)
        time.sleep(60)
        """
    )
    try:
        assert trainer.stdout.readline() == "logged\n"
        start = time.monotonic()
        while "loss" not in job.metrics().series:
            assert time.monotonic() - start < 5
            time.sleep(0.05)
        assert trainer.poll() is None
    finally:
        trainer.kill()
        trainer.communicate()
