"""Reading a run's points while jobs write them, from files of every state that shared storage leaves behind."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_job import REPOSITORY, RUN_ID, TOKEN_SHA256

from tuneplane.collect import tail as tail_module
from tuneplane.collect.gaps import Numbers
from tuneplane.collect.metrics import Metrics, metrics_of, read_metrics
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store
from tuneplane.kernel.errors import OperationError


def header(**changed: Any) -> str:
    """A header line of this run, with entries changed."""
    value = {
        "v": 1,
        "run_id": RUN_ID,
        "attempt": 0,
        "rank": 0,
        "host": "n1",
        "pid": 7,
        "token_sha256": TOKEN_SHA256,
        "started": 100.0,
    }
    return json.dumps({**value, **changed}) + "\n"


def point(
    number: int, step: float | None = None, value: float = 1.0, name: str = "loss", t: float = 0.0
) -> str:
    step = number if step is None else step
    return f'{{"n":{number},"t":{t or 1000.0 + number},"s":{step},"m":{{"{name}":{json.dumps(value)}}}}}\n'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "ingest").mkdir(parents=True)
    return tmp_path / "run"


def write(run: Path, *lines: str, name: str = "0-n1-0-7-aaaaaa.jsonl") -> Path:
    path = run / "ingest" / name
    with path.open("a") as file:
        file.writelines(lines)
    return path


def read(run: Path) -> Metrics:
    return read_metrics(run, RUN_ID, TOKEN_SHA256)


class Reader:
    """Follows one run, as `tp job metrics --follow` does."""

    def __init__(self, run: Path) -> None:
        self._source = RunSource(run, RUN_ID, TOKEN_SHA256)
        self._store = Store(memory=True)

    def refresh(self) -> int:
        """Read what is new; how many values that were."""
        self._store.refresh([self._source])
        return self._store.new_points(RUN_ID)

    def metrics(self) -> Metrics:
        return metrics_of(self._store, RUN_ID)


def collector(run: Path) -> Reader:
    return Reader(run)


def steps(metrics: Metrics, name: str = "loss") -> list[float]:
    return list(metrics.series[name].steps)


def test_a_run_that_has_not_begun_has_no_metrics(run: Path) -> None:
    assert read(run) == Metrics()
    shutil.rmtree(run)
    assert read(run).age_s() is None


def test_an_ingest_folder_that_cannot_be_listed_is_one_clear_error(run: Path) -> None:
    shutil.rmtree(run / "ingest")
    (run / "ingest").write_text("")
    with pytest.raises(OperationError, match="cannot read points: Not a directory"):
        read(run)


def test_only_what_is_new_is_read_and_a_half_written_line_waits(run: Path) -> None:
    reader = collector(run)
    assert reader.refresh() == 0
    path = write(run, header(), point(0), point(1)[:20])
    assert reader.refresh() == 1
    assert reader.refresh() == 0
    write(run, point(1)[20:], point(2))
    assert reader.refresh() == 2
    write(run, header(rank=1), point(0), name="0-n1-1-8-bbbbbb.jsonl")
    assert reader.refresh() == 1
    path.unlink()
    assert reader.refresh() == 0
    metrics = reader.metrics()
    assert steps(metrics) == [0, 1, 2] and steps(metrics, "loss@rank1") == [0]
    assert (metrics.gaps, metrics.torn_lines) == (0, 0)


def test_nan_and_infinities_are_read_as_such(run: Path) -> None:
    write(run, header(), point(0, value=math.nan), point(1, value=math.inf), point(2, value=-math.inf))
    values = read(run).series["loss"].values
    assert math.isnan(values[0]) and list(values[1:]) == [math.inf, -math.inf]


TORN = [
    '{"n":1,"t":1,"s":1,"m":{"lo\n',
    '{"n":1}{"n":2}\n',
    "[1,2]\n",
    "null\n",
    "7\n",
    "\x00\x00\n",
    '{"n":-1,"t":1,"s":1,"m":{}}\n',
    '{"n":"1","t":1,"s":1,"m":{}}\n',
    '{"n":1,"t":"now","s":1,"m":{}}\n',
    '{"n":1,"t":1,"s":NaN,"m":{"loss":1}}\n',
    '{"n":1,"t":1,"s":true,"m":{"loss":1}}\n',
    '{"n":1,"t":1,"s":1,"m":[1]}\n',
    '{"n":1,"t":1,"s":1' + "0" * 5000 + ',"m":{"loss":1}}\n',
    '{"n":1,"t":1,"s":1' + "0" * 400 + ',"m":{"loss":1}}\n',
    "[" * 200_000 + "\n",
    "\udcff\udcfe\n",
]


@pytest.mark.parametrize("line", TORN, ids=lambda line: repr(line[:40]))
def test_a_line_that_is_none_costs_itself_alone(run: Path, line: str) -> None:
    path = write(run, header(), point(0))
    with path.open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + point(2).encode())
    metrics = read(run)
    assert steps(metrics) == [0, 2]
    assert metrics.gaps in (0, 1) and (metrics.torn_lines == 1 or "\x00" in line)


def test_values_that_are_no_numbers_are_passed_over(run: Path) -> None:
    write(
        run,
        header(),
        '{"n":0,"t":1,"s":0,"m":{"a":1,"b":"2","c":null,"d":[1],"e":true,"f":1%s}}\n' % ("0" * 400),
    )
    assert list(read(run).series) == ["a"]


@pytest.mark.contract("C21")
def test_gaps_in_the_numbers_are_counted_until_they_are_filled(run: Path) -> None:
    reader = collector(run)
    write(run, header(), point(0), point(5), point(6), point(9))
    reader.refresh()
    assert reader.metrics().gaps == 6
    write(run, point(3), point(7), point(3), point(9))
    assert reader.refresh() == 2, "a number that comes twice is one line"
    assert reader.metrics().gaps == 4
    assert steps(reader.metrics()) == [0, 3, 5, 6, 7, 9]


def test_lines_that_are_no_points_have_numbers_too(run: Path) -> None:
    write(run, header(), '{"n":0,"t":1,"h":{"lr":1}}\n', '{"n":1,"t":1,"of":"a later version"}\n', point(2))
    assert (read(run).gaps, read(run).hparams) == (0, {"lr": 1})


def test_what_the_job_dropped_is_told(run: Path) -> None:
    write(
        run,
        header(),
        '{"n":0,"t":1,"d":{"points":2,"values":1}}\n',
        '{"n":1,"t":1,"d":{"points":5,"values":3}}\n',
    )
    write(run, header(rank=1), '{"n":0,"t":1,"d":{"points":1,"values":"x"}}\n', name="1.jsonl")
    assert (read(run).dropped_points, read(run).dropped_values) == (6, 3)


REFUSED = {
    "another run's": (
        header(run_id="other-20260102-030405-ab12"),
        "it belongs to run 'other-20260102-030405-ab12'",
    ),
    "without a run": (header(run_id=None), "it belongs to run None"),
    "another token's": (header(token_sha256="0" * 64), "its token is not this run's"),
    "of the future": (header(v=2), "format 2 is newer than this tuneplane reads (1)"),
    "headless": (point(0), "its first line is no header"),
    "of no attempt": (header(attempt="x"), "its header names no attempt and rank"),
    "of no rank": (header(rank=-1), "its header names no attempt and rank"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_this_run_s_is_refused_and_hides_no_other(run: Path, case: str) -> None:
    first, reason = REFUSED[case]
    write(run, first, point(1), point(2), name="0-alien.jsonl")
    write(run, header(), point(0))
    reader = collector(run)
    reader.refresh()
    write(run, point(3), name="0-alien.jsonl")
    reader.refresh()
    metrics = reader.metrics()
    assert metrics.refused == {"0-alien.jsonl": reason}
    assert steps(metrics) == [0] and metrics.gaps == 0


def test_a_torn_header_that_comes_again_whole_is_a_header(run: Path) -> None:
    write(run, header()[:30] + "\n", "\n", header(), point(0))
    assert steps(read(run)) == [0] and read(run).torn_lines == 1


def test_digests_may_be_written_with_their_kind(run: Path) -> None:
    write(run, header(), point(0))
    assert steps(read_metrics(run, RUN_ID, "sha256:" + TOKEN_SHA256)) == [0]


def test_what_is_no_regular_file_is_skipped_and_named(run: Path) -> None:
    write(run, header(), point(0))
    ingest = run / "ingest"
    (ingest / "folder.jsonl").mkdir()
    os.mkfifo(ingest / "fifo.jsonl")
    (ingest / "link.jsonl").symlink_to(ingest / "0-n1-0-7-aaaaaa.jsonl")
    (ingest / "notes.txt").write_text("mine")
    (ingest / ".canary").write_text("")
    start = time.monotonic()
    metrics = read(run)
    assert time.monotonic() - start < 5, "a FIFO is never waited for"
    assert metrics.skipped == {
        "fifo.jsonl": "a FIFO",
        "folder.jsonl": "a folder",
        "link.jsonl": "a link",
        "notes.txt": "no .jsonl file",
    }
    assert steps(metrics) == [0]


def test_a_file_that_may_not_be_read_is_named_and_hides_no_other(run: Path, tmp_path: Path) -> None:
    write(run, header(), point(0))
    write(run, header(), point(0), name="locked.jsonl").chmod(0)
    program = f"""
import os, sys
from pathlib import Path
from tuneplane.collect.metrics import read_metrics
import tuneplane.kernel.runfolder
if os.geteuid() == 0:
    os.chown(sys.argv[1] + "/ingest/0-n1-0-7-aaaaaa.jsonl", 65534, 65534)
    for folder in (sys.argv[1], sys.argv[1] + "/ingest"): os.chmod(folder, 0o755)
    os.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)
metrics = read_metrics(Path(os.curdir), {RUN_ID!r}, {TOKEN_SHA256!r})
print(list(metrics.series), dict(metrics.unreadable))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "['loss'] {'locked.jsonl': 'Permission denied'}\n"


def test_a_block_of_zeros_is_read_over_and_looked_at_again(run: Path) -> None:
    path = write(run, header(), point(0))
    start = path.stat().st_size
    late = point(1) + point(2)
    with path.open("ab") as file:
        file.write(bytes(len(late)) + point(3).encode())
    reader = collector(run)
    reader.refresh()
    assert steps(reader.metrics()) == [0, 3] and reader.metrics().gaps == 2
    reader.refresh()
    with path.open("r+b") as file:
        file.seek(start)
        file.write(late.encode())
    reader.refresh()
    assert steps(reader.metrics()) == [0, 1, 2, 3] and reader.metrics().gaps == 0


def test_zeros_at_the_end_wait_for_what_comes(run: Path) -> None:
    path = write(run, header(), point(0))
    start = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(100))
    reader = collector(run)
    reader.refresh()
    reader.refresh()
    with path.open("r+b") as file:
        file.seek(start)
        file.write((point(1) + point(2)).encode()[:100].ljust(100))
    assert path.stat().st_size == start + 100
    assert reader.refresh() >= 1
    assert reader.metrics().gaps == 0


def test_a_header_that_a_cache_still_hides_is_waited_for(run: Path) -> None:
    path = write(run, header(), point(0), point(1))
    whole = path.read_bytes()
    path.write_bytes(bytes(len(header())) + whole[len(header()) :])
    reader = collector(run)
    reader.refresh()
    assert reader.metrics().refused
    path.write_bytes(whole)
    reader.refresh()
    assert not reader.metrics().refused and steps(reader.metrics()) == [0, 1]


@pytest.mark.parametrize("how", ["shrunk", "replaced"])
def test_a_file_that_shrank_or_was_replaced_is_read_from_its_start(run: Path, how: str) -> None:
    path = write(run, header(), *(point(number) for number in range(9)))
    reader = collector(run)
    reader.refresh()
    assert len(steps(reader.metrics())) == 9
    text = header() + point(0, value=5.0) + point(1, value=6.0)
    if how == "shrunk":
        path.write_text(text)
    else:
        other = path.with_suffix(".tmp")
        other.write_text(text + point(2) * 40)
        other.replace(path)
    reader.refresh()
    assert list(reader.metrics().series["loss"].values)[:2] == [5.0, 6.0]
    assert len(steps(reader.metrics())) == (2 if how == "shrunk" else 3)


def test_a_line_longer_than_any_is_skipped_in_little_memory(run: Path) -> None:
    path = write(run, header(), point(0))
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + point(1).encode())
        file.seek(1 << 38, os.SEEK_CUR)  # a hole that no disk holds
        file.write(b"\n" + point(2).encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    reader = collector(run)
    reader.refresh()
    assert steps(reader.metrics()) == [0, 1, 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "kB"
    assert time.process_time() - start < 5


def test_a_line_just_below_the_bound_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "_BLOCK_BYTES", 1000)
    write(run, header(), point(0, name="x" * 100_000), point(1))
    assert sorted(map(len, read(run).series)) == [4, 100_000]


def test_a_file_is_read_the_same_however_it_grows_and_is_cut_into_blocks(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (header() + "".join(point(number) for number in range(50)) + "torn{\n" + point(50)).encode()
    for block in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(tail_module, "_BLOCK_BYTES", block)
        path = run / "ingest" / "grows.jsonl"
        path.write_bytes(b"")
        reader = collector(run)
        for end in range(0, len(data) + 97, 97):
            with path.open("ab") as file:
                file.write(data[end - 97 if end else 0 : end])
            reader.refresh()
        metrics = reader.metrics()
        assert steps(metrics) == list(range(51)) and (metrics.torn_lines, metrics.gaps) == (1, 0)
        path.unlink()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 30), max_size=60))
def test_gaps_agree_with_a_plain_set(given_numbers: list[int]) -> None:
    numbers, seen = Numbers(), set[int]()
    for number in given_numbers:
        assert numbers.add(number) == (number not in seen)
        seen.add(number)
        assert numbers.missing == max(seen) + 1 - len(seen)


def test_an_idle_look_at_a_thousand_runs_is_quick(tmp_path: Path) -> None:
    readers = []
    for index in range(1000):
        run = tmp_path / str(index)
        (run / "ingest").mkdir(parents=True)
        write(run, header(), point(0))
        readers.append(collector(run))
    assert sum(reader.refresh() for reader in readers) == 1000
    times = []
    for _ in range(5):
        start = time.process_time()
        assert sum(reader.refresh() for reader in readers) == 0
        times.append(time.process_time() - start)
    assert min(times) < 0.1


def test_what_no_utf8_can_hold_can_still_be_shown(run: Path) -> None:
    deep = '{"a":' * 400 + "1" + "}" * 400
    write(
        run,
        header(),
        '{"n":0,"t":1,"s":1,"m":{"a\\ud800":1,"b":1}}\n' * 1,
        '{"n":1,"t":1,"h":{"k\\udfff":"v\\ud800","ok":"\u00e4"}}\n',
        f'{{"n":2,"t":1,"h":{deep}}}\n',
    )
    write(run, header(run_id="x" * 100_000), name="long.jsonl")
    Path(os.fsdecode(os.fsencode(run / "ingest") + b"/\xff.txt")).write_text("")
    metrics = read(run)
    shown = json.dumps(
        [list(metrics.series), metrics.hparams, metrics.skipped, metrics.refused], ensure_ascii=False
    )
    assert len(shown.encode("utf-8")) < 1000
    assert (sorted(metrics.series), metrics.hparams) == (["a?", "b"], {"k?": "v?", "ok": "\u00e4"})
    assert metrics.skipped == {"?.txt": "no .jsonl file"} and metrics.torn_lines == 1


def test_a_file_made_anew_under_the_old_one_s_number_is_read_from_its_start(run: Path) -> None:
    path = write(run, header(), point(0, value=1.0), point(1, value=2.0))
    reader = collector(run)
    reader.refresh()
    path.write_text(header() + point(0, value=3.0) + point(1, value=4.0) + point(2, value=5.0))  # same inode
    reader.refresh()
    assert list(reader.metrics().series["loss"].values) == [3.0, 4.0, 5.0]
