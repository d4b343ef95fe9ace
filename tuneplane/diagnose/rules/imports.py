"""Causes of a failed import: tuneplane itself, a stranger of that name, another Python, a module of the lab."""

from __future__ import annotations

import re

from tuneplane.diagnose.culprit import Culprit, culprit
from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import CERTAIN, LIKELY, Finding
from tuneplane.diagnose.rules.told import ENDED_BADLY, image_lines, last_lines, lines_of, place

_MISSING = re.compile(r"No module named '?([\w.]+)'?")
_NAME = re.compile(r"cannot import name '(\w+)' from '(tuneplane[\w.]*)'(?: \((.*?)\))?")


def _missing(evidence: Evidence) -> tuple[str, Culprit] | None:
    """The module for want of which the run failed, in full, and where."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    told = _MISSING.search(found.text()) if found.trace else None
    if told is None and found.trace is None and found.log is not None:
        # `python -m NAME` says it without a traceback.
        said = next((line for line in found.log.tail[-3:] if _MISSING.search(line)), "")
        told = _MISSING.search(said)
    return (told[1], found) if told else None


def tuneplane_not_importable(evidence: Evidence) -> Finding | None:
    """C23: an external recipe whose Python has no tuneplane."""
    missing = _missing(evidence)
    if missing is None or missing[0] != "tuneplane":
        return None
    observability = evidence.job.observability if evidence.job else "external"
    image = evidence.job is not None and evidence.job.runtime != "none"
    place_of = "the image" if image else "the Python that train.sh runs"
    if observability == "external":
        remedy = (
            f"install the wheel in {place_of} (pip install tuneplane), or put the kernel on the path"
            " in train.sh:\n"
            'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"'
        )
        why = "an external recipe leaves PYTHONPATH alone"
    else:
        remedy = "train.sh must not clear PYTHONPATH: the platform's folder stands first in it"
        why = "the folder that holds it is not on PYTHONPATH any more"
    return Finding(
        "tuneplane-not-importable",
        f"ModuleNotFoundError: {place_of} has no tuneplane, and {why}",
        remedy,
        evidence=lines_of(missing[1]),
        **place(missing[1]),
    )


def foreign_tuneplane(evidence: Evidence) -> Finding | None:
    """C25: another distribution of the name tuneplane was imported."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    missing = _missing(evidence)
    named = _NAME.search(found.text())
    if missing is not None and missing[0].startswith("tuneplane."):
        what = f"it has no {missing[0]}"
    elif named is not None:
        what = f"its {named[2]} has no {named[1]}" + (f" ({named[3]})" if named[3] else "")
    else:
        return None
    named_by_image = next((line for line in image_lines(found.log) if "another project's" in line), "")
    if package := re.search(r"the image's (tuneplane \S+(?: \(.*?\))?) is another", named_by_image):
        what = f"{package[1]}, which has no tuneplane.report"
    return Finding(
        "foreign-tuneplane",
        f"import tuneplane found another package of that name: {what}",
        "take that package off the path (pip uninstall tuneplane in the image, or PYTHONPATH in"
        " train.sh) and install"
        " this project's wheel",
        evidence=(*lines_of(found), *filter(None, [named_by_image])),
        **place(found),
    )


def other_python(evidence: Evidence) -> Finding | None:
    """The image's Python that has the packages is not the one that train.sh runs."""
    missing = _missing(evidence)
    if missing is None or evidence.missing_module != missing[0].split(".")[0]:
        return None
    having = [i for i in evidence.interpreters if i.has_module]
    lacking = [i for i in evidence.interpreters if not i.has_module]
    if not having or not lacking:
        return None
    ran = next((i for i in lacking if i.path in evidence.written.pythons), None)
    ran = ran or next((i for i in lacking if i.default), lacking[0])
    where = "The image" if evidence.job and evidence.job.runtime != "none" else "This machine"
    told = [
        f"{i.path} ({i.version}): {missing[0]} {'is there' if i.has_module else 'is not there'}"
        for i in (*having, ran)
    ]
    return Finding(
        "other-python",
        f"train.sh runs {ran.path}, which has no {missing[0]}; {having[0].path} has it",
        f"start the trainer with {having[0].path}, or put its folder first on PATH in train.sh",
        evidence=(*lines_of(missing[1])[-2:], f"{where} has:", *told[:4]),
        certainty=CERTAIN if ran.default or ran.path in evidence.written.pythons else LIKELY,
        **place(missing[1]),
    )


def module_of_lab(evidence: Evidence) -> Finding | None:
    """The module stands in the lab, in a folder that is not on Python's path."""
    missing = _missing(evidence)
    if missing is None:
        return None
    name = missing[0].split(".")[0]
    found = [path for path in evidence.written.own_modules if path.rpartition("/")[2] == name]
    if not found:
        return None
    folder = found[0].rpartition("/")[0]
    whole = f"$TUNEPLANE_WORK_DIR/{folder}" if folder else "$TUNEPLANE_WORK_DIR"
    return Finding(
        "module-of-lab",
        f"{name} is in the lab ({found[0]}.py or folder), and that folder is not on Python's path",
        f'add it in train.sh: export PYTHONPATH="{whole}${{PYTHONPATH:+:$PYTHONPATH}}"',
        evidence=lines_of(missing[1]),
        **place(missing[1]),
    )


def module_missing(evidence: Evidence) -> Finding | None:
    """No Python that was looked at has the module."""
    missing = _missing(evidence)
    if missing is None or missing[0].split(".")[0] == "tuneplane":
        return None
    if other_python(evidence) or module_of_lab(evidence):
        return None
    image = evidence.job is not None and evidence.job.runtime != "none"
    where = "the image" if image else "the Python that train.sh runs"
    evidence_lines = lines_of(missing[1]) or last_lines(missing[1].log)
    evidence_lines += image_lines(missing[1].log)[:3]
    return Finding(
        "module-missing",
        f"{where} has no module {missing[0]}",
        "install it in the image: nothing is installed at run time"
        if image
        else "install it in that environment, or start the trainer with the Python that has it",
        evidence=evidence_lines,
        **place(missing[1]),
    )


RULES = (tuneplane_not_importable, foreign_tuneplane, other_python, module_of_lab, module_missing)
