"""`make contract`: the clauses of docs/contract.md beside the tests that prove them.

Exit 1: a built clause without a test, a mark that names no clause, a test with more than two clauses, a clause
that the page misses or holds twice, tests that cannot be collected. Tests are collected by pytest, not read as
text: a mark in a comment, on a helper, or on a test that never runs proves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAUSES = (*(f"C{number}" for number in range(1, 48)), "J")
STATES = ("built", "partly", "later")
MOST_CLAUSES_A_TEST = 2
NEVER_RUN = ("skip", "xfail")
"""A test with one of these, without a condition, cannot fail."""

HEADING = re.compile(r"^(?:### (C\d+)\.|## (J)\.) (.+)$")
STATE = re.compile(r"^State: (\w+)(?: — (.+))?$")


@dataclass(frozen=True)
class Clause:
    """One clause of the page. missing: what a clause that is not wholly built lacks, in a phrase."""

    name: str
    title: str
    state: str
    missing: str
    line: int


@dataclass(frozen=True)
class Test:
    """One test as pytest collects it; the cases of a parametrised test are one test each."""

    __test__ = False  # not a test class, whatever its name

    id: str
    clauses: tuple[str, ...]
    runs: bool

    @property
    def function(self) -> str:
        """The test without its case."""
        return self.id.partition("[")[0]


@dataclass(eq=False)
class Collector:
    """A pytest plugin that keeps what pytest collected, before anything is deselected."""

    tests: list[Test] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = item.iter_markers("contract")
            clauses = [str(value) for mark in marks for value in (*mark.args, *mark.kwargs.values())]
            never = any(_unconditional(mark) for name in NEVER_RUN for mark in item.iter_markers(name))
            if clauses or any(True for _ in item.iter_markers("contract")):
                self.tests.append(Test(item.nodeid, tuple(dict.fromkeys(clauses)), not never))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid or 'tests'}: cannot be collected\n{report.longreprtext}")


def _unconditional(mark: pytest.Mark) -> bool:
    """`skip`, or an `xfail` without a condition."""
    return mark.name == "skip" or not (mark.args or "condition" in mark.kwargs)


def read_clauses(text: str) -> tuple[list[Clause], list[str]]:
    """The clauses of the page, and what is wrong with it. Pure."""
    clauses: list[Clause] = []
    faults: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        found = HEADING.match(line)
        if found is None:
            if STATE.match(line) and not _belongs(lines, number):
                faults.append(f"line {number}: a state that belongs to no clause")
            continue
        name = found[1] or found[2]
        state = STATE.match(_next_text(lines, number))
        if state is None or state[1] not in STATES:
            faults.append(f"line {number}: {name} has no line `State: {'|'.join(STATES)}` below its heading")
            continue
        if (state[1] == "built") == bool(state[2]):
            told = "says what is missing, though it is built" if state[2] else "does not say what is missing"
            faults.append(f"line {number}: {name} {told}")
        clauses.append(Clause(name, found[3], state[1], state[2] or "", number))
    names = [clause.name for clause in clauses]
    faults += [f"{name} is not on the page, or has no state" for name in CLAUSES if name not in names]
    faults += [
        f"{name} is on the page {names.count(name)} times"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    faults += [f"{name} is no clause" for name in names if name not in CLAUSES]
    return clauses, faults


def _next_text(lines: Sequence[str], after: int) -> str:
    return next((line for line in lines[after:] if line.strip()), "")


def _belongs(lines: Sequence[str], number: int) -> bool:
    """Whether the text before a line is a clause's heading."""
    before = next((line for line in reversed(lines[: number - 1]) if line.strip()), "")
    return HEADING.match(before) is not None


def judge(clauses: Sequence[Clause], tests: Sequence[Test]) -> tuple[list[str], list[str]]:
    """Faults, and notes that are none. Pure."""
    known = {clause.name for clause in clauses}
    faults: list[str] = []
    for test in tests:
        unknown = [name for name in test.clauses if name not in known]
        if not test.clauses:
            faults.append(f"{test.id}: the mark names no clause")
        if unknown:
            faults.append(f"{test.id}: {', '.join(unknown)} is no clause of the contract")
        if len(test.clauses) > MOST_CLAUSES_A_TEST:
            faults.append(f"{test.id}: claims {', '.join(test.clauses)}; {MOST_CLAUSES_A_TEST} at the most")
        if not test.runs:
            faults.append(
                f"{test.id}: claims {', '.join(test.clauses)} and is marked never to run or to fail"
            )
    proven = {name for test in tests if test.runs for name in test.clauses}
    notes: list[str] = []
    for clause in clauses:
        if clause.state == "built" and clause.name not in proven:
            faults.append(f"{clause.name} is built and no test proves it: {clause.title}")
        elif clause.state == "partly" and clause.name not in proven:
            notes.append(f"{clause.name} is partly built and no test proves that part")
        elif clause.state == "later" and clause.name in proven:
            notes.append(f"{clause.name} is said to come later and has tests")
    return faults, notes


def table(clauses: Sequence[Clause], tests: Sequence[Test]) -> Iterator[str]:
    """Clause, state, and the tests that prove it, a line each."""
    width = max((len(clause.name) for clause in clauses), default=0)
    for clause in clauses:
        rows = _functions(clause.name, tests) or {"-": 1}
        head = f"{clause.name:<{width}}  {clause.state:<6}  "
        for row, (function, cases) in enumerate(rows.items()):
            start = head if row == 0 else " " * len(head)
            yield start + function + (f"  ({cases} cases)" if cases > 1 else "")


def _functions(clause: str, tests: Sequence[Test]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for test in tests:
        if clause in test.clauses and test.runs:
            found[test.function] = found.get(test.function, 0) + 1
    return found


def collect(folder: Path) -> Collector:
    """Every test of a folder that has a contract mark. Runs none."""
    collector = Collector()
    argv = [str(folder), "--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main(argv, plugins=[collector])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not collector.errors:
        collector.errors.append(f"pytest ended with {int(code)}:\n{said.getvalue().strip()}")
    return collector


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contract", type=Path, default=ROOT / "docs" / "contract.md")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    given = parser.parse_args(argv)
    clauses, faults = read_clauses(given.contract.read_text(encoding="utf-8"))
    faults = [f"{given.contract.name}: {fault}" for fault in faults]
    collected = collect(given.tests)
    faults += collected.errors
    judged, notes = judge(clauses, collected.tests)
    faults += judged
    for line in table(clauses, collected.tests):
        print(line)
    counts = ", ".join(f"{sum(c.state == state for c in clauses)} {state}" for state in STATES)
    print(f"\n{counts}; {len({t.function for t in collected.tests})} tests claim a clause")
    for note in notes:
        print(f"note: {note}")
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
