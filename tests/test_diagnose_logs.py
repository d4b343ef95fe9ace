"""Logs of every kind and size: what is found in them, and that none costs more than seconds and megabytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tuneplane.diagnose.logs import HEAD_BYTES, MOST_TRACES, TAIL_BYTES, read_log
from tuneplane.diagnose.traces import parse_failures, parse_traces, plain_line

TRACE = (
    "Traceback (most recent call last):\n"
    '  File "/x/train.py", line 8, in <module>\n'
    "    main()\n"
    "ValueError: batch of 3 does not divide into 2\n"
)
STEP = b"step 123456 loss=0.123456 lr=1e-4 tokens/s=12345.6\n"


def log(folder: Path, content: str | bytes) -> Path:
    path = folder / "node-0.log"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_small_log_is_searched_whole(tmp_path: Path) -> None:
    found = read_log(log(tmp_path, f"begins\n{TRACE}No space left on device\nends\n"), 0, "n1")
    assert found is not None
    assert found.searched_bytes == found.size_bytes > 0
    assert (found.head[0], found.tail[-1]) == ("begins", "ends")
    assert [trace.kind for trace in found.traces] == ["ValueError"]
    assert found.mark("no-space") is not None
    assert found.host == "n1"


@pytest.mark.parametrize(
    "content", [b"", b"\n\n\n", b"\0" * 4096, b"\xff\xfe\x00broken \x80 bytes", b"no end of line"]
)
def test_any_bytes_can_be_read(tmp_path: Path, content: bytes) -> None:
    found = read_log(log(tmp_path, content))
    assert found is not None
    assert found.size_bytes == len(content)
    assert not found.traces


def test_a_log_that_is_not_there_or_no_file_is_none(tmp_path: Path) -> None:
    assert read_log(tmp_path / "node-0.log") is None
    os.mkfifo(tmp_path / "fifo")
    assert read_log(tmp_path / "fifo") is None


def test_a_folder_in_place_of_a_log_is_none(tmp_path: Path) -> None:
    assert read_log(tmp_path) is None


def test_of_a_progress_bar_the_last_state_is_kept_and_colours_go(tmp_path: Path) -> None:
    bar = "".join(f"\r{n}%|{'#' * n}" for n in range(0, 100, 10))
    found = read_log(log(tmp_path, f"\x1b[31mred\x1b[0m line\n{bar}\n"))
    assert found is not None
    assert found.tail == ("red line", f"90%|{'#' * 90}")
    assert plain_line(b"\r\r") == ""


def test_a_line_of_a_hundred_megabytes_costs_no_more_than_another(tmp_path: Path) -> None:
    content = b"x" * (6 << 20) + b" No space left on device " + b"y" * (6 << 20)
    found = read_log(log(tmp_path, content))
    assert found is not None
    mark = found.mark("no-space")
    assert mark is not None
    assert len(mark.first) < 1000
    assert all(len(line) < 1000 for line in found.tail)


def test_a_traceback_between_head_and_tail_is_found(tmp_path: Path) -> None:
    blocks = STEP * ((HEAD_BYTES + TAIL_BYTES) // len(STEP))
    content = blocks + f"CUDA out of memory here\n{TRACE}".encode() + blocks + blocks
    found = read_log(log(tmp_path, content))
    assert found is not None
    assert [trace.kind for trace in found.traces] == ["ValueError"]
    assert found.traces[0].offset == content.index(b"Traceback")
    assert found.mark("cuda-memory") is not None, "what stands near a traceback is looked at too"


def test_of_thousands_of_tracebacks_the_first_and_the_last_are_kept(tmp_path: Path) -> None:
    content = "".join(TRACE.replace("batch of 3", f"batch of {n}") + "goes on\n" * 40 for n in range(3000))
    found = read_log(log(tmp_path, content))
    assert found is not None
    assert len(found.traces) == MOST_TRACES
    assert "batch of 0 " in found.traces[0].message
    assert "batch of 2999 " in found.traces[-1].message


def test_a_word_in_every_line_does_not_cost_minutes(tmp_path: Path) -> None:
    content = (
        b"epoch 1: Permission denied, Connection reset by peer, MemoryError, Saving x to ./a/b\n" * 150_000
    )
    found = read_log(log(tmp_path, content))
    assert found is not None
    assert found.mark("saves") is not None


# VmHWM: ru_maxrss of a child begins with that of the process that started it.
BIG = """
import json, re, sys, time
from pathlib import Path
from tuneplane.diagnose.logs import read_log
before = time.monotonic()
found = read_log(Path(sys.argv[1]), 0, "n1")
print(json.dumps({
    "seconds": time.monotonic() - before,
    "megabytes": int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024,
    "searched": found.searched_bytes, "size": found.size_bytes,
    "kinds": [trace.kind for trace in found.traces], "tail": found.tail[-1],
}))
"""


@pytest.mark.slow
def test_a_log_of_ten_gigabytes_takes_less_than_5_s_and_200_mb(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    size = 10 << 30
    with path.open("wb") as file:  # with holes: no disk is filled, and every byte is read all the same
        file.write(b"tuneplane: begins\n" + STEP * 100_000)
        file.seek(size - (40 << 20))
        file.write(b"\n" + TRACE.encode() + STEP * 700_000)
        file.truncate(size)
        file.seek(size - 6)
        file.write(b"\nends\n")
    done = subprocess.run(
        [sys.executable, "-c", BIG, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    said = json.loads(done.stdout)
    assert said["size"] == size
    assert said["seconds"] < 5.0
    assert said["megabytes"] < 200
    assert said["kinds"] == ["ValueError"]
    assert said["tail"] == "ends"
    assert said["searched"] <= size


def traces(text: str) -> list[tuple[int | None, str, str]]:
    lines = list(enumerate(text.split("\n")))
    return [(trace.rank, trace.kind, trace.message) for trace in parse_traces(lines)]


def test_ranks_whose_lines_are_mixed_are_told_apart_by_their_prefix() -> None:
    one = [f"[rank1]: {line}" for line in TRACE.splitlines()]
    zero = [f"[rank0]: {line}" for line in TRACE.replace("ValueError", "KeyError").splitlines()]
    mixed = "\n".join(line for pair in zip(one, zero, strict=True) for line in pair)
    assert sorted(traces(mixed)) == [
        (0, "KeyError", "batch of 3 does not divide into 2"),
        (1, "ValueError", "batch of 3 does not divide into 2"),
    ]


def test_a_chain_of_exceptions_is_one_failure_and_keeps_where_it_came_from() -> None:
    chained = (
        TRACE
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + TRACE.replace("ValueError", "RuntimeError")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + TRACE.replace("ValueError", "my.package.TrainingFailed")
    )
    found = parse_traces(list(enumerate(chained.split("\n"))))
    assert [(trace.kind, trace.before) for trace in found] == [
        ("my.package.TrainingFailed", ("ValueError", "RuntimeError"))
    ]


def test_the_original_exception_of_a_loader_s_worker_is_the_one_to_tell() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 9, in <module>\n'
        "    for batch in loader:\n"
        "KeyError: Caught KeyError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "data.py", line 5, in __getitem__\n'
        '    return self.rows["label"]\n'
        "KeyError: 'label'\n"
    )
    assert traces(text) == [(None, "KeyError", "'label'")]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("socket.gaierror: [Errno -2] Name or service not known", "socket.gaierror"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError"),
        (
            "subprocess.CalledProcessError: Command '['x']' returned non-zero exit status 1.",
            "subprocess.CalledProcessError",
        ),
    ],
)
def test_exceptions_are_known_by_their_line(line: str, kind: str) -> None:
    text = f'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    x()\n{line}\n'
    assert [found[1] for found in traces(text)] == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last):",
        "Traceback (most recent call last):\n",
        "Traceback (most recent call last):\nstep 1 loss 0.5\n",
        "the words Traceback (most recent call last): in a sentence\nValueError: x\n",
        "Traceback (most recent call last):\n" + "  File x\n" * 1000,
    ],
    ids=["cut", "cut at its line", "no frames", "quoted", "without end"],
)
def test_what_only_looks_like_a_traceback_is_none(text: str) -> None:
    assert traces(text) == []


def test_what_another_logger_prints_after_an_exception_is_no_part_of_it() -> None:
    text = TRACE + "2026-11-29 10:00:00 INFO next\nE1129 10:00:00 torch: failed\n"
    assert traces(text) == [(None, "ValueError", "batch of 3 does not divide into 2")]


SUMMARY = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-29_10:00:01
  host      : n1
  rank      : 12 (local_rank: 4)
  exitcode  : -15 (pid: 4)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 4
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_10:00:00
  host      : n1
  rank      : 9 (local_rank: 1)
  exitcode  : 1 (pid: 5)
  error_file: <N/A>
  traceback : To enable traceback see: https://example.org
============================================================
"""


def test_the_summary_of_torchrun_tells_ranks_exit_codes_and_the_first() -> None:
    found = parse_failures(SUMMARY.split("\n"))
    assert [(f.rank, f.exitcode, f.root, f.error) for f in found] == [
        (12, -15, False, "Signal 15 (SIGTERM) received by PID 4"),
        (9, 1, True, ""),
    ]


def test_a_summary_that_is_cut_tells_what_is_there() -> None:
    assert [f.rank for f in parse_failures(SUMMARY.split("\n")[:10])] == [12]
    assert parse_failures(["Failures:"]) == []
    assert parse_failures([]) == []
