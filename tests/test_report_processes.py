"""Reporting from forks, workers, threads and signal handlers, and of values that fail (C16)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from ingest_lines import points
from interpreters import pythons
from report_job import ReportJob

EVERY_PYTHON = sorted(pythons((3, 9)).items())


@pytest.fixture
def job(tmp_path: Path) -> ReportJob:
    return ReportJob(tmp_path / "run")


@pytest.mark.contract("C16")
@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
def test_a_forked_process_reports_for_itself_and_repeats_nothing(
    job: ReportJob, version: str, python: str
) -> None:
    done = job.run(
        """
        import os, sys
        from tuneplane.report import init, log, finish
        init({"lr": 1})
        for step in range(50):
            log({"parent": step}, step=step)
        child = os.fork()
        if child == 0:
            for step in range(50):
                log({"child": step}, step=step)
            grandchild = os.fork()
            if grandchild == 0:
                log({"grandchild": 1}, step=0)
                sys.exit(0)
            os.waitpid(grandchild, 0)
            sys.exit(0)
        for step in range(50, 100):
            log({"parent": step}, step=step)
        os.waitpid(child, 0)
        """,
        python=python,
    )
    assert "Error" not in done.stderr and "tuneplane:" not in done.stderr
    points = [(name, value) for line in job.lines() for name, value in line.get("m", {}).items()]
    assert sorted(points) == sorted(
        [("parent", step) for step in range(100)]
        + [("child", step) for step in range(50)]
        + [("grandchild", 1)]
    )
    assert len(list(job.ingest.iterdir())) == 3 and job.metrics().gaps == 0


def test_forks_in_the_midst_of_logging_neither_hang_nor_repeat(job: ReportJob) -> None:
    job.run(
        """
        import os, sys, threading, time
        from tuneplane.report import log, finish, should_stop
        going = True
        def busy():
            step = 0
            while going:
                log({"busy": step}, step=step); step += 1
        thread = threading.Thread(target=busy); thread.start()
        children = []
        for number in range(40):
            child = os.fork()
            if child == 0:
                log({"child": number}, step=number); should_stop(); finish()
                import signal, json                     # whole, whatever our threads did when we were forked
                os._exit(0 if signal.SIGSEGV and json.dumps else 1)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        going = False; thread.join()
        assert codes == [0] * 40, codes
        """,
        TUNEPLANE_STOP_FILE=str(job.folder / "stop"),
    )
    values = [line["m"]["child"] for line in job.lines() if "child" in line.get("m", {})]
    assert sorted(values) == list(range(40)) and job.metrics().gaps == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
def test_workers_of_multiprocessing_report_to_their_last_point(
    job: ReportJob, tmp_path: Path, method: str, version: str, python: str
) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        """
import multiprocessing, sys
from tuneplane.report import log
def work(number):
    for step in range(20):
        log({f"worker{number}": step}, step=step)
if __name__ == "__main__":
    log({"main": 1})
    context = multiprocessing.get_context(sys.argv[1])
    workers = [context.Process(target=work, args=(number,)) for number in range(3)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
"""
    )
    subprocess.run(
        [python, str(script), method], env=job.environment(), capture_output=True, timeout=60, check=True
    )
    series = job.metrics().series
    assert sorted(series) == ["main", "worker0", "worker1", "worker2"]
    assert all(list(series[f"worker{number}"].values) == list(range(20)) for number in range(3))


@pytest.mark.contract("C16")
def test_threads_log_at_once_and_nothing_is_lost_or_numbered_twice(job: ReportJob) -> None:
    job.run(
        """
        import threading
        from tuneplane.report import init, log, finish
        def work(number):
            for step in range(2000):
                log({f"t{number}": step}, step=step)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for _ in range(20): init({"lr": 1}); finish()
        for thread in threads: thread.join()
        """
    )
    assert len(list(job.ingest.iterdir())) == 1
    numbers = [line["n"] for line in job.lines()]
    assert numbers == list(range(len(numbers)))
    metrics = job.metrics()
    assert all(list(metrics.series[f"t{n}"].values) == list(range(2000)) for n in range(8))


def test_two_writers_of_one_rank_and_attempt_have_a_file_each(job: ReportJob) -> None:
    program = """
        import sys, time
        from tuneplane.report import log
        for step in range(int(sys.argv[1]), 400, 2):
            log({"loss": step}, step=step)
            time.sleep(0.001)
        """
    writers = [job.start(program, first) for first in ("0", "1")]
    assert [writer.communicate(timeout=60)[1] for writer in writers] == ["", ""]
    assert len(list(job.ingest.iterdir())) == 2
    assert sorted(points(job.ingest)) == [(step, {"loss": step}) for step in range(400)]
    metrics = job.metrics()
    assert list(metrics.series["loss"].values) == list(range(400)) and metrics.gaps == 0


@pytest.mark.contract("C16")
def test_a_clock_that_jumps_loses_nothing_and_keeps_the_order(job: ReportJob) -> None:
    done = job.run(
        """
        import time
        now, jumped = time.time, 0
        time.time = lambda: now() + jumped
        from tuneplane.report import log
        for step in range(200):
            if step % 20 == 10:
                jumped = (86400, -86400 * 400, 10**10, -now(), 0)[step // 20 % 5]
                time.sleep(0.02)
            log({"loss": step, "last": step}, step=step)
            log({"last": -step}, step=step)      # the last value of a step wins, whatever the clock says
        """
    )
    assert done.stderr == ""
    metrics = job.metrics()
    assert list(metrics.series["loss"].values) == list(range(200)) and metrics.gaps == 0
    assert list(metrics.series["last"].values) == [-step for step in range(200)]
    assert len(points(job.ingest)) == 400
    assert metrics.age_s() >= 0


@pytest.mark.contract("C15")
def test_a_hundred_thousand_names_in_one_call_arrive(job: ReportJob) -> None:
    done = job.run(
        """
        from tuneplane.report import log
        log({f"layer{number}": number for number in range(100_000)}, step=1)
        log({f"{number}/" + "x" * 150: number for number in range(100_000)}, step=2)      # 16 MB in all
        """
    )
    assert done.stderr == ""
    merged: dict[float, dict[str, float]] = {1: {}, 2: {}}
    for step, numbers in points(job.ingest):
        merged[step].update(numbers)
    assert merged[1] == {f"layer{number}": number for number in range(100_000)}
    assert list(merged[2].values()) == list(range(100_000))


@pytest.mark.slow
@pytest.mark.contract("C16")
def test_a_signal_handler_may_log_while_its_program_logs(job: ReportJob) -> None:
    done = job.run(
        """
        import itertools, signal, time
        from tuneplane.report import log
        fired = itertools.count()
        def handler(*_):
            number = next(fired)            # a slow machine interrupts the handler, too
            log({"handler": number}, step=number)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
        end = time.monotonic() + 2
        step = 0
        while time.monotonic() < end:
            log({"main": step}, step=step); step += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(step, next(fired))
        """
    )
    steps, fired = map(int, done.stdout.split())
    series = job.metrics().series
    assert fired > 100 and len(series["main"]) == steps and len(series["handler"]) == fired
    assert job.metrics().gaps == 0 and done.stderr == ""


def test_signals_that_a_trainer_waits_for_reach_it_and_not_our_threads(
    job: ReportJob, tmp_path: Path
) -> None:
    job.run(
        """
        import os, signal, sys, time
        from tuneplane.report import log, should_stop
        log({"a": 1}); should_stop()
        time.sleep(0.2)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        os.kill(os.getpid(), signal.SIGUSR2)      # to the process: any thread that does not block it may die of it
        time.sleep(0.2)
        sys.exit(0 if signal.sigwait({signal.SIGUSR2}) == signal.SIGUSR2 else 1)
        """,
        TUNEPLANE_STOP_FILE=str(tmp_path / "stop"),
    )


def test_control_c_and_exits_in_the_middle_of_a_call_reach_the_trainer(job: ReportJob) -> None:
    job.run(
        """
        from tuneplane.report import log
        for stop in (KeyboardInterrupt, SystemExit):
            class Interrupted:
                def __float__(self): raise stop
            try:
                log({"a": Interrupted()})
            except stop:
                continue
            raise AssertionError("swallowed")
        """
    )


@pytest.mark.contract("C16")
def test_bad_values_of_every_kind_are_counted_and_told_once(job: ReportJob) -> None:
    done = job.run(
        """
        from tuneplane.report import init, log
        class Explosive:
            def __getattribute__(self, name): raise RuntimeError(name)
        class Liar(dict):
            def items(self): raise RuntimeError("no items")
        init(Explosive()); init({"a": Explosive()})
        for value in (None, "x", Explosive(), [Explosive()], 10**400, b"", {}.keys()):
            log({"bad": value, "good": 1})
        for metrics in (None, 7, [("a", 1)], Explosive(), Liar()):
            log(metrics)
        log({"good": 2}, prefix=Explosive())
        log({})
        log({"good": 2})
        """
    )
    metrics = job.metrics()
    assert list(metrics.series["good"].values) == [1] * 7 + [2]
    assert metrics.dropped_values == 7 and metrics.dropped_points >= 6
    assert done.stderr.count("\n") == 2, done.stderr


def test_a_closed_stderr_is_no_reason_to_fail(job: ReportJob) -> None:
    job.run(
        """
        import os, sys
        from tuneplane.report import log
        os.close(2)
        handle = os.open(sys.argv[1] + "/not-for-messages", os.O_CREAT | os.O_RDWR)
        log({"a": 1, "bad": "x"})
        """,
        str(job.folder),
    )
    assert list(job.metrics().series["a"].values) == [1]


def test_a_host_whose_name_is_no_file_name_reports_too(job: ReportJob) -> None:
    job.run(
        """
        import os
        real = os.uname()
        os.uname = lambda: type("uname", (), {"nodename": "../../n 1/\\n☃" + "x" * 300})()
        from tuneplane.report import log
        log({"a": 1})
        """
    )
    (path,) = job.ingest.iterdir()
    assert len(path.name) < 120 and os.sep not in path.name and job.metrics().series
