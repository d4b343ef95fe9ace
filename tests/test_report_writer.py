"""The writer against system calls that fail as network file systems make them fail.

What can be had for real (full, read-only, stalled, deleted, dead mounts) is tested for real in test_report_disks.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.kernel.filesystem import filesystem_of, keeps_writes_back
from tuneplane.report import writer as writer_module
from tuneplane.report.writer import Writer

HEADER = '{"v":1}\n'


def read_lines(path: Path) -> list[Any]:
    """Records of the file as a reader that tries every line sees them; torn lines are None."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        if line:
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append(None)
    return found


def numbers(path: Path) -> list[int]:
    return [record["n"] for record in read_lines(path) if record and "n" in record]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(writer_module, "_BACK_OFF_S", (0.01, 0.02))
    yield


def failing(call: Callable[..., Any], failures: list[int]) -> Callable[..., Any]:
    """`call`, but each number in `failures` makes one call of it fail with that errno; 0 lets one pass."""

    def wrapper(*args: Any) -> Any:
        code = failures.pop(0) if failures else 0
        if code:
            raise OSError(code, os.strerror(code))
        return call(*args)

    return wrapper


@pytest.mark.parametrize(
    "code", [errno.ESTALE, errno.EIO, errno.EDQUOT, errno.ENOSPC, errno.EROFS, errno.EINVAL]
)
def test_after_a_failed_write_the_file_is_opened_anew_and_everything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    opened: list[str] = []
    real_open = os.open

    def counting_open(path: Any, *args: Any) -> int:
        opened.append(str(path))
        return real_open(path, *args)

    monkeypatch.setattr(os, "open", counting_open)
    monkeypatch.setattr(os, "write", failing(os.write, [0, code, code, 0, code]))
    path = tmp_path / "points.jsonl"
    writer = Writer(str(path), HEADER)
    for index in range(20):
        assert writer.put(f'"x":{index}')
        time.sleep(0.002)
    assert writer.flush(10)
    assert numbers(path) == list(range(20)) and None not in read_lines(path)
    assert opened.count(str(path)) >= 2 and read_lines(path).count({"v": 1}) == 1


@settings(deadline=None, max_examples=60)
@given(cuts=st.lists(st.integers(0, 40), max_size=40))
def test_writes_that_are_cut_short_anywhere_lose_nothing(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "_BACK_OFF_S", (0.001,))
        real_write, left = os.write, list(cuts)

        def short(fd: int, data: bytes) -> int:
            """Takes a few bytes, as a disk that is nearly full; 0: none at all."""
            if not left:
                return real_write(fd, data)
            size = left.pop(0)
            if size == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real_write(fd, data[:size])

        patch.setattr(os, "write", short)
        path = Path(folder) / "points.jsonl"
        writer = Writer(str(path), HEADER)
        for index in range(12):
            writer.put(f'"x":{index}')
        assert writer.flush(10)
        records = [record for record in read_lines(path) if isinstance(record, dict)]
        assert records[0] == {"v": 1}
        # A line that lacked only its newline comes twice, under its number, by which readers know it.
        assert list(dict.fromkeys(record["n"] for record in records if "n" in record)) == list(range(12))
        assert all(record["x"] == record["n"] for record in records if "n" in record)


@pytest.mark.slow
def test_a_client_that_keeps_writes_back_is_synced_and_what_its_sync_lost_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real_sync = os.fdatasync
    lose = [True]
    path = tmp_path / "points.jsonl"

    def sync(fd: int) -> None:
        synced.append(fd)
        if lose:
            lose.clear()
            os.truncate(path, len(HEADER))  # what NFS does with pages that the server had no room for
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real_sync(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(writer_module, "keeps_writes_back", lambda folder: True)
    writer = Writer(str(path), HEADER)
    for index in range(10):
        writer.put(f'"x":{index}')
    assert writer.flush(5)
    assert numbers(path) == list(range(10))
    assert writer.unsafe_lines() == 0 and len(synced) >= 2

    before = len(synced)
    writer.put('"x":10')
    deadline = time.monotonic() + 5
    while len(synced) == before and time.monotonic() < deadline:  # nobody flushes: it is synced by itself
        time.sleep(0.05)
    assert len(synced) > before and numbers(path) == list(range(11))


def test_a_local_file_is_never_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda fd: pytest.fail("a sync costs a disk's time"))
    writer = Writer(str(tmp_path / "points.jsonl"), HEADER)
    writer.put('"x":1')
    assert writer.flush(5)


@pytest.mark.slow
def test_a_failure_that_lasts_is_told_once_and_its_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writer_module, "_TELL_AFTER_S", 0.2)
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    folder = tmp_path / "gone"
    writer = Writer(str(folder / "points.jsonl"), HEADER)
    writer.put('"x":1')
    assert not writer.flush(1)
    folder.mkdir()
    assert writer.flush(5)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith(f"tuneplane: reporting has stopped: cannot write to {folder}")
    assert told[1] == "tuneplane: reporting goes on"
    assert numbers(folder / "points.jsonl") == [0]


def test_a_backlog_larger_than_one_write_arrives_whole(tmp_path: Path) -> None:
    folder = tmp_path / "late"
    path = folder / "points.jsonl"
    writer = Writer(str(path), HEADER)
    for index in range(60):
        assert writer.put(f'"x":"{index:099999d}"')
    assert not writer.flush(0.2)
    folder.mkdir()
    assert writer.flush(10)
    assert numbers(path) == list(range(60)) and path.stat().st_size > 5 << 20


@pytest.mark.slow
def test_an_idle_writer_costs_no_processor_time(tmp_path: Path) -> None:
    writer = Writer(str(tmp_path / "points.jsonl"), HEADER)
    writer.put('"x":1')
    assert writer.flush(5)
    time.sleep(0.1)
    start = time.process_time()
    time.sleep(1)
    assert time.process_time() - start < 0.2


MOUNTS = rb"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw - proc proc rw
40 22 0:35 / /home rw,relatime shared:20 - nfs4 server:/home rw,vers=4.2
41 22 0:36 / /scratch rw - lustre mgs@tcp:/fs rw
42 41 0:37 / /scratch/a\040b rw shared:3 master:1 - fuse.sshfs host: rw
43 40 0:38 / /home/local rw - xfs /dev/sdb rw
44 43 0:39 / /home/local rw - nfs other:/x rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/etc", "ext4"),
        ("/home/user/runs", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/user", "ext4"),
        ("/scratch/x", "lustre"),
        ("/scratch/a b/runs", "fuse.sshfs"),
        ("/home/local/x", "nfs"),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_its_nearest_mount(path: str, kind: str) -> None:
    assert filesystem_of(path, MOUNTS) == kind


def test_this_machine_s_own_disk_needs_no_sync(tmp_path: Path) -> None:
    assert keeps_writes_back("/proc") is False
    assert keeps_writes_back(str(tmp_path / "not there yet")) is False
