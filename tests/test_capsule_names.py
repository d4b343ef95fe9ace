"""Any file name and content that git holds comes out of the capsule as it went in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from git_lab import MARKER_TEXT, GitLab
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.capsule import build_capsule, check_capsule
from tuneplane.capsule.tree import is_cache, is_secret
from tuneplane.kernel.unpack import read_manifest, remove_tree, unpack_capsule

PARTS = (
    st.binary(min_size=1, max_size=40)
    .map(lambda raw: os.fsdecode(raw.replace(b"/", b"_").replace(b"\0", b"_")))
    .filter(lambda part: part not in (".", ".."))
    # What git or the capsule keeps for itself has tests of its own.
    .filter(lambda part: not part.lower().startswith((".git", "git~", "tuneplane", ".tuneplane")))
)
PATHS = (
    st.lists(PARTS, min_size=1, max_size=4)
    .map("/".join)
    .filter(lambda p: not is_secret(p) and not is_cache(p))
)
CONTENTS = st.binary(max_size=2000).filter(lambda content: not content.startswith(b"version https://"))
TREES = st.dictionaries(PATHS, st.tuples(CONTENTS, st.booleans()), max_size=8)


def free_of_conflicts(tree: dict[str, tuple[bytes, bool]]) -> dict[str, tuple[bytes, bool]]:
    """Without the files that would lie below another file."""
    return {p: v for p, v in tree.items() if not any(q != p and p.startswith(f"{q}/") for q in tree)}


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(tree=TREES.map(free_of_conflicts), commit=st.booleans())
def test_any_tree_survives_the_way_to_the_node(tree: dict[str, tuple[bytes, bool]], commit: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        lab = GitLab(Path(place, "lab"))
        if not commit:
            lab.commit()
        for path, (content, executable) in tree.items():
            lab.write(path, content, 0o755 if executable else 0o644)
        if commit:
            lab.commit()
        capsule, work = Path(place, "capsule.tar"), Path(place, "work")
        info = build_capsule(lab.root, capsule, allow_dirty=not commit)
        assert check_capsule(lab.root, allow_dirty=not commit) == ([], info)
        unpack_capsule(capsule, work, info.digest)
        assert info.paths == {*tree, "tuneplane.yaml"}
        for path, (content, executable) in tree.items():
            assert (work / path).read_bytes() == content
            assert bool((work / path).stat().st_mode & 0o111) == executable
        assert (work / "tuneplane.yaml").read_text() == MARKER_TEXT
        assert {e.path for e in read_manifest(capsule) if not e.path.startswith(".tuneplane/")} == info.paths
        remove_tree(work)
