"""docs/contract.md names every clause, and `make contract` is not fooled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.contract import CLAUSES, read_clauses

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tests" / "tools" / "contract.py"
PAGE = ROOT / "docs" / "contract.md"


NUMBERS = '@pytest.mark.contract("C12")\ndef test_numbers():\n    assert True\n'


def page(**states: str) -> str:
    """A contract of every clause, each `later` where no other state is given."""
    lines = []
    for name in CLAUSES:
        state = states.get(name, "later — in this made-up page")
        lines += [
            f"## {name}. Title" if name == "J" else f"### {name}. Title",
            "",
            f"State: {state}",
            "",
            "Text.",
            "",
        ]
    return "\n".join(lines)


def run_tool(folder: Path, contract: str, *tests: str) -> subprocess.CompletedProcess[str]:
    """The tool as `make contract` runs it, on a page, a test file and, where given, its conftest.py."""
    (folder / "contract.md").write_text(contract, encoding="utf-8")
    (folder / "tests").mkdir()
    for name, text in zip(("test_made_up.py", "conftest.py"), tests, strict=False):
        (folder / "tests" / name).write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    contract: c\n    slow: s\n", encoding="utf-8"
    )
    return subprocess.run(
        [sys.executable, str(TOOL), "--contract", "contract.md", "--tests", "tests"],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # quicker, and the same collection
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_page_names_every_clause_once_each_with_a_state() -> None:
    clauses, faults = read_clauses(PAGE.read_text(encoding="utf-8"))
    assert faults == []
    assert [clause.name for clause in clauses] == list(CLAUSES)


def test_the_public_strings_stand_in_the_page_to_the_letter() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for said in (
        "no training command yet",
        "custom entrypoint is missing or escapes the experiment directory",
        "custom external observability requires spec.framework.observability_url",
        "image registry HOST is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES",
        "git add -A && git commit",
        "plugin  : alice/opsd-patch@1.2.0 applied in entrypoint process",
        "plugin  : alice/opsd-patch@1.2.0 registered in entrypoint process (deferred)",
    ):
        assert f"`{said}`" in text


@pytest.mark.slow
def test_a_built_clause_with_a_test_passes_and_the_table_shows_them(tmp_path: Path) -> None:
    done = run_tool(
        tmp_path,
        page(C12="built"),
        f"import pytest\n\n{NUMBERS}",
    )
    assert done.returncode == 0, done.stderr
    assert any(
        line.split()[:2] == ["C12", "built"] and "::test_numbers" in line for line in done.stdout.splitlines()
    )


@pytest.mark.slow
def test_a_built_clause_without_a_test_fails(tmp_path: Path) -> None:
    done = run_tool(tmp_path, page(C12="built"), "def test_numbers():\n    assert True\n")
    assert done.returncode == 1
    assert "C12 is built and no test proves it" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        f"# {NUMBERS}",
        'import pytest\n\n@pytest.mark.contract("C12")\ndef numbers():\n    assert True\n',
        f"import pytest\n\n@pytest.mark.skip\n{NUMBERS}",
        f"import pytest\n\n@pytest.mark.xfail\n{NUMBERS}",
        f'import pytest\npytest.skip("no", allow_module_level=True)\n\n{NUMBERS}',
    ],
    ids=["comment", "helper", "skipped", "xfail", "skipped module"],
)
def test_a_mark_on_what_never_runs_proves_nothing(tmp_path: Path, text: str) -> None:
    done = run_tool(tmp_path, page(C12="built"), text)
    assert done.returncode == 1
    assert "C12 is built and no test proves it" in done.stderr


@pytest.mark.slow
def test_marks_of_parameters_classes_and_modules_count(tmp_path: Path) -> None:
    tests = (
        'import pytest\n\npytestmark = pytest.mark.contract("C1")\n\n'
        '@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.contract("C2"))])\n'
        "def test_cases(n):\n    assert n\n"
    )
    done = run_tool(tmp_path, page(C1="built", C2="built"), tests)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith(("C1 ", "C2 "))]
    assert "(2 cases)" in rows[0]
    assert rows[1].endswith("::test_cases")


def test_a_test_that_a_selection_would_leave_out_still_counts(tmp_path: Path) -> None:
    deselects = "def pytest_collection_modifyitems(config, items):\n    items[:] = []\n"
    done = run_tool(tmp_path, page(C12="built"), f"import pytest\n\n@pytest.mark.slow\n{NUMBERS}", deselects)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mark", "told"),
    [
        ('contract("C48")', "C48 is no clause"),
        ('contract("c12")', "c12 is no clause"),
        ("contract()", "names no clause"),
        ('contract("C1", "C2", "C3")', "claims C1, C2, C3; 2 at the most"),
    ],
)
def test_a_mark_that_means_nothing_or_too_much_fails(tmp_path: Path, mark: str, told: str) -> None:
    done = run_tool(
        tmp_path, page(), f"import pytest\n\n@pytest.mark.{mark}\ndef test_it():\n    assert True\n"
    )
    assert done.returncode == 1
    assert told in done.stderr


@pytest.mark.slow
def test_two_clauses_a_test_are_allowed(tmp_path: Path) -> None:
    done = run_tool(
        tmp_path, page(C11="built", C12="built"), f'import pytest\n\n@pytest.mark.contract("C11")\n{NUMBERS}'
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tests_that_cannot_be_collected_fail_and_are_named(tmp_path: Path) -> None:
    done = run_tool(tmp_path, page(), "import no_such_module\n")
    assert done.returncode == 1
    assert "test_made_up.py: cannot be collected" in done.stderr


@pytest.mark.slow
def test_what_comes_later_needs_no_test_and_what_is_partly_there_is_only_noted(tmp_path: Path) -> None:
    done = run_tool(tmp_path, page(C5="partly — half"), "def test_it():\n    assert True\n")
    assert done.returncode == 0, done.stderr
    assert "note: C5 is partly built and no test proves that part" in done.stdout


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("### C7. Title", "### C6. Title"), "C6 is on the page 2 times"),
        (lambda text: text.replace("### C7. Title", "### C6. Title"), "C7 is not on the page"),
        (lambda text: text.replace("### C7. Title", "### C99. Title"), "C99 is no clause"),
        (
            lambda text: text.replace("State: later — in this made-up page", "State: soon", 1),
            "C1 has no line `State:",
        ),
        (lambda text: text.replace("State: later — in this made-up page", "", 1), "C1 has no line `State:"),
        (lambda text: text.replace(" — in this made-up page", "", 1), "C1 does not say what is missing"),
        (lambda text: text.replace("later —", "built —", 1), "C1 says what is missing, though it is built"),
    ],
)
def test_a_page_that_lost_a_clause_or_a_state_is_faulted(change: Callable[[str], str], told: str) -> None:
    _, faults = read_clauses(change(page()))
    assert any(told in fault for fault in faults), faults


@pytest.mark.slow
def test_a_faulty_page_fails_the_tool(tmp_path: Path) -> None:
    done = run_tool(tmp_path, page().replace("### C7.", "### C6."), "def test_it():\n    assert True\n")
    assert done.returncode == 1
    assert "C7 is not on the page" in done.stderr
