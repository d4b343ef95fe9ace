"""The cache of many runs' points: quick where nothing is new, right whatever happens to it."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_job import REPOSITORY, RUN_ID, TOKEN_SHA256, needs_root
from test_collect_points import header, point, read, write

from tuneplane.collect import compact as compact_module
from tuneplane.collect import place as place_module
from tuneplane.collect import reader as reader_module
from tuneplane.collect import store as store_module
from tuneplane.collect.cache import NAME, SCHEMA
from tuneplane.collect.compact import NAME as COMPACT
from tuneplane.collect.metrics import metrics_of
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "ingest").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def source(run: Path, **more: Any) -> RunSource:
    return RunSource(run, RUN_ID, TOKEN_SHA256, **more)


def told(store: Store, run: Path, **more: Any) -> dict[str, Any]:
    """All that a store says of a run, after a look."""
    store.refresh([source(run, **more)])
    return comparable(metrics_of(store, RUN_ID))


def comparable(metrics: Any) -> dict[str, Any]:
    series = {
        name: (
            list(line.steps),
            [repr(value) for value in line.values],
            list(line.times_s),
            list(line.attempts),
            {attempt: (list(p.steps), [repr(v) for v in p.values]) for attempt, p in line.hidden.items()},
        )
        for name, line in metrics.series.items()
    }
    values = {
        name: tuple(repr(getattr(v, key)) for key in vars(v) if key != "age_s")
        for name, v in metrics.metrics.items()
    }
    counts = (metrics.gaps, metrics.torn_lines, metrics.dropped_points, metrics.attempts, metrics.newest_s)
    return {"series": series, "values": values, "counts": counts, "hparams": metrics.hparams}


def spoil(path: Path) -> None:
    """Exchange what is in a file, so that nobody sees it who does not read it again."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"#" * (status.st_size - 100))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_second_look_reads_only_what_is_new(run: Path, cache: Path) -> None:
    path = write(run, header(), *(point(n) for n in range(2000)))
    with Store(cache) as store:
        first = told(store, run)
        assert store.notice == "" and store.new_points(RUN_ID) == 2000
    spoil(path)
    write(run, point(2000, value=7.0))
    with Store(cache) as store:
        second = told(store, run)
        assert store.new_points(RUN_ID) == 1
    steps, values = second["series"]["loss"][:2]
    assert steps == [float(n) for n in range(2001)] and values[:2000] == first["series"]["loss"][1]
    assert second["counts"][:2] == (0, 0), "nothing torn, no gap"


def test_an_overview_of_runs_that_stand_still_loads_no_points(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, header(), *(point(n) for n in range(50)))
    write(run, header(attempt=1), *(point(n, step=n + 20) for n in range(50)), name="1.jsonl")
    with Store(cache) as store:
        expected = told(store, run)["values"]
    monkeypatch.setattr(store_module, "assemble", None)
    with Store(cache) as store:
        store.refresh([source(run)])
        value = store.overview(RUN_ID).metrics["loss"]
        assert expected["loss"][:2] == ("'loss'", repr(value.last))
        assert (value.last_step, value.points, value.hidden, value.attempts) == (69, 70, 30, 2)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def scribbled(path: Path) -> None:
    with path.open("r+b") as file:
        for page in range(1, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(os.urandom(200))


def of_another_version(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA + 1}")


def of_somebody_else(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE runs (unlike TEXT)")
        database.execute(f"PRAGMA user_version = {SCHEMA}")


def without_points(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM chunks")


def with_a_strange_ledger(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE runs SET ledger = '{\"columns\": [[1]]}'")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": lambda path: path.unlink(),
    "truncated": truncated,
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("not a database\n" * 500) and None,
    "scribbled": scribbled,
    "other version": of_another_version,
    "other tables": of_somebody_else,
    "no points": without_points,
    "strange ledger": with_a_strange_ledger,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_cache_that_is_damaged_or_of_another_version_is_made_anew(
    run: Path, cache: Path, damage: str
) -> None:
    write(run, header(), *(point(n) for n in range(3000)))
    with Store(cache) as store:
        expected = told(store, run)
    DAMAGE[damage](cache / NAME)
    write(run, point(3000))
    with Store(cache) as store:
        assert told(store, run) == comparable(read(run)) != expected
        assert store.notice == ""
    with Store(cache) as store:
        told(store, run)
        assert store.new_points(RUN_ID) == 0, "and it is one that is used again"


def test_a_cache_damaged_while_it_is_open_costs_nothing_but_time(run: Path, cache: Path) -> None:
    write(run, header(), *(point(n) for n in range(3000)))
    with Store(cache) as store:
        told(store, run)
        with sqlite3.connect(cache / NAME) as other:
            other.execute("DELETE FROM chunks")
        write(run, point(3000))
        assert told(store, run) == comparable(read(run))


def test_two_processes_share_the_cache(run: Path, cache: Path) -> None:
    write(run, header(), point(0))
    with Store(cache) as one, Store(cache) as two:
        told(one, run), told(two, run)
        for number in range(1, 1200, 3):
            write(run, *(point(n) for n in range(number, number + 3)))
            one.refresh([source(run)])
            if number % 2:
                write(run, point(5000 + number, name="other"))
                two.refresh([source(run)])
        expected = comparable(read(run))
        assert told(one, run) == expected and told(two, run) == expected
        assert one.notice == two.notice == ""


def test_many_processes_at_once_agree(run: Path, cache: Path) -> None:
    write(run, header(), *(point(n) for n in range(20_000)))
    program = f"""
import sys
from pathlib import Path
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store
with Store(Path(sys.argv[2])) as store:
    for _ in range(5):
        store.refresh([RunSource(Path(sys.argv[1]), {RUN_ID!r}, {TOKEN_SHA256!r})])
        print(len(store.series({RUN_ID!r}, ["loss"])["loss"]), store.overview({RUN_ID!r}).metrics["loss"].points)
"""
    argv = [sys.executable, "-c", program, str(run), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    started = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    for process in started:
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, set(out.splitlines())) == (0, {"20000 20000"})


def test_a_cache_that_another_process_holds_is_not_waited_for(run: Path, cache: Path) -> None:
    write(run, header(), point(0))
    with Store(cache) as store:
        told(store, run)
        blocker = sqlite3.connect(cache / NAME, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        write(run, point(1))
        started = time.monotonic()
        assert told(store, run) == comparable(read(run))
        assert time.monotonic() - started < 5
        assert "locked" in store.notice
        write(run, point(2))
        assert told(store, run) == comparable(read(run)), "and from now on it is read in memory"
        blocker.close()


def test_a_full_disk_of_the_cache_is_no_matter(run: Path, tmp_path: Path) -> None:
    needs_root()
    write(run, header(), *(point(n) for n in range(60_000)))
    program = f"""
import sys
from pathlib import Path
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store
with Store(Path(sys.argv[2], "cache")) as store:
    store.refresh([RunSource(Path(sys.argv[1]), {RUN_ID!r}, {TOKEN_SHA256!r})])
    print(len(store.series({RUN_ID!r}, ["loss"])["loss"]), store.notice)
"""
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = f'mount -t tmpfs -o size=600k none "{disk}" && exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", shell, "sh", sys.executable, "-c", program, str(run), str(disk)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert done.stdout == f"60000 {disk}/cache: database or disk is full\n", done.stderr


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "wekafs", "9p"])
def test_no_cache_lies_on_a_filesystem_that_machines_share(
    run: Path, cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "filesystem_at", lambda folder: kind)
    write(run, header(), point(0))
    with Store(cache) as store:
        assert told(store, run)["series"]["loss"][0] == [0.0]
        assert store.notice == f"{cache} lies on {kind}, which machines share"
    assert not cache.exists()


@pytest.mark.parametrize("what", ["a link", "a file", "a stranger's"])
def test_a_folder_that_somebody_else_laid_there_is_not_used(run: Path, cache: Path, what: str) -> None:
    write(run, header(), point(0))
    if what == "a link":
        (cache.parent / "elsewhere").mkdir()
        cache.symlink_to(cache.parent / "elsewhere")
    elif what == "a file":
        cache.write_text("")
    else:
        needs_root()
        cache.mkdir()
        os.chown(cache, 65534, 65534)
    with Store(cache) as store:
        assert told(store, run)["series"]["loss"][0] == [0.0]
        assert store.notice.startswith(str(cache)) and (
            "no folder" in store.notice or "65534" in store.notice
        )


def test_the_cache_is_the_user_s_alone_and_where_he_says(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, header(), point(0))
    monkeypatch.setenv("TUNEPLANE_STORE_DIR", str(cache))
    old = os.umask(0)
    try:
        with Store() as store:
            told(store, run)
    finally:
        os.umask(old)
    assert cache.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TUNEPLANE_STORE_DIR", "relative")
    with Store() as store:
        assert store.notice == "TUNEPLANE_STORE_DIR is no absolute path"


def big(run: Path) -> Path:
    """An ingest file that is worth a compact one."""
    return write(run, header(), *(point(n, value=n / 7) for n in range(20_000)), '{"n":20000,"h":{"lr":1}}\n')


def test_a_finished_run_is_parsed_once_for_all_machines(run: Path, tmp_path: Path) -> None:
    path = big(run)
    write(run, header(attempt=1), point(0, step=5, value=math.nan), name="1.jsonl")
    expected = comparable(read(run))
    with Store(tmp_path / "login1") as store:
        assert told(store, run) == expected
        assert not (run / COMPACT).exists(), "it may go on"
        assert told(store, run, ended=True) == expected
    assert (run / COMPACT).stat().st_size < path.stat().st_size / 2
    spoil(path)
    with Store(tmp_path / "login2") as store:
        assert told(store, run, ended=True) == expected
        assert store.new_points(RUN_ID) == 0
    with sqlite3.connect(tmp_path / "login1" / NAME) as database:
        assert database.execute("SELECT count(*) FROM chunks").fetchone() == (0,), "kept once"


def test_a_compact_file_that_may_not_be_right_is_not_read(run: Path, tmp_path: Path) -> None:
    path = big(run)
    with Store(tmp_path / "a") as store:
        told(store, run, ended=True)
    write(run, point(20_001, name="late"))  # by a process that was slow to end
    with Store(tmp_path / "b") as store:
        assert told(store, run, ended=True) == comparable(read(run))
    write(run, header(rank=1), point(0), name="more.jsonl")
    with Store(tmp_path / "c") as store:
        assert "loss@rank1" in told(store, run, ended=True)["series"]
        os.utime(path)
        write(run, point(20_002, name="later"))
        store._ledgers[RUN_ID].ended_at = -math.inf  # ten seconds later
        assert told(store, run, ended=True) == comparable(read(run))
    for place in (30, -20, 2000):
        with Store(tmp_path / "d") as store:
            told(store, run, ended=True)
        data = bytearray((run / COMPACT).read_bytes())
        data[place] ^= 255
        (run / COMPACT).chmod(0o600)
        (run / COMPACT).write_bytes(data)
        with Store(tmp_path / f"e{place}") as store:
            assert told(store, run, ended=True) == comparable(read(run))
        (run / COMPACT).unlink()


def test_a_compact_file_is_left_only_where_it_is_wanted(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, header(), point(0))
    with Store(cache) as store:
        told(store, run, ended=True)
    assert not (run / COMPACT).exists(), "of a small run: one file less"
    big(run).chmod(0o640)
    with Store(cache) as store, monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        told(store, run, ended=True)
    assert not (run / COMPACT).exists(), "of another's run"
    with Store(cache) as store, monkeypatch.context() as patch:
        patch.setattr(compact_module.os, "open", refuse)
        store._make_compact(store._ledger(source(run, ended=True)))
    with Store(cache) as store:
        told(store, run, ended=True)
    assert (run / COMPACT).stat().st_mode & 0o777 == 0o440, "who may read the points may read these"
    assert [p.name for p in run.iterdir() if p.name.startswith(".")] == []


def refuse(*arguments: Any, **more: Any) -> int:
    raise PermissionError(13, "Permission denied")


def test_one_broken_run_hides_no_other(tmp_path: Path, cache: Path) -> None:
    runs = []
    for index in range(3):
        (tmp_path / str(index) / "ingest").mkdir(parents=True)
        write(tmp_path / str(index), header(run_id=f"r{index}"), point(0))
        runs.append(RunSource(tmp_path / str(index), f"r{index}", TOKEN_SHA256))
    (tmp_path / "1" / "ingest").rename(tmp_path / "1" / "real")
    (tmp_path / "1" / "ingest").symlink_to("real")
    with Store(cache) as store:
        store.refresh(runs)
        assert [len(store.overview(f"r{i}").metrics) for i in range(3)] == [1, 0, 1]
        assert store.overview("r1").fault.endswith("ingest: cannot read points: Not a directory")
        assert store.overview("nobody") == store_module.Overview() and store.series("nobody", ["loss"]) == {}


def test_a_run_that_was_deleted_and_made_again_is_another(run: Path, cache: Path) -> None:
    write(run, header(), *(point(n) for n in range(600)))
    with Store(cache) as store:
        told(store, run)
        assert told(store, run)["series"]["loss"][0][-1] == 599
        changed = RunSource(run, RUN_ID, "0" * 64)
        store.refresh([changed])
        assert store.overview(RUN_ID).refused and not store.overview(RUN_ID).metrics
    with sqlite3.connect(cache / NAME) as database:
        assert database.execute("SELECT count(*) FROM chunks").fetchone() == (0,)


STEPS = st.integers(0, 12)
LINES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from("ab"), STEPS, st.floats(width=32)),
    min_size=1,
    max_size=12,
)
ACTIONS = st.one_of(
    LINES.map(lambda lines: ("write", lines)),
    st.sampled_from([("one", None), ("two", None), ("again", None), ("torn", None), ("cut", None)]),
    st.tuples(st.just("resume"), st.tuples(st.integers(0, 2), STEPS)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(ACTIONS, min_size=1, max_size=14))
def test_whatever_happens_the_cache_says_what_the_files_say(actions: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, cache = Path(folder, "run"), Path(folder, "cache")
        (run / "ingest").mkdir(parents=True)
        numbers: dict[str, int] = {}
        one, two = Store(cache), Store(cache)

        def put(attempt: int, rank: int, body: str) -> None:
            name = f"{attempt}-{rank}.jsonl"
            if name not in numbers:
                write(run, header(attempt=attempt, rank=rank, started=float(attempt)), name=name)
            number = numbers[name] = numbers.get(name, -1) + 1
            write(run, f'{{"n":{number},"t":{1000 + sum(numbers.values())},{body}}}\n', name=name)

        for what, given_of_it in actions:
            if what == "write":
                for attempt, rank, name, step, value in given_of_it:
                    put(attempt, rank, f'"s":{step},"m":{{"{name}":{json.dumps(value)}}}')
            elif what == "resume":
                put(given_of_it[0], 0, f'"r":{given_of_it[1]}')
            elif what == "torn" and numbers:
                write(run, '{"n":1,"t"\n', name=min(numbers))
            elif what == "cut" and numbers:
                name = max(numbers)
                (run / "ingest" / name).unlink()
                write(run, header(attempt=int(name[0]), rank=int(name[2])), name=name)
                numbers[name] = -1
            elif what == "again":
                one.close()
                one = Store(cache)
            elif what in ("one", "two"):
                store = one if what == "one" else two
                assert told(store, run) == comparable(read(run))
        expected = comparable(read(run))
        assert told(one, run) == expected and told(two, run) == expected
        one.close(), two.close()


def test_where_a_client_keeps_a_file_s_age_to_itself_the_file_is_opened(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: what stat says may be a minute old, what open says is not."""
    path = write(run, header(), point(0))
    old = path.lstat()
    monkeypatch.setattr(reader_module, "keeps_writes_back", lambda folder: True)
    monkeypatch.setattr(reader_module.os, "lstat", lambda name: old)
    with Store(cache) as store:
        told(store, run)
        write(run, point(1))
        assert told(store, run)["series"]["loss"][0] == [0.0, 1.0]


LEDGERS = (
    "",
    "[]",
    "[" * 100_000,
    '{"reader": {}}',
    lambda text: text.replace('"started_s":100.0', '"started_s":"x"'),
    lambda text: text.replace('"summaries":{"loss":[', '"summaries":{"loss":["a",'),
    lambda text: text.replace('"attempt":0', '"attempt":"x"'),
    lambda text: text.replace('"attempt":0', '"attempt":Infinity'),
)


@pytest.mark.parametrize("ledger", LEDGERS, ids=range(len(LEDGERS)))
def test_whatever_a_compact_file_says_of_itself_the_run_is_read(
    run: Path, tmp_path: Path, ledger: Any
) -> None:
    big(run)
    with Store(tmp_path / "a") as store:
        told(store, run, ended=True)
    opened = compact_module.open_compact(run)
    assert opened is not None
    text = ledger if isinstance(ledger, str) else ledger(opened.ledger)
    assert text != opened.ledger
    compact_module.write_compact(run, text, opened.sizes, [])
    with Store(tmp_path / "b") as store:
        assert told(store, run, ended=True) == comparable(read(run))


INDEXES = (
    {"columns": []},
    {"columns": {"0": [0, 10, 0, 1 << 60]}},
    {"columns": {"0": [0, 1 << 60, 0, 1]}},
    {"columns": {"0": [-5, 10, 0, 1]}},
    {"columns": {"0": [math.inf, 10, 0, 1]}},
    {"sizes": 5},
)


@pytest.mark.parametrize("index", INDEXES, ids=range(len(INDEXES)))
def test_a_compact_file_that_somebody_made_up_hides_no_run(
    run: Path, tmp_path: Path, index: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    big(run)
    with Store(tmp_path / "a") as store:
        told(store, run, ended=True)
    opened = compact_module.open_compact(run)
    assert opened is not None
    dumps = json.dumps
    monkeypatch.setattr(compact_module.json, "dumps", lambda value, **more: dumps({**value, **index}, **more))
    compact_module.write_compact(run, opened.ledger, opened.sizes, [])
    monkeypatch.undo()
    with Store(tmp_path / "b") as store:
        assert told(store, run, ended=True) == comparable(read(run))


def test_no_file_is_held_open_for_a_run_that_has_ended(run: Path, tmp_path: Path) -> None:
    big(run)
    with Store(tmp_path / "a") as store:
        told(store, run, ended=True)
        held = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [path for path in held if path.startswith(str(run))]


def test_a_run_that_was_dropped_and_read_again_is_no_longer_the_one_it_was(
    tmp_path: Path, cache: Path
) -> None:
    """A quiet board holds a run in memory, another `tp` drops it from the cache, and its place is taken."""
    one, other = tmp_path / "one", tmp_path / "other"
    another = "another-20260102-030405-ab12"
    for folder, run_id, value in ((one, RUN_ID, 1.0), (other, another, 2.0)):
        (folder / "ingest").mkdir(parents=True)
        write(folder, header(run_id=run_id), *(point(n, value=value) for n in range(50_000)))
    with Store(cache) as board, Store(cache) as tp:
        told(board, one)
        told(tp, one, ended=True)
        assert (one / COMPACT).exists()
        tp.refresh([RunSource(other, another, TOKEN_SHA256)])
        write(one, point(50_000, value=1.0))
        told(tp, one)
        write(one, point(50_001, value=1.0))
        assert set(told(board, one)["series"]["loss"][1]) == {"1.0"}
    with Store(cache) as store:
        assert told(store, one) == comparable(read(one))


def test_a_cache_that_was_held_is_used_again_later(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, header(), point(0))
    with Store(cache) as store:
        told(store, run)
        blocker = sqlite3.connect(cache / NAME, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        write(run, point(1))
        monkeypatch.setattr(store_module, "_RETRY_S", 0.0)
        told(store, run)
        assert store.notice
        blocker.close()
        write(run, point(2))
        assert told(store, run) == comparable(read(run))
        assert not store.notice
    with Store(cache) as store:
        told(store, run)
        assert store.new_points(RUN_ID) == 0, "what was read afterwards is kept"


def test_the_mode_of_a_folder_that_is_there_is_left_as_it_is(run: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o2775)
    write(run, header(), point(0))
    with Store(cache) as store:
        assert told(store, run) == comparable(read(run))
        assert "may be entered by others" in store.notice
    assert cache.stat().st_mode & 0o7777 == 0o2775 and list(cache.iterdir()) == []
