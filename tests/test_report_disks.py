"""Reporting on disks that fail: full, read-only, stalled, gone, come back (C16, C21)."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from ingest_lines import dropped, points, records
from report_job import DEAD_MOUNT, ReportJob


@pytest.fixture
def job(tmp_path: Path) -> ReportJob:
    return ReportJob(tmp_path / "run")


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


STALLED_BY_FREEZE = """
import os, subprocess, sys
def stall():
    "A real ext4 that is frozen: what writes there sleeps in the kernel."
    ingest, disk = sys.argv[1:]
    with open(disk, "wb") as image:
        image.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, ingest], check=True)
    log({"loss": 0}, step=0)
    time.sleep(0.3)
    subprocess.Popen(["sh", "-c", 'sleep 4; fsfreeze -u "$1"', "sh", ingest])  # whatever becomes of us
    subprocess.run(["fsfreeze", "-f", ingest], check=True)
    return time.monotonic() + 3.5
"""
STALLED_BY_SERVER = """
import sys
from tests.faulty_disk import mount_faulty
def stall():
    "A mount whose server answers nothing for a while."
    ingest, store = sys.argv[1:]
    disk = mount_faulty(store, ingest, store + ".faults", "subtype=net")
    log({"loss": 0}, step=0)
    time.sleep(0.3)
    return disk.stall(4) - 0.5
"""
IN_THE_STALL = """
import json, shutil, threading
until = stall()
waited = CallTimes()
def wait():
    waited.time(lambda: open(sys.argv[1] + "/other", "w").write("x"))
waiter = threading.Thread(target=wait)
waiter.start()
times, step = CallTimes(), 1
while time.monotonic() < until:
    times.time(lambda: log({"loss": step, "lr": 0.1}, step=step))
    step += 1
    time.sleep(0.001)
waiter.join()
finish()
if sys.argv[2].endswith(".img"):
    shutil.copytree(sys.argv[1], sys.argv[2] + ".saved", ignore=shutil.ignore_patterns("lost+found"))
print(json.dumps({"steps": step, "log": times.summary(), "write": waited.summary()}))
"""


@pytest.mark.slow
@pytest.mark.contract("C16")
@pytest.mark.parametrize("way", ["frozen ext4", "silent server"])
def test_a_stall_of_four_seconds_does_not_stall_the_trainer(job: ReportJob, tmp_path: Path, way: str) -> None:
    start, told_to = "import time\nfrom tests.call_times import CallTimes\n", tmp_path / "disk.img"
    start += "from tuneplane.report import log, finish\n"
    store = tmp_path / "disk.img.saved"
    if way == "silent server":
        told_to = store
        store.mkdir()
    source = STALLED_BY_FREEZE if way == "frozen ext4" else STALLED_BY_SERVER
    done = job.run_with_mounts(start + source + IN_THE_STALL, str(job.ingest), str(told_to))
    assert done.returncode == 0 and "tuneplane" not in done.stderr, done.stderr
    told = json.loads(done.stdout)
    assert told["write"]["slept_s"] > 2, "a write of the trainer's own was to stall: else this proves nothing"
    assert told["log"]["slept_s"] < 0.001, "no call waited for anything"
    assert told["log"]["usual_s"] < 0.001, "99 of 100 calls, pre-empted or not"
    assert told["steps"] > 200
    assert points(store) == [
        (0, {"loss": 0}),
        *((step, {"loss": step, "lr": 0.1}) for step in range(1, told["steps"])),
    ]


@pytest.mark.slow
@pytest.mark.contract("C16")
@pytest.mark.parametrize("kind", ["writes through", "keeps writes back"])
def test_errors_now_and_then_lose_nothing_and_repeat_nothing(
    job: ReportJob, tmp_path: Path, kind: str
) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    done = job.run_with_mounts(
        """
        import sys, time
        from tests.faulty_disk import mount_faulty
        import tuneplane.report.writer as writer
        from tuneplane.report import init, log, finish
        writer._BACK_OFF_S = (0.02,)          # up to two seconds, were this no test: more tries, more errors
        disk = mount_faulty(*sys.argv[1:])
        disk.fail("EIO", "ESTALE", "EDQUOT", chance=0.15)
        init({"lr": 0.1})
        for step in range(400):
            log({"loss": step, "nan": float("nan")}, step=step)
            time.sleep(0.005)
        disk.fail()
        finish()
        """,
        str(job.ingest),
        str(mounted),
        str(tmp_path / "faults"),
        *(["subtype=net"] if kind == "keeps writes back" else []),
        TUNEPLANE_JOB_ENDPOINT=mounted.as_uri(),
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = points(job.ingest)
    assert [(step, numbers["loss"]) for step, numbers in found] == [(step, step) for step in range(400)]
    assert all(numbers["nan"] != numbers["nan"] for _, numbers in found)
    metrics = job.metrics()
    assert list(metrics.series["loss"].values) == list(range(400)) and metrics.hparams == {"lr": 0.1}
    assert (metrics.gaps, metrics.dropped_points) == (0, 0)
    (path,) = job.ingest.iterdir()
    assert metrics.torn_lines > 3, "writes were to be torn: else this proves nothing"
    if kind == "writes through":
        written = [record["n"] for record in records(path) if "n" in record]
        # A write that fails half-way has written lines all the same, the more the slower the machine. All that
        # went before each of some sixty failures would be ten thousand.
        assert len(written) < 1200, "what failed is written again, not all that went before it"


@pytest.mark.contract("C16")
def test_a_disk_that_turns_read_only_costs_what_does_not_fit_in_memory_and_that_is_counted(
    job: ReportJob, tmp_path: Path
) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    done = job.run_with_mounts(
        """
        import sys, time
        from tests.faulty_disk import mount_faulty
        import tuneplane.report.writer as writer
        from tuneplane.report import log, finish
        writer.Writer.__init__.__defaults__ = (10_000,)       # 32 MiB, were this no test
        disk = mount_faulty(*sys.argv[1:])
        for step in range(50):
            log({"loss": step}, step=step)
        time.sleep(0.3)
        disk.fail("EROFS")
        for step in range(50, 500):
            log({"loss": step}, step=step)
            time.sleep(0.001)
        disk.fail()
        finish()
        for step in range(500, 550):
            log({"loss": step}, step=step)
        finish()
        """,
        str(job.ingest),
        str(mounted),
        str(tmp_path / "faults"),
        TUNEPLANE_JOB_ENDPOINT=mounted.as_uri(),
    )
    assert done.returncode == 0 and done.stderr.count("\n") == 1
    assert "points are being dropped: cannot write to" in done.stderr
    assert "Read-only file system; training goes on" in done.stderr
    steps = [step for step, _ in points(job.ingest)]
    assert len(set(steps)) == len(steps) and len(steps) + dropped(job.ingest) == 550
    assert steps[:100] == list(range(100)) and steps[-50:] == list(range(500, 550))
    assert dropped(job.ingest) == job.metrics().dropped_points > 100


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


RESTORED = {
    "moved away, and back": (
        "os.rename(ingest, ingest + '.away')",
        "os.rename(ingest + '.away', ingest)",
    ),
    "deleted, and put back from a copy": (
        "shutil.copytree(ingest, ingest + '.copy'); shutil.rmtree(ingest)",
        "os.rename(ingest + '.copy', ingest)",
    ),
    "deleted, and made anew within seconds": ("shutil.rmtree(ingest)", "os.mkdir(ingest)"),
    "replaced while nobody looked": ("shutil.rmtree(ingest); os.mkdir(ingest)", ""),
}


@pytest.mark.contract("C16")
@pytest.mark.parametrize("way", RESTORED)
def test_a_folder_that_is_taken_away_and_restored_has_every_point_once(job: ReportJob, way: str) -> None:
    done = job.run(
        f"""
        import os, shutil, sys, time
        from tuneplane.report import log, finish
        ingest = sys.argv[1]
        def some(first):
            for step in range(first, first + 20):
                log({{"loss": step}}, step=step)
                time.sleep(0.005)
        some(0)
        time.sleep(0.2)
        {RESTORED[way][0]}
        some(20)
        time.sleep(0.2)
        {RESTORED[way][1]}
        some(40)
        finish()
        """,
        str(job.ingest),
    )
    assert done.stderr == ""
    assert points(job.ingest) == [(step, {"loss": step}) for step in range(60)]
    assert job.metrics().gaps == 0


def test_what_is_deleted_with_its_folder_long_after_is_told_as_a_gap(job: ReportJob) -> None:
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
    assert job.metrics().gaps == 1


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
