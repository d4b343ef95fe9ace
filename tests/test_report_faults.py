"""Reporting never raises into the training loop and never blocks it, whatever breaks around it (C16)."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from interpreters import pythons
from report_job import DEAD_MOUNT, ReportJob

EVERY_PYTHON = sorted(pythons((3, 9)).items())


@pytest.fixture
def job(tmp_path: Path) -> ReportJob:
    return ReportJob(tmp_path / "run")


# Disks


@pytest.mark.contract("C16")
def test_a_full_disk_loses_nothing_that_fits_in_memory(job: ReportJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    done = job.run_with_mounts(
        """
        import os, shutil, subprocess, sys, time
        from tuneplane.report import log, finish
        ingest, saved = sys.argv[1:]
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", ingest], check=True)
        with open(ingest + "/.ballast", "wb") as ballast:
            ballast.write(bytes(64 << 10))
        for step in range(5000):      # about 240 kB into 64 kB
            log({"loss": step}, step=step)
        time.sleep(1)
        assert os.statvfs(ingest).f_bavail == 0, "the disk was to be full"
        subprocess.run(["mount", "-o", "remount,size=1m", ingest], check=True)
        finish()
        shutil.copytree(ingest, saved)
        """,
        str(job.ingest),
        str(saved),
    )
    assert (done.returncode, done.stderr) == (0, ""), "a disk that is full for a second is nobody's business"
    shutil.copytree(saved, job.ingest, dirs_exist_ok=True)
    metrics = job.metrics()
    assert list(metrics.series["loss"].values) == list(range(5000))
    assert metrics.gaps == 0 and metrics.torn_lines <= 1, "the line that was cut short comes again, whole"


@pytest.mark.slow
@pytest.mark.contract("C16")
def test_a_disk_that_stays_full_is_told_once_and_the_trainer_ends_well(job: ReportJob) -> None:
    done = job.run_with_mounts(
        """
        import subprocess, sys, time
        from tuneplane.report import log
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k,nr_inodes=2", "tmpfs", sys.argv[1]], check=True)
        with open(sys.argv[1] + "/ballast", "wb") as ballast:
            try:
                ballast.write(bytes(8 << 10))
            except OSError:
                pass
        slowest, end = 0, time.monotonic() + 6
        while time.monotonic() < end:
            start = time.perf_counter(); log({"loss": 1}); slowest = max(slowest, time.perf_counter() - start)
            time.sleep(0.01)
        print(slowest)
        """,
        str(job.ingest),
    )
    assert done.returncode == 0 and float(done.stdout) < 0.25
    first, last = done.stderr.splitlines()
    assert first.startswith("tuneplane: reporting has stopped: cannot write to ")
    assert "No space left on device; training goes on" in first
    assert "points could not be written to" in last and "No space left on device" in last


def test_a_read_only_file_system_is_waited_for(job: ReportJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    done = job.run_with_mounts(
        """
        import shutil, subprocess, sys, time
        from tuneplane.report import log, finish
        ingest, saved = sys.argv[1:]
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", ingest], check=True)
        for step in range(100):
            log({"loss": step}, step=step)
        time.sleep(0.5)
        subprocess.run(["mount", "-o", "remount,rw", ingest], check=True)
        finish()
        shutil.copytree(ingest, saved)
        """,
        str(job.ingest),
        str(saved),
    )
    assert (done.returncode, done.stderr) == (0, "")
    shutil.copytree(saved, job.ingest, dirs_exist_ok=True)
    assert len(job.metrics().series["loss"]) == 100


@pytest.mark.slow
@pytest.mark.contract("C16")
def test_a_stalled_file_system_does_not_stall_the_trainer(job: ReportJob, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    done = job.run_with_mounts(
        """
        import json, os, shutil, subprocess, sys, time
        from tuneplane.report import log, finish
        ingest, saved, disk = sys.argv[1:]
        with open(disk, "wb") as image:
            image.truncate(32 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
        subprocess.run(["mount", "-o", "loop", disk, ingest], check=True)
        log({"loss": 0}, step=0)
        time.sleep(0.3)
        thaw = subprocess.Popen(["sh", "-c", 'sleep 4; fsfreeze -u "$1"', "sh", ingest])  # whatever becomes of us
        subprocess.run(["fsfreeze", "-f", ingest], check=True)
        times, step = [], 1
        while thaw.poll() is None:
            start = time.perf_counter(); log({"loss": step}, step=step); times.append(time.perf_counter() - start)
            step += 1
            time.sleep(0.001)
        finish()
        shutil.copytree(ingest, saved, ignore=shutil.ignore_patterns("lost+found"))
        times.sort()
        print(json.dumps({"steps": step, "usual": times[len(times) * 99 // 100], "slowest": times[-1]}))
        """,
        str(job.ingest),
        str(saved),
        str(tmp_path / "disk.img"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["steps"] > 500
    assert told["usual"] < 0.001, "99 of 100 calls"
    assert told["slowest"] < 0.5, (
        "a busy machine may take the processor away for a while, but not for the stall"
    )
    shutil.copytree(saved, job.ingest, dirs_exist_ok=True)
    assert list(job.metrics().series["loss"].values) == list(range(told["steps"])) and job.metrics().gaps == 0


@pytest.mark.slow
@pytest.mark.contract("C16")
def test_a_mount_whose_server_is_gone_holds_neither_log_nor_should_stop(
    job: ReportJob, tmp_path: Path
) -> None:
    marker = tmp_path / "dead" / "stop"
    marker.parent.mkdir()
    start = time.monotonic()
    done = job.run_with_mounts(
        DEAD_MOUNT
        + """
import json, sys, time
from tuneplane.report import log, finish, should_stop
servers = [mount_dead(folder) for folder in sys.argv[1:]]
os.environ["TUNEPLANE_STOP_FILE"] = sys.argv[2] + "/stop"
times = []
for step in range(2000):
    start = time.perf_counter()
    log({"loss": step}, step=step); assert not should_stop()
    times.append(time.perf_counter() - start)
    time.sleep(0.001)
start = time.perf_counter()
finish()
times.sort()
print(json.dumps({"usual": times[1980], "slowest": times[-1], "finish": time.perf_counter() - start}))
""",
        str(job.ingest),
        str(marker.parent),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["usual"] < 0.001 and told["slowest"] < 0.5 and told["finish"] < 3
    assert "2000 points could not be written to" in done.stderr
    assert done.stderr.endswith(": the file system does not answer\n") and done.stderr.count("\n") == 1
    assert time.monotonic() - start < 30


def test_a_folder_that_is_taken_away_is_missed_quietly_and_used_again(job: ReportJob) -> None:
    done = job.run(
        """
        import os, shutil, sys, time
        from tuneplane.report import log, finish
        import tuneplane.report.writer as writer
        writer._PROVE_S = 0.1             # five seconds, were this no test
        log({"a": 1}); time.sleep(0.3)
        shutil.rmtree(sys.argv[1]); time.sleep(0.3)
        log({"a": 2}); log({"a": 3}); time.sleep(0.3)
        os.mkdir(sys.argv[1])
        log({"a": 4}); finish()
        """,
        str(job.ingest),
    )
    assert done.stderr == ""
    assert list(job.metrics().series["a"].values) == [2, 3, 4]
    assert job.metrics().gaps == 1, "what was deleted is told as a gap"


@pytest.mark.contract("C16")
def test_a_folder_that_never_was_costs_two_seconds_at_the_end_and_no_more(job: ReportJob) -> None:
    job.ingest.rmdir()
    start = time.monotonic()
    done = job.run("from tuneplane.report import log; log({'a': 1}); raise SystemExit(3)", code=3)
    assert time.monotonic() - start < 10
    assert done.stderr.count("\n") == 1
    assert "1 points could not be written to" in done.stderr and "No such file or directory" in done.stderr
    assert not job.ingest.exists(), "a folder made beside a missing mount would hide the points for ever"


def test_a_folder_that_may_not_be_written_is_told(job: ReportJob) -> None:
    program = """
        import os, sys
        import tuneplane.report.session
        from tuneplane.report import log
        if os.geteuid() == 0:
            os.setgid(65534); os.setuid(65534)
        log({"a": 1})
        """
    job.ingest.chmod(0o500)
    done = job.run(program)
    assert "1 points could not be written to" in done.stderr and "Permission denied" in done.stderr


@pytest.mark.slow
def test_a_fifo_or_link_in_place_of_the_file_is_not_written_through(job: ReportJob, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for plant in ("os.mkfifo(path)", "os.symlink(sys.argv[2], path)", "os.mkdir(path)"):
        done = job.run(
            f"""
            import os, sys
            import tuneplane.report.session as session
            from tuneplane.report import log
            session.file_name = lambda ingest, host: "0.jsonl"
            path = sys.argv[1] + "/0.jsonl"
            {plant}
            log({{"a": 1}})
            """,
            str(job.ingest),
            str(victim),
        )
        assert "1 points could not be written to" in done.stderr
        (planted,) = job.ingest.iterdir()
        planted.rmdir() if planted.is_dir() else planted.unlink()
    assert victim.read_text() == "mine"


def test_a_full_queue_drops_the_newest_counts_them_and_says_so_once(job: ReportJob) -> None:
    job.ingest.rmdir()
    done = job.run(
        """
        import os, sys, time
        import tuneplane.report.writer as writer
        from tuneplane.report import log, finish
        writer.Writer.__init__.__defaults__ = (10_000,)
        for step in range(1000):
            log({"loss": step}, step=step)
        os.mkdir(sys.argv[1])
        finish()
        log({"loss": 1000}, step=1000)
        """,
        str(job.ingest),
    )
    metrics = job.metrics()
    steps = list(metrics.series["loss"].steps)
    assert steps == [*range(len(steps) - 1), 1000] and 100 < len(steps) < 500
    assert metrics.dropped_points == 1001 - len(steps) and metrics.gaps == 0
    assert done.stderr.count("\n") == 1 and "points are being dropped: cannot write to" in done.stderr


def test_a_point_too_long_for_any_reader_is_dropped_and_counted(job: ReportJob) -> None:
    done = job.run(
        """
        from tuneplane.report import log
        log({"loss": 1})
        log({"x" * (9 << 20): 1})
        log({"loss": 2})
        """
    )
    assert list(job.metrics().series["loss"].values) == [1, 2]
    assert job.metrics().dropped_points == 1 and "is too long and was dropped" in done.stderr


# Endings


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
    wanted = 110 if "thread" in ending else 100
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


# Processes, threads, signals


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
