"""A run's log as `tp job logs` shows it: nodes told apart, secrets masked, whatever the files do meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch_jobs import bare_slurm_job, changed, write_run

from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.environment import render_secrets
from tuneplane.runs import logs as logs_module
from tuneplane.runs.logs import BLOCK_BYTES, MASK, MAX_LINE_BYTES, RunLog, Tail, follow, known_secrets
from tuneplane.runs.token import run_token, token_digest

pytestmark = pytest.mark.timeout(60)

RUN_ID = "ring-20260114-093012-x3k9"
SECRET = "hf_0123456789abcdef"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job = changed(bare_slurm_job(), {"metadata.folder": str(tmp_path / RUN_ID)})
    return write_run(job)


def claim(run: RunFolder, number: int = 0, hosts: tuple[str, ...] = ("n1",)) -> AttemptFolder:
    attempt = run.attempt(number)
    attempt.path.mkdir()
    write_json(attempt.start, {"job_id": "7", "hosts": list(hosts)})
    return attempt


def write(attempt: AttemptFolder, text: str | bytes, rank: int = 0) -> None:
    with attempt.node_log(rank).open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def lines(log: RunLog, final: bool = False) -> list[str]:
    return list(log.read_lines(final=final))


# One node and several


def test_one_nodes_log_is_shown_as_it_is(run: RunFolder) -> None:
    attempt = claim(run)
    write(attempt, "tuneplane: node 0 of 1 (n1): bash train.sh\nhello\n\n  indented\tx\n")
    log = RunLog(run)
    assert lines(log) == ["tuneplane: node 0 of 1 (n1): bash train.sh", "hello", "", "  indented\tx"]
    assert lines(log) == []


@pytest.mark.contract("C8")
def test_several_nodes_are_told_apart_from_the_first_line_on(run: RunFolder) -> None:
    attempt = claim(run, hosts=("n1", "n2", "n3"))
    log = RunLog(run)
    write(attempt, "early\n", 0)
    assert lines(log) == ["n1 | early"]
    write(attempt, "b\n", 1)
    write(attempt, "a\nc\n", 0)
    assert lines(log) == ["n1 | a", "n1 | c", "n2 | b"]


def test_eleven_nodes_are_in_their_order(run: RunFolder) -> None:
    attempt = claim(run, hosts=tuple(f"gpu{n:02d}" for n in range(12)))
    for rank in reversed(range(12)):
        write(attempt, f"rank {rank}\n", rank)
    assert lines(RunLog(run)) == [f"gpu{rank:02d} | rank {rank}" for rank in range(12)]


@pytest.mark.parametrize("node", ["1", "n2", 1])
def test_one_node_of_several_is_shown_by_number_or_host_and_needs_no_label(
    run: RunFolder, node: int | str
) -> None:
    attempt = claim(run, hosts=("n1", "n2"))
    write(attempt, "a\n", 0)
    write(attempt, "b\n", 1)
    assert lines(RunLog(run, node=node)) == ["b"]


def test_a_node_that_there_is_not_shows_nothing(run: RunFolder) -> None:
    write(claim(run), "a\n")
    log = RunLog(run, node="n9")
    assert lines(log, final=True) == [] and log.tails == {}


def test_a_host_is_named_as_its_agent_names_it(run: RunFolder) -> None:
    """A local run is claimed with an address; its agent knows the host."""
    attempt = claim(run, hosts=("127.0.0.1",))
    write(attempt, "a\n")
    log = RunLog(run, node="workstation")
    assert lines(log) == []
    write_json(attempt.node_record(0), {"rank": 0, "host": "workstation"})
    assert lines(log) == ["a"]


# Attempts


def test_without_an_attempt_there_is_nothing_but_the_scripts_own_words(run: RunFolder) -> None:
    old, new = run.slurm / "7.out", run.slurm / "9.out"
    old.write_text("old words\n")
    new.write_bytes(b"new words\nsha256sum: mismatch \xff\nno end")
    os.utime(old, (1, 1))
    log = RunLog(run)
    assert lines(log) == [] and log.current() is None
    assert list(log.batch_lines()) == ["new words", "sha256sum: mismatch \ufffd", "no end"]


def test_the_last_attempt_is_shown_and_an_earlier_one_where_it_is_asked_for(run: RunFolder) -> None:
    write(claim(run, 0), "first\n")
    write(claim(run, 1), "second\n")
    (run.attempts_folder / "01").mkdir()
    assert lines(RunLog(run)) == ["second"]
    assert lines(RunLog(run, attempt=0)) == ["first"]
    assert RunLog(run, attempt=5).current() is None


def test_a_new_attempt_follows_the_rest_of_the_former(run: RunFolder) -> None:
    first = claim(run, 0, ("n1", "n2"))
    write(first, "a\n")
    log = RunLog(run)
    assert lines(log) == ["n1 | a"]
    write(first, "the last words, without an end")
    write(claim(run, 1, ("n3",)), "b\n")
    assert lines(log) == ["n1 | the last words, without an end", "b"]
    assert lines(log) == []


# What files hold and do


def test_an_unfinished_line_waits_for_its_end(run: RunFolder) -> None:
    attempt = claim(run)
    log = RunLog(run)
    write(attempt, "half")
    assert lines(log) == []
    write(attempt, " and half\nrest")
    assert lines(log) == ["half and half"]
    assert lines(log, final=True) == ["rest"]
    assert lines(log, final=True) == []


def test_binary_output_is_shown_somehow(run: RunFolder) -> None:
    write(claim(run), bytes(range(256)) * 3 + b"\n\x00\xff\n")
    shown = lines(RunLog(run), final=True)
    assert shown[-1] == "\x00\ufffd"
    assert "".join(shown).count("\ufffd") > 100


def test_characters_that_are_split_between_two_reads_stay_whole(run: RunFolder) -> None:
    attempt = claim(run)
    log = RunLog(run)
    data = "损失 0.5\n".encode()
    for cut in range(1, len(data)):
        write(attempt, data[:cut])
        lines(log)
        write(attempt, data[cut:])
        assert lines(log) == ["损失 0.5"]


def test_a_huge_line_is_shown_in_pieces_of_whole_characters_with_bounded_memory(run: RunFolder) -> None:
    attempt = claim(run)
    text = "损" * (2 * MAX_LINE_BYTES)  # 6 MiB without a newline
    write(attempt, text)
    log = RunLog(run)
    pieces = []
    for piece in log.read_lines():
        pieces.append(piece)
        assert len(next(iter(log.tails.values())).rest) <= MAX_LINE_BYTES + (1 << 17)
    assert len(pieces) >= 5
    write(attempt, " end\n")
    pieces += lines(log)
    assert "".join(pieces) == text + " end"


def test_a_million_lines_stream(run: RunFolder) -> None:
    write(claim(run), "x\n" * 300_000)
    assert sum(1 for _ in RunLog(run).read_lines()) == 300_000


def test_a_log_that_was_cut_is_shown_from_its_new_start(run: RunFolder) -> None:
    attempt = claim(run)
    log = RunLog(run)
    write(attempt, "one\ntwo\nhalf")
    assert lines(log) == ["one", "two"]
    attempt.node_log(0).write_text("new\n")
    assert lines(log) == ["new"]


def test_a_log_that_was_put_in_place_anew_is_shown_from_its_start(run: RunFolder) -> None:
    attempt = claim(run)
    log = RunLog(run)
    write(attempt, "one\n")
    assert lines(log) == ["one"]
    other = attempt.path / "other"
    other.write_text("a longer log of another file\n")
    other.rename(attempt.node_log(0))
    assert lines(log) == ["a longer log of another file"]


def test_a_log_or_attempt_that_was_removed_meanwhile_is_no_error(run: RunFolder) -> None:
    attempt = claim(run)
    log = RunLog(run)
    write(attempt, "one\n")
    assert lines(log) == ["one"]
    attempt.node_log(0).unlink()
    assert lines(log) == []
    write(attempt, "two\n")
    assert lines(log) == ["two"]
    for path in attempt.path.iterdir():
        path.unlink()
    attempt.path.rmdir()
    assert lines(log, final=True) == []


def test_a_log_that_is_a_folder_is_no_error(tmp_path: Path) -> None:
    assert list(Tail(tmp_path, "x").read_lines(final=True)) == []


# Secrets


def known(run: RunFolder, **environ: str) -> tuple[str, ...]:
    return known_secrets(run, environ)


def put_secrets(run: RunFolder, **values: str) -> None:
    run.secrets.write_text(render_secrets(values))


@pytest.mark.contract("C11")
def test_secrets_that_a_program_prints_are_masked(run: RunFolder) -> None:
    put_secrets(run, HF_TOKEN=SECRET, OTHER_KEY="with 'quotes' $x")
    attempt = claim(run)
    write(attempt, f"token is {SECRET}!{SECRET}\nother: with 'quotes' $x\n")
    log = RunLog(run, masks=known(run))
    assert lines(log) == [f"token is {MASK}!{MASK}", f"other: {MASK}"]
    (run.slurm / "7.out").write_text(f"+ export HF_TOKEN={SECRET}\n")
    assert list(log.batch_lines()) == [f"+ export HF_TOKEN={MASK}"]


def test_of_two_secrets_the_longer_is_masked_whole(run: RunFolder) -> None:
    put_secrets(run, A_KEY="abcdef", B_KEY="abcdefghij")
    write(claim(run), "x abcdefghij y abcdef z\n")
    assert lines(RunLog(run, masks=known(run))) == [f"x {MASK} y {MASK} z"]


def test_each_line_of_a_secret_of_several_is_masked(run: RunFolder) -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQE=\n-----END KEY-----"
    put_secrets(run, SSH_KEY=key)
    write(claim(run), key + "\n")
    assert lines(RunLog(run, masks=known(run))) == [MASK] * 4


def test_a_value_that_would_hide_ordinary_words_is_no_mask(run: RunFolder) -> None:
    put_secrets(run, A_KEY="yes", B_KEY="", C_KEY="  \n")
    assert known(run) == ()


@pytest.mark.contract("C11")
def test_secrets_are_masked_after_the_run_has_ended_and_its_file_is_gone(
    tmp_path: Path, run: RunFolder
) -> None:
    token = run_token(RUN_ID)
    job = changed(
        bare_slurm_job(),
        {
            "metadata.folder": str(run.path),
            "spec.node.secrets": ["HF_TOKEN", "ABSENT_KEY"],
            "spec.reporting.enabled": True,
            "spec.reporting.token_sha256": token_digest(token),
        },
    )
    write_run(job)
    assert not run.secrets.exists()
    found = known(run, HF_TOKEN=SECRET, PATH="/usr/bin:/usr/local/bin")
    assert sorted(found) == sorted([SECRET, token])
    write(claim(run), f"{SECRET} {token}\n")
    assert lines(RunLog(run, masks=found)) == [f"{MASK} {MASK}"]
    put_secrets(run, HF_TOKEN="hf_of_the_submit", TUNEPLANE_JOB_TOKEN=token)
    assert sorted(known(run, HF_TOKEN="hf_another_one")) == sorted(["hf_of_the_submit", token])


def test_a_secrets_file_that_cannot_be_read_masks_nothing_and_is_no_error(run: RunFolder) -> None:
    run.secrets.mkdir()
    run.job.unlink()
    assert known(run) == ()


@pytest.mark.slow
@pytest.mark.contract("C11")
def test_no_half_of_a_secret_is_shown_where_a_huge_line_is_cut(run: RunFolder) -> None:
    put_secrets(run, HF_TOKEN=SECRET)
    masks = known(run)
    first_cut = MAX_LINE_BYTES + BLOCK_BYTES  # a line is cut by the block that makes it too long
    for shift in range(0, 6 * len(SECRET), 3):
        path = run.path / f"huge{shift}"
        path.write_text("x" * (first_cut - shift) + SECRET * 4 + "y" * 100_000)
        shown = "".join(Tail(path, "x", masks).read_lines(final=True))
        assert shown.strip("xy") == MASK * 4
        path.unlink()


# Following


class Following:
    """`follow` in a thread; what it showed so far."""

    def __init__(self, log: RunLog, is_final: Callable[[], bool]) -> None:
        self.shown: list[str] = []
        self.thread = threading.Thread(target=self._run, args=(log, is_final), daemon=True)
        self.thread.start()

    def _run(self, log: RunLog, is_final: Callable[[], bool]) -> None:
        for line in follow(log, is_final):
            self.shown.append(line)

    def wait_for(self, line: str) -> None:
        until = time.monotonic() + 20
        while line not in self.shown:
            assert time.monotonic() < until, self.shown
            time.sleep(0.01)

    def end(self) -> list[str]:
        self.thread.join(timeout=20)
        assert not self.thread.is_alive(), self.shown
        return self.shown


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logs_module, "POLL_S", 0.02)
    yield


def ended(run: RunFolder) -> Callable[[], bool]:
    return run.attempt(0).end.exists


def test_following_begins_before_the_run_does_and_misses_nothing_at_its_end(run: RunFolder) -> None:
    following = Following(RunLog(run), ended(run))
    time.sleep(0.1)
    attempt = claim(run)
    write(attempt, "first\n")
    following.wait_for("first")
    write(attempt, "second\nlast words without an end")
    write_json(attempt.end, {"code": 0})
    assert following.end() == ["first", "second", "last words without an end"]


def test_following_a_run_that_has_ended_shows_all_of_it(run: RunFolder) -> None:
    attempt = claim(run)
    write(attempt, "a\nb")
    write_json(attempt.end, {"code": 0})
    assert Following(RunLog(run), ended(run)).end() == ["a", "b"]


def test_a_follower_asks_slurm_seldom_and_at_once_when_our_own_records_tell_of_an_end(run: RunFolder) -> None:
    asked: list[float] = []
    attempt = claim(run)

    def is_final() -> bool:
        asked.append(time.monotonic())
        return attempt.end.exists()

    following = Following(RunLog(run), is_final)
    time.sleep(0.5)
    assert len(asked) == 1
    write_json(attempt.end, {"code": 0})
    following.end()
    assert len(asked) == 2


def test_a_follower_goes_on_into_the_next_attempt(run: RunFolder) -> None:
    first = claim(run, 0)
    following = Following(RunLog(run), run.attempt(1).end.exists)
    write(first, "a\n")
    following.wait_for("a")
    write_json(first.end, {"code": 143})
    second = claim(run, 1)
    write(second, "b\n")
    following.wait_for("b")
    write_json(second.end, {"code": 0})
    assert following.end() == ["a", "b"]


def test_following_one_attempt_ends_with_it_however_the_run_goes_on(run: RunFolder) -> None:
    first = claim(run, 0)
    write(first, "a\n")
    following = Following(RunLog(run, attempt=0), lambda: False)
    following.wait_for("a")
    claim(run, 1)
    write_json(first.end, {"code": 143})
    assert following.end() == ["a"]


def test_a_follower_outlives_a_log_that_is_removed_and_cut(run: RunFolder) -> None:
    attempt = claim(run)
    following = Following(RunLog(run), ended(run))
    write(attempt, "a long line before\n")
    following.wait_for("a long line before")
    attempt.node_log(0).unlink()
    time.sleep(0.1)
    write(attempt, "b\n")
    following.wait_for("b")
    attempt.node_log(0).write_text("c")
    time.sleep(0.1)
    write(attempt, "\n")
    write_json(attempt.end, {"code": 0})
    assert following.end() == ["a long line before", "b", "c"]
