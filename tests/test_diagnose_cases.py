"""Every rule on runs that were recorded before it was written, and on near misses that it must not take."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tuneplane.diagnose.case import read_case
from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import ORDER, Finding
from tuneplane.diagnose.verdict import WELL, diagnose

ROOT = Path(__file__).parents[1]
CASES = sorted(path.parent for path in (ROOT / "tests" / "cases").glob("*/expect.json"))
RULE_FILES = sorted((ROOT / "tuneplane" / "diagnose" / "rules").glob("*.py"))

NOTHING_TO_DO = {"healthy", "completed"}


def named(path: Path) -> str:
    return path.name


def expected(case: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((case / "expect.json").read_text(encoding="utf-8"))
    return value


def causes_of_rules() -> set[str]:
    found: set[str] = set()
    for path in RULE_FILES:
        found.update(re.findall(r'Finding\(\s*"([a-z-]+)"', path.read_text(encoding="utf-8")))
    return found | {"segmentation-fault", "illegal-instruction", "bus-error"}  # chosen from a table


@pytest.mark.contract("J")
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_recorded_run_is_told_with_its_cause(case: Path) -> None:
    wanted, findings = expected(case), diagnose(read_case(case))
    first = findings[0]
    assert first.cause == wanted["cause"], [f.sentence for f in findings]
    assert not set(wanted.get("not", [])) & {f.cause for f in findings}
    assert wanted.get("says", "") in first.sentence
    for key in ("rank", "node", "certainty"):
        assert getattr(first, key) == wanted.get(key, getattr(first, key)), key


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_told_is_one_sentence_with_evidence_and_a_remedy(case: Path) -> None:
    for finding in diagnose(read_case(case)):
        assert "\n" not in finding.sentence
        assert finding.sentence == finding.sentence.strip()
        assert not finding.sentence.endswith("."), finding.sentence
        assert "None" not in finding.sentence, finding.sentence
        assert not re.search(r"(?<!\$)\{\w+\}", finding.sentence + finding.remedy), finding
        assert len(finding.sentence) < 400
        assert finding.certainty in ORDER
        assert finding.remedy or finding.cause in WELL or finding.evidence, finding
        assert len(finding.evidence) <= 16


def test_every_rule_has_a_recorded_run() -> None:
    assert causes_of_rules() == {expected(case)["cause"] for case in CASES}


def test_every_cause_stands_in_the_page_for_users() -> None:
    page = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert sorted(cause for cause in causes_of_rules() if f"`{cause}`" not in page) == []
    listed = page.partition("\n## Causes\n")[2].partition("\n## ")[0]
    told = set(re.findall(r"^\| `([a-z-]+)` \|", listed, flags=re.MULTILINE))
    assert told == causes_of_rules()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_case_is_small_and_names_nobody(case: Path) -> None:
    text = (case / "evidence.json").read_text(encoding="utf-8")
    assert len(text) < 120_000
    for private in ("alice", "/var/lib/", "/root/", "research", "testbed", "tracker.example"):
        assert private not in text.replace("slurmstepd", ""), private
    assert not re.search(r"\b(?!127\.|0\.0\.0\.0|192\.0\.2\.)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b", text)
    assert not re.search(r"\b[0-9a-f]{40,}\b", text)


def told(evidence: Evidence) -> list[Finding]:
    return diagnose(evidence)


def test_evidence_of_nothing_is_answered_with_that_it_cannot_be_told() -> None:
    for state in ("UNKNOWN", "FAILED", "LOST", "SPECIAL_EXIT", ""):
        first = told(Evidence(run_id="x", experiment="x", folder="/x", state=state, now=0.0))[0]
        assert first.cause == "cannot-tell"
        assert first.certainty == "possible"


def test_a_job_that_slurm_does_not_finish_is_told_as_that() -> None:
    case = read_case(ROOT / "tests" / "cases" / "slurm-completing")
    (finding,) = told(dataclasses.replace(case, ended_at=case.now - 1200))
    assert finding.sentence == "the run itself ended 20 min ago, and Slurm still cleans up after it"
    assert "administrators" in finding.remedy


def test_the_surest_finding_is_told_first_and_each_cause_once() -> None:
    for case in CASES:
        findings = told(read_case(case))
        places = [ORDER.index(f.certainty) for f in findings]
        assert places == sorted(places)
        assert len({f.cause for f in findings}) == len(findings)


def test_a_case_of_a_later_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    value = json.loads((CASES[0] / "evidence.json").read_text(encoding="utf-8"))
    value["of_a_later_version"] = {"x": 1}
    (tmp_path / "evidence.json").write_text(json.dumps(value), encoding="utf-8")
    assert read_case(tmp_path) == read_case(CASES[0])
