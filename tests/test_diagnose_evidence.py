"""Evidence as data: it survives JSON, and a saved case names nobody and holds no secret."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneplane.diagnose.anonymous import anonymise
from tuneplane.diagnose.case import EVIDENCE, read_case, save_case
from tuneplane.diagnose.evidence import (
    Evidence,
    Job,
    Log,
    Mark,
    Node,
    Process,
    Slurm,
    Step,
    Trace,
    Waiting,
)
from tuneplane.diagnose.jsonform import as_json, from_json
from tuneplane.kernel.errors import UsageError

RUN = "vision-20261129-120000-ab12"
FOLDER = f"/lustre/projects/cancer/jane.doe/runs/jane.doe/vision/{RUN}"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
SECRET = "correct horse battery staple"


def evidence(**more: Any) -> Evidence:
    line = f"loss 0.5, written to {FOLDER}/out/x by jane.doe@gpu-node-17.example.org with {TOKEN} from 131.142.9.7"
    trace = Trace(
        "ValueError",
        f"no such patient file: /lustre/projects/cancer/patients/miller.csv; password={SECRET}",
        10,
        rank=1,
        lines=(
            "Traceback (most recent call last):",
            f'  File "{FOLDER}/secret_idea.py", line 3, in cure',
            "    patients = load_patients(miller)",
            '  File "/opt/conda/lib/python3.12/site-packages/torch/nn/module.py", line 5, in forward',
            "    return self._call(*args)",
            "ValueError: no such patient file",
        ),
    )
    log = Log(
        0,
        "gpu-node-17",
        100,
        100,
        1.0,
        head=(line,),
        tail=(line, "connected to gpu-node-18"),
        traces=(trace,),
    )
    base = Evidence(
        run_id=RUN,
        experiment="vision",
        folder=FOLDER,
        state="FAILED",
        now=1.0,
        code=1,
        reason=f"{FOLDER} on gpu-node-17",
        job=Job(
            "slurm",
            "h200:8",
            "gpu",
            2,
            8,
            "custom/custom",
            "external",
            "experiments/vision/train.sh",
            "none",
            "/usr/bin/python3",
            "/tmp",
            account="cancer-lab",
        ),
        nodes=(Node(0, "gpu-node-17", "ended", 1), Node(1, "gpu-node-18", "ended", 143, told_to_stop=True)),
        hosts=("gpu-node-17", "gpu-node-18"),
        logs=(log,),
        slurm=Slurm("7", "FAILED", fields={"Account": "cancer-lab", "BatchHost": "gpu-node-17"}),
    )
    return dataclasses.replace(base, **more)


def saved_text(found: Evidence) -> str:
    return json.dumps(as_json(anonymise(found, ["jane.doe"], [SECRET])), ensure_ascii=False)


def test_evidence_survives_json() -> None:
    found = evidence(
        processes=(Process(0, 7, "python", "S", 0.5, rank=3, stack=("main (x.py:1)",)),),
        slurm=Slurm(
            "7", steps=(Step("7", "FAILED"),), waiting=Waiting("Resources", nodes_by_state={"idle": 3})
        ),
        batch=Log(None, "", 5, 5, 0.0, marks=(Mark("srun", 1, "a", 0, "b"),)),
    )
    assert from_json(json.loads(json.dumps(as_json(found)))) == found


@pytest.mark.slow
@given(
    st.builds(
        Log,
        *[st.none() | st.integers(0, 9), st.text(), st.integers(0), st.integers(0), st.just(1.5)],
        tail=st.lists(st.text()).map(tuple),
    )
)
def test_any_text_of_a_log_survives_json(log: Log) -> None:
    found = evidence(logs=(log,))
    assert from_json(json.loads(json.dumps(as_json(found)))) == found


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"format": "tuneplane/evidence/v9"}, {"format": "tuneplane/evidence/v1"},
     {"format": "tuneplane/evidence/v1", "run_id": 5, "experiment": "", "folder": "", "state": "", "now": 0.0},
     {"format": "tuneplane/evidence/v1", "run_id": "", "experiment": "", "folder": "", "state": "", "now": 0.0,
      "logs": {"a": 1}}],
)  # fmt: skip
def test_what_is_no_evidence_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="tuneplane/evidence/v1"):
        from_json(value)


@pytest.mark.parametrize(
    "private",
    ["jane", "doe", "vision", "gpu-node", "cancer", "lustre", "131.142.9.7", TOKEN, "example.org", SECRET,
     "miller.csv", "secret_idea", "load_patients", "ab12"],
)  # fmt: skip
def test_a_saved_case_has_nothing_that_is_private(private: str) -> None:
    text = saved_text(evidence()).replace("address1.example.org", "").replace("@example.org", "")
    assert private not in text


def test_a_saved_case_keeps_what_rules_need() -> None:
    found = anonymise(evidence(), ["jane.doe"], [SECRET])
    log = found.logs[0]
    assert found.hosts[0] == found.nodes[0].host == log.host == found.slurm.fields["BatchHost"]
    assert found.hosts[0] != found.hosts[1]
    assert found.hosts[1] in log.tail[1]
    assert f"{found.folder}/out" in log.tail[0], "what lies below the run's folder still does"
    assert log.traces[0].kind == "ValueError"
    assert (
        'File "/opt/conda/lib/python3.12/site-packages/torch/nn/module.py", line 5' in log.traces[0].lines[3]
    )
    assert log.traces[0].lines[2].strip() == "…"
    assert (found.state, found.code, found.nodes[1].told_to_stop) == ("FAILED", 1, True)


def test_the_same_name_is_the_same_other_name_everywhere() -> None:
    found = anonymise(evidence(reason="gpu-node-18 then gpu-node-17 then gpu-node-18"), ["jane.doe"])
    first, second, third = found.reason.split(" then ")
    assert first == third != second


def test_saving_makes_a_folder_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a b" / "case"
    path = save_case(folder, evidence(), ["jane.doe"], [SECRET], {"causes": ["x"]})
    assert path == folder / EVIDENCE
    assert read_case(folder).state == "FAILED"
    with pytest.raises(UsageError, match="is there already"):
        save_case(folder, evidence(), [], [], {})


def test_a_folder_without_a_case_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no case"):
        read_case(tmp_path)
    (tmp_path / EVIDENCE).write_text("[1, 2")
    with pytest.raises(UsageError, match="no case"):
        read_case(tmp_path)
