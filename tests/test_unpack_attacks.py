"""Archives that someone made or broke on purpose: each refused in words, nothing written anywhere."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuneplane.kernel.digests import tree_digest
from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.unpack import (
    read_manifest,
    remove_tree,
    structure_faults,
    unpack_capsule,
    verify_capsule,
)

ANY_DIGEST = "sha256:" + "0" * 64


def member(name: str, content: bytes = b"x", **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    info.size = len(content)
    for fact, value in facts.items():
        setattr(info, fact, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, b"", type=kind, linkname=target, mode=0o777 if kind == tarfile.SYMTYPE else 0o644)


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of these headers as they are, whatever they claim."""
    content = b""
    for info, data in members:
        content += info.tobuf(form, "utf-8", "surrogateescape") + data + b"\0" * (-len(data) % 512)
    content += b"\0" * 1024
    return content + b"\0" * (-len(content) % tarfile.RECORDSIZE)


def refused(tmp_path: Path, content: bytes, words: str) -> None:
    """The archive is refused in these words, before its digest is even looked at, and nothing is left or made."""
    capsule = tmp_path / "capsule.tar"
    capsule.write_bytes(content)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(OperationError) as raised:
        unpack_capsule(capsule, tmp_path / "work", ANY_DIGEST)
    assert words in str(raised.value)
    assert "submit the experiment again" in str(raised.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("members", "words"),
    [
        pytest.param([member("../evil")], "../evil is not a plain relative path", id="dotdot"),
        pytest.param([member("a/../../evil")], "is not a plain relative path", id="dotdot inside"),
        pytest.param([member("a/..")], "is not a plain relative path", id="dotdot last"),
        pytest.param([member("/etc/evil")], "/etc/evil is an absolute path", id="absolute"),
        pytest.param([member("./a")], "./a is not a plain relative path", id="dot"),
        pytest.param([member("a//b")], "a//b is not a plain relative path", id="empty part"),
        pytest.param([member("")], "is not a plain relative path", id="no name"),
        pytest.param([member("x/" * 2100 + "x")], "longer than a path", id="too long"),
        pytest.param(
            [link("out", "../../etc"), member("out/evil")], "lies below out", id="file through a link"
        ),
        pytest.param([link("in", "a"), member("in/b")], "lies below in", id="file through an inner link"),
        pytest.param([member("a"), member("a/b")], "lies below a", id="file below a file"),
        pytest.param(
            [link("l", "/etc/passwd")], "l is a link that leads out: /etc/passwd", id="absolute link"
        ),
        pytest.param([link("a/l", "../../x")], "a/l is a link that leads out", id="link leads out"),
        pytest.param(
            [link("a/up", ".."), link("l", "a/up/../x")],
            "l is a link that leads out",
            id="link through a link",
        ),
        pytest.param([link("l", "missing/../../x")], "leads out", id="link through what is missing"),
        pytest.param([link("l", "")], "is a link whose target cannot be a path", id="link to nothing"),
        pytest.param(
            [member("a"), link("b", "a", tarfile.LNKTYPE)], "neither file nor link: b", id="hard link"
        ),
        pytest.param(
            [link("b", "/etc/shadow", tarfile.LNKTYPE)], "neither file nor link", id="hard link out"
        ),
        pytest.param(
            [member("null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
            "neither file nor",
            id="device",
        ),
        pytest.param([member("disk", b"", type=tarfile.BLKTYPE)], "neither file nor link", id="block device"),
        pytest.param([member("pipe", b"", type=tarfile.FIFOTYPE)], "neither file nor link", id="fifo"),
        pytest.param([member("d", b"", type=tarfile.DIRTYPE)], "neither file nor link", id="folder"),
        pytest.param([member("c", type=tarfile.CONTTYPE)], "neither file nor link", id="contiguous"),
        pytest.param([member("old", type=tarfile.AREGTYPE)], "neither file nor link", id="old file type"),
        pytest.param([member("a"), member("a", b"y")], "a stands in it twice", id="twice"),
        pytest.param([member("a"), link("a", "b")], "a stands in it twice", id="file and link"),
        pytest.param([member("a", mode=0o4755)], "a file of mode 4755", id="setuid"),
        pytest.param([member("a", mode=0o666)], "a file of mode 666", id="world-writable"),
        pytest.param([member("a", size=1 << 40)], "cut short: a is longer than what is left", id="huge"),
        pytest.param([member("a", size=-1)], "cut short: a is longer than what is left", id="negative size"),
        pytest.param([member("a", mtime=1 << 60)], "impossible date", id="date"),
        pytest.param([member("a", mtime=-1)], "impossible date", id="negative date"),
        pytest.param([member("a", linkname="b")], "neither file nor", id="both"),
    ],
)
def test_a_hostile_member_is_refused_before_anything_is_made(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], words: str
) -> None:
    refused(tmp_path, archive(member("sound"), *members), words)


def test_pax_headers_that_rename_or_resize_are_refused(tmp_path: Path) -> None:
    info, data = member("innocent")
    info.pax_headers = {"path": "../evil"}
    refused(tmp_path, archive((info, data), form=tarfile.PAX_FORMAT), "neither file nor link")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"size": "1"}) as tar:
        tar.addfile(info, io.BytesIO(data))
    refused(tmp_path, content.getvalue(), "neither file nor link")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"../" * 50 + b"evil\0", "is not a plain relative path"),
        (b"no end", "malformed long name"),
        (b"two\0ends\0", "malformed long name"),
        (b"x" * 5000 + b"\0", "longer than a path"),
        (b"\0", "is not a plain relative path"),
    ],
)
def test_a_hostile_long_name_is_refused(tmp_path: Path, name: bytes, words: str) -> None:
    longer = member("././@LongLink", name, type=tarfile.GNUTYPE_LONGNAME)
    refused(tmp_path, archive(longer, member("innocent")), words)


def test_long_names_that_name_nothing_are_refused(tmp_path: Path) -> None:
    longer = member("././@LongLink", b"name\0", type=tarfile.GNUTYPE_LONGNAME)
    refused(tmp_path, archive(member("a"), longer), "ends after a long name")
    refused(tmp_path, archive(longer, longer, member("a")), "neither file nor link")


def sound() -> bytes:
    """A capsule with each thing that one may hold: long names, links, empty and larger files."""
    long_name = "d" * 90 + "/" + "f" * 90
    return archive(
        member("empty", b""),
        member("a/train.sh", b"#!/bin/sh\n", mode=0o755),
        member(long_name, bytes(range(256)) * 6),
        link("a/l", "train.sh"),
        link("m", long_name),
    )


def test_the_sound_archive_of_these_tests_is_accepted(tmp_path: Path) -> None:
    capsule = tmp_path / "capsule.tar"
    capsule.write_bytes(sound())
    entries = read_manifest(capsule)
    assert len(entries) == 5
    unpack_capsule(capsule, tmp_path / "work", tree_digest(entries))


def test_an_archive_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = sound()
    end = content.rstrip(b"\0")  # what follows is padding, of which some may go
    for length in [*range(0, len(end), 97), len(end), len(end) // 512 * 512]:
        refused(tmp_path, content[:length], "the capsule")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda c: c + b"x", id="a byte after the end"),
        pytest.param(lambda c: c + b"\0" * 20_000, id="zeros without end"),
        pytest.param(lambda c: c + c, id="two archives in one"),
        pytest.param(lambda c: b"", id="nothing"),
        pytest.param(lambda c: b"not a tar at all, only text\n" * 100, id="text"),
        pytest.param(lambda c: b"\x1f\x8b" + c, id="shifted"),
    ],
)
def test_an_archive_with_something_else_around_it_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    refused(tmp_path, change(sound()), "the capsule")


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bits_are_found(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    capsule = tmp_path / "capsule.tar"
    content = bytearray(sound())
    capsule.write_bytes(content)
    entries = read_manifest(capsule)
    for position, mask in flips:
        content[position] ^= mask
    capsule.write_bytes(content)
    try:
        found = verify_capsule(capsule, tree_digest(entries))
    except OperationError:
        return
    # Dates, owners and spare bits of a header are no part of the digest; all that a job can see is.
    assert found == entries


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.one_of(
        st.binary(max_size=3000),
        st.lists(
            st.builds(
                lambda name, kind, target, size, data: archive(
                    member(name, data, type=kind, linkname=target, size=size)
                )[: 512 * 4],
                st.text("ab/.\0é", max_size=120),
                st.sampled_from([b"0", b"1", b"2", b"5", b"L", b"K", b"x", b"g", b"S", b"7", b"\0"]),
                st.text("ab/.", max_size=120),
                st.integers(-5, 2000),
                st.binary(max_size=600),
            ),
            max_size=4,
        ).map(b"".join),
    )
)
def test_no_archive_at_all_makes_it_fail_in_another_way_or_write_outside(
    tmp_path: Path, content: bytes
) -> None:
    folder = tmp_path / "fuzz"
    folder.mkdir(exist_ok=True)
    capsule = folder / "capsule.tar"
    capsule.write_bytes(content)
    try:
        unpack_capsule(capsule, folder / "work", tree_digest(read_manifest(capsule)))
    except OperationError:
        assert os.listdir(folder) == ["capsule.tar"]
        return
    for name in (folder / "work").rglob("*"):
        assert name.resolve().is_relative_to(folder / "work") or not name.exists()
    remove_tree(folder / "work")


def test_a_capsule_that_changes_between_check_and_unpack_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capsule = tmp_path / "capsule.tar"
    capsule.write_bytes(archive(member("a", b"checked"), member("b", b"x" * 3_000_000)))
    digest = tree_digest(read_manifest(capsule))
    mkdir = Path.mkdir

    def swap_then_mkdir(path: Path, mode: int = 0o777) -> None:
        content = capsule.read_bytes()
        with capsule.open("r+b") as file:
            file.write(content.replace(b"x" * 1000, b"y" * 1000))
        mkdir(path, mode)

    monkeypatch.setattr(Path, "mkdir", swap_then_mkdir)
    with pytest.raises(OperationError, match="changed while it was unpacked: b"):
        unpack_capsule(capsule, tmp_path / "work", digest)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("links", "sound"),
    [
        ({"a": "b"}, True),
        ({"a": "."}, True),
        ({"d/a": ".."}, True),
        ({"d/a": "../x/y/../z"}, True),
        ({"a": "b", "b": "a"}, True),  # a loop leads nowhere
        ({"a": "a/../../x"}, True),  # so does what would come after it
        ({f"l{n}": f"l{n + 1}" for n in range(60)}, True),
        ({"a": ".."}, False),
        ({"d/a": "../.."}, False),
        ({"a": "/"}, False),
        ({"d/in": "..", "x": "d/in/../y"}, False),
        ({"x/y/deep": "../..", "l": "x/y/deep/x/y/deep/x", "m": "x/y/deep/.."}, False),
    ],
)
def test_links_are_followed_by_name_to_their_end(links: dict[str, str], sound: bool) -> None:
    assert (not structure_faults(list(links), links)) == sound
