"""However a program ends, what it reported is there (C16, C21)."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from ingest_lines import points
from interpreters import pythons
from report_job import ReportJob

EVERY_PYTHON = sorted(pythons((3, 9)).items())


@pytest.fixture
def job(tmp_path: Path) -> ReportJob:
    return ReportJob(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.contract("C21")
def test_a_killed_trainer_loses_at_most_its_last_fifth_of_a_second(job: ReportJob, tmp_path: Path) -> None:
    chance = random.Random(7)
    for kill in range(5):
        one = ReportJob(tmp_path / f"run{kill}")
        trainer = one.start(
            """
            import time
            from tuneplane.report import log
            step = 0
            while True:
                log({"loss": step}, step=step)
                print(step, time.time(), flush=True)
                step += 1
                time.sleep(0.01)
            """
        )
        lines = [trainer.stdout.readline() for _ in range(100)]
        time.sleep(chance.random() * 0.5)
        trainer.kill()
        lines += trainer.communicate()[0].splitlines()
        logged = [(int(step), float(at)) for step, at in (line.split() for line in lines if line.strip())]
        killed_at = logged[-1][1]
        found = list(one.metrics().series["loss"].steps)
        assert found == list(range(len(found))) and one.metrics().gaps == 0
        lost = [step for step, at in logged if step >= len(found) and at < killed_at - 0.2]
        assert not lost, f"logged more than 0.2 s before the kill: {lost}"


@pytest.mark.slow
@pytest.mark.contract("C21")
def test_a_kill_at_any_moment_leaves_a_file_without_holes(tmp_path: Path) -> None:
    """From the first import to the midst of errors: what stands in the file is the beginning, whole."""
    chance = random.Random(11)
    lengths = []
    for kill in range(8):
        job = ReportJob(tmp_path / f"run{kill}")
        mounted = tmp_path / f"mounted{kill}"
        mounted.mkdir()
        trainer = job.start_with_mounts(
            """
            import sys
            from tests.faulty_disk import mount_faulty
            disk = mount_faulty(*sys.argv[1:])
            disk.fail("EIO", "ENOSPC", chance=0.05)
            print("mounted", flush=True)
            from tuneplane.report import log
            step = 0
            while True:
                log({"loss": step}, step=step)
                step += 1
            """,
            str(job.ingest),
            str(mounted),
            str(tmp_path / f"faults{kill}"),
            TUNEPLANE_JOB_ENDPOINT=mounted.as_uri(),
        )
        assert trainer.stdout.readline() == "mounted\n"
        time.sleep(chance.random() * 0.3)
        trainer.kill()
        assert "Traceback" not in trainer.communicate(timeout=30)[1]
        found = [step for step, _ in points(job.ingest)]
        assert found == list(range(len(found)))
        lengths.append(len(found))
    assert max(lengths) > 0, "some were to have written"


ENDINGS = {
    "the program's end": ("", 0),
    "sys.exit": ("raise SystemExit(3)", 3),
    "an exception": ("raise RuntimeError('the trainer failed')", 1),
    "SIGTERM with a handler that exits": (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)",
        4,
    ),
    "os._exit after finish": ("finish(); import os; os._exit(5)", 5),
    "os._exit, two tenths of a second after the last point": ("import os; time.sleep(0.2); os._exit(6)", 6),
    "sys.exit in a thread": (
        "import sys, threading\n"
        "thread = threading.Thread(target=sys.exit, args=(9,)); thread.start(); thread.join()",
        0,
    ),
    "an exception in a thread": (
        "import threading\n"
        "def fail(): raise RuntimeError('a data loader failed')\n"
        "thread = threading.Thread(target=fail); thread.start(); thread.join()",
        0,
    ),
    "an exception at exit": (
        "import atexit\n@atexit.register\ndef fail(): raise RuntimeError('a profiler failed')",
        0,
    ),
    "a daemon thread that logs until it is cut off": (
        "import threading\n"
        "def for_ever():\n    while True: log({'b': 1})\n"
        "threading.Thread(target=for_ever, daemon=True).start(); time.sleep(0.05)",
        0,
    ),
    "SIGINT": ("import os, signal; os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -2),
    "a thread that outlives the program": (
        "import threading\n"
        "def late():\n    time.sleep(0.2)\n    for step in range(100, 110): log({'a': step}, step=step)\n"
        "threading.Thread(target=late).start()",
        0,
    ),
}


@pytest.mark.contract("C16")
@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_that_ends_without_finish_has_reported_all(
    job: ReportJob, ending: str, version: str, python: str
) -> None:
    source, code = ENDINGS[ending]
    program = "import time\nfrom tuneplane.report import log, finish\n"
    program += "for step in range(100): log({'a': step}, step=step)\n" + source
    done = job.run(program, python=python, code=code)
    wanted = 110 if "outlives" in ending else 100
    assert len(job.metrics().series["a"]) == wanted
    assert "tuneplane" not in done.stderr and "Fatal" not in done.stderr


@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
def test_points_logged_while_the_interpreter_ends_are_kept(job: ReportJob, version: str, python: str) -> None:
    done = job.run(
        """
        import atexit
        from tuneplane.report import log
        atexit.register(lambda: log({"a": 2}))     # runs after reporting's own
        log({"a": 1})
        atexit.register(lambda: log({"a": 0}))     # runs before it
        """,
        python=python,
    )
    assert sorted(job.metrics().series["a"].values) == [0, 1, 2] and done.stderr == ""
    job = ReportJob(job.folder / "first at exit")
    done = job.run(
        """
        import atexit
        from tuneplane.report import log, finish
        atexit.register(finish)
        atexit.register(lambda: log({"a": 1}))     # the first point of all
        """,
        python=python,
    )
    assert list(job.metrics().series["a"].values) == [1] and done.stderr == ""


@pytest.mark.parametrize(("version", "python"), EVERY_PYTHON)
def test_a_destructor_that_logs_at_the_very_end_harms_nothing(
    job: ReportJob, version: str, python: str
) -> None:
    start = time.monotonic()
    done = job.run(
        """
        from tuneplane.report import log, finish
        class Run:
            def __del__(self):
                log({"b": 1}); finish()
        run = Run()
        run.itself = run
        import builtins; builtins.keep = run
        log({"a": 1})
        """,
        python=python,
    )
    assert list(job.metrics().series["a"].values) == [1]
    assert "Fatal" not in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - start < 15


def test_a_machine_without_a_thread_to_spare_still_reports(job: ReportJob) -> None:
    done = job.run(
        """
        import threading
        def refused(self): raise RuntimeError("can't start new thread")
        threading.Thread.start = refused
        from tuneplane.report import log, finish
        log({"a": 1}); finish(); log({"a": 2})
        """
    )
    assert list(job.metrics().series["a"].values) == [1, 2] and done.stderr == ""
