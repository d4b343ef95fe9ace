"""A run's token: made from the user's key, the same again at a retry, nobody else's to make."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tuneplane.kernel.errors import OperationError
from tuneplane.runs import token as token_module
from tuneplane.runs.token import known_token, run_token, token_digest

ROOT = Path(__file__).resolve().parents[1]
RUN = "ring-20260114-093012-x3k9"


@pytest.fixture(autouse=True)
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the key of this test's user is, once it is made."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "tuneplane" / "key"


def refusal() -> tuple[str, str, str]:
    with pytest.raises(OperationError) as caught:
        run_token(RUN)
    (fault,) = caught.value.faults
    return fault.what, fault.where, fault.remedy


@pytest.mark.contract("C31")
def test_a_token_is_random_for_each_run_and_the_same_again_for_one() -> None:
    tokens = [run_token(f"ring-20260114-0930{number:02d}-x3k9") for number in range(60)]
    assert len(set(tokens)) == 60
    assert tokens == [run_token(f"ring-20260114-0930{number:02d}-x3k9") for number in range(60)]
    assert all(len(token) == 64 and token.isalnum() for token in tokens)


def test_another_user_has_another_token_for_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = run_token(RUN)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert run_token(RUN) != mine


def test_a_token_is_the_hmac_of_the_run_id(key: Path) -> None:
    """Written out as RFC 2104 has it."""
    made = run_token(RUN)
    block = key.read_bytes().ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in block) + RUN.encode()).digest()
    assert made == hashlib.sha256(bytes(b ^ 0x5C for b in block) + inner).hexdigest()


@pytest.mark.contract("C11")
@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_the_key_is_the_users_alone_from_its_first_moment(key: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run_token(RUN)
    finally:
        os.umask(before)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert [p.name for p in key.parent.iterdir()] == ["key"]


def test_of_many_first_uses_at_once_one_key_stays(key: Path) -> None:
    """Threads here and processes beside them."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tuneplane.runs.token import run_token; print(run_token(sys.argv[2]))"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", code, str(ROOT), RUN], stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(run_token, [RUN] * 64))
    made |= {other.communicate(timeout=60)[0].strip() for other in others}
    assert len(made) == 1
    assert [p.name for p in key.parent.iterdir()] == ["key"]


def test_the_loser_of_a_race_takes_the_winners_key(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(source: Path, target: Path) -> None:
        target.write_bytes(b"w" * 32)
        target.chmod(0o600)
        link(source, target)

    monkeypatch.setattr(token_module.os, "link", late)
    run_token(RUN)
    assert key.read_bytes() == b"w" * 32


@pytest.mark.parametrize("data", [b"", b"short", b"x" * 33, b"x" * 4096])
def test_a_damaged_key_is_told_with_the_remedy_and_kept(key: Path, data: bytes) -> None:
    run_token(RUN)
    key.write_bytes(data)
    assert refusal() == ("your key is damaged", str(key), "remove it: the next submit makes one")
    assert key.read_bytes() == data


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_key_that_others_can_reach_is_not_used(key: Path, mode: int) -> None:
    run_token(RUN)
    key.chmod(mode)
    assert refusal() == (
        "your key can be read by others",
        str(key),
        "remove it: the next submit makes another",
    )


def test_a_key_that_is_a_folder_or_a_place_where_none_can_be_made_is_told(key: Path) -> None:
    key.mkdir(parents=True)
    assert refusal()[:2] == ("your key cannot be used: Is a directory", str(key))


def test_a_full_disk_leaves_no_half_key(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes, mode: int) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(token_module, "write_atomic", full)
    assert refusal()[0] == "your key cannot be used: No space left on device"
    assert list(key.parent.iterdir()) == []


def test_a_known_token_is_given_only_where_it_is_that_runs(key: Path) -> None:
    assert known_token(RUN, "0" * 64) is None
    assert not key.exists(), "asking makes no key"
    token = run_token(RUN)
    assert known_token(RUN, token_digest(token)) == token
    assert known_token("ring-20260114-093012-0000", token_digest(token)) is None
    key.write_bytes(b"damaged")
    assert known_token(RUN, token_digest(token)) is None
