"""`make test` says which programs are missing, and installs them only where it may."""

from __future__ import annotations

import pytest
from tools.system_packages import NEEDED, Program, main, plan

GIT = next(program for program in NEEDED if program.name == "git")
SHELLCHECK = next(program for program in NEEDED if program.name == "shellcheck")


def test_with_everything_there_nothing_is_installed() -> None:
    assert plan([], root=True, apt=True) == ([], ["system packages: nothing is missing"])


def test_root_with_apt_installs_each_package_once() -> None:
    twice = [SHELLCHECK, GIT, Program("git-shell", "git", "nothing")]
    packages, lines = plan(twice, root=True, apt=True)
    assert packages == ["git", "shellcheck"]
    assert lines == ["system packages: installing git, shellcheck"]


@pytest.mark.parametrize(
    ("root", "apt", "why"), [(False, True, "this is not root"), (True, False, "there is no apt-get here")]
)
def test_others_are_told_what_is_missing_for_what_and_how_to_get_it(root: bool, apt: bool, why: str) -> None:
    packages, lines = plan([GIT], root=root, apt=apt)
    assert packages == []
    assert lines[0] == "system packages: git is missing (all tests of labs and capsules)"
    assert lines[-1] == f"nothing was installed, because {why}; on Debian: apt-get install git"


def test_it_succeeds_here_with_nothing_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(found=lambda program: True) == 0
    assert "nothing is missing" in capsys.readouterr().out
