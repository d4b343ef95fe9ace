"""Causes that lie in train.sh itself, by what bash said: each is a function of the evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath

from tuneplane.diagnose.culprit import is_launcher
from tuneplane.diagnose.evidence import Evidence, Log
from tuneplane.diagnose.finding import Finding
from tuneplane.diagnose.rules.told import ENDED_BADLY, at, image_lines, last_lines
from tuneplane.kernel.env import ALWAYS, INGEST, URL, VARIABLES

_BASH = re.compile(r"^(?P<script>\S.*?): line (?P<line>\d+): (?P<said>.*)$")
_VARIABLE = re.compile(r"^(?P<name>[A-Za-z_][A-Za-z0-9_]*): (?P<why>.*)$")
_NOT_VARIABLES = ("command not found", "Permission denied", "No such file or directory", "Is a directory")

CONTRACT = frozenset(v.name for v in VARIABLES if v.when in (ALWAYS, INGEST, URL))
MISSING_CODES = (1, 127)
"""Exit code of `${NAME:?…}`: 1 or 127, by bash's version; `set -u` likewise."""


@dataclass(frozen=True)
class _Said:
    """What bash said at the end of a node's log."""

    log: Log
    script: str
    line: str
    said: str
    text: str
    code: int | None


def _bash(evidence: Evidence) -> Iterator[_Said]:
    """Bash's last word in each node's log, where it is among the last lines of it."""
    if evidence.state not in ENDED_BADLY or evidence.written.crlf:
        return
    for log in evidence.logs:
        mark = log.mark("bash")
        node = evidence.node(log.node)
        if mark is None or mark.last not in log.tail[-6:]:
            continue
        found = _BASH.match(mark.last)
        if found:
            yield _Said(
                log, found["script"], found["line"], found["said"], mark.last, node.code if node else None
            )


def scaffold_unedited(evidence: Evidence) -> Finding | None:
    """C2: the scaffold's own last two lines."""
    for log in evidence.logs:
        node = evidence.node(log.node)
        if node and node.code == 1 and log.tail and log.tail[-1].strip() == "no training command yet":
            return Finding(
                "scaffold-unedited",
                "train.sh is the scaffold as it was made: it starts no training yet",
                f"replace the last two lines of experiments/{evidence.experiment}/train.sh by your own command;"
                " its comments hold launch lines",
                evidence=last_lines(log, 1),
                **at(evidence, log),
            )
    return None


def contract_variable_missing(evidence: Evidence) -> Finding | None:
    """C2, C9: `${NAME:?}` or `set -u` stopped at a variable of the job."""
    for said in _bash(evidence):
        name = _missing_variable(said)
        if name is None or not (name in CONTRACT or name.startswith("TUNEPLANE_")):
            continue
        where = f"line {said.line} of {said.script.rpartition('/')[2]}"
        if name in CONTRACT:
            sentence = f"{name} is not set at {where}, though every job has it: something took it away"
            remedy = (
                "look for env -i, sudo, su or a new login shell on the way there; docs/environment.md lists all"
                " variables"
            )
        else:
            near = get_close_matches(name, sorted(CONTRACT), 1, 0.6)
            sentence = f"{where} asks for {name}, which is no variable of a job"
            remedy = f"did you mean {near[0]}? " if near else ""
            remedy += "docs/environment.md lists all variables"
        return Finding(
            "contract-variable-missing", sentence, remedy, evidence=(said.text,), **at(evidence, said.log)
        )
    return None


def unbound_variable(evidence: Evidence) -> Finding | None:
    """`set -u` or `${NAME:?}` stopped at a variable of the user's own."""
    for said in _bash(evidence):
        name = _missing_variable(said)
        if name is not None and name not in CONTRACT and not name.startswith("TUNEPLANE_"):
            return Finding(
                "unbound-variable",
                f"line {said.line} of {said.script.rpartition('/')[2]} needs {name}, which is not set",
                "nothing of the submitting shell reaches a job: set it in train.sh, or give it by --set and read"
                " TUNEPLANE_PARAMS_FILE",
                evidence=(said.text,),
                **at(evidence, said.log),
            )
    return None


def _missing_variable(said: _Said) -> str | None:
    found = _VARIABLE.match(said.said)
    if found is None or said.code not in MISSING_CODES or found["why"] in _NOT_VARIABLES:
        return None
    return found["name"] if not found["why"].startswith(("syntax error", "cannot ")) else None


def script_syntax(evidence: Evidence) -> Finding | None:
    """bash could not read the script."""
    for said in _bash(evidence):
        if "syntax error" in said.said or "unexpected EOF" in said.said:
            return Finding(
                "script-syntax",
                f"bash cannot read {said.script.rpartition('/')[2]}: {said.said}",
                f"bash -n experiments/{evidence.experiment}/train.sh finds it before a submit",
                evidence=(said.text,),
                **at(evidence, said.log),
            )
    return None


def command_not_found(evidence: Evidence) -> Finding | None:
    """127: a program that is not on the PATH there."""
    for said in _bash(evidence):
        if said.code == 127 and said.said.endswith(("command not found", "No such file or directory")):
            program = said.said.rpartition(": ")[0]
            where = "in the image" if _contained(evidence) else "on the node"
            remedy = (
                "PATH is the image's own: install it there, or say its whole path"
                if _contained(evidence)
                else "PATH is the cluster profile's `path`: say the program's whole path, or activate its"
                " environment in train.sh"
            )
            return Finding(
                "command-not-found",
                f"there is no {program} {where}, which line {said.line} of train.sh starts",
                remedy,
                evidence=(said.text, *image_lines(said.log)),
                **at(evidence, said.log),
            )
    return None


def not_executable(evidence: Evidence) -> Finding | None:
    """126: a file that may not be run."""
    for said in _bash(evidence):
        if said.code == 126:
            program = said.said.rpartition(": ")[0]
            return Finding(
                "not-executable",
                f"{program.rpartition('/')[2]} may not be run ({said.said.rpartition(': ')[2]})",
                "start it by its interpreter, like `python3 FILE`, or commit it with chmod +x and a #! line",
                evidence=(said.text,),
                **at(evidence, said.log),
            )
    return None


_FILE = re.compile(
    r"can't open file '(?P<python>[^']+)': \[Errno 2\]"
    r"|^(?:/bin/|/usr/bin/)?(?:ba)?sh: (?P<sh>\S+): No such file or directory"
    r"|^\S.*: line \d+: (?P<bash>\S+): No such file or directory"
)
_WORK = re.compile(r"/tuneplane-\d+/[^/]+/work/(?P<name>.+)$")


def file_missing(evidence: Evidence) -> Finding | None:
    """C6, C26: train.sh starts or reads a file that is not in the unpacked lab, or not where it was looked for."""
    if evidence.state not in ENDED_BADLY or command_not_found(evidence):
        return None
    for log in evidence.logs:
        found = next((m for line in log.tail[-6:] if (m := _FILE.search(line))), None)
        if found is None or any(not is_launcher(trace) for trace in log.traces):
            continue
        path = found["python"] or found["sh"] or found["bash"]
        why, remedy = _where_it_is(evidence, path)
        return Finding(
            "file-missing",
            f"train.sh needs {_in_lab(path) or path}, which is not there{why}",
            remedy,
            evidence=(found.string,),
            **at(evidence, log),
        )
    return None


def _in_lab(path: str) -> str:
    """A path of the unpacked lab, as it stands in the lab; empty for another one."""
    inside = _WORK.search(path)
    if inside is None:
        return "" if path.startswith("/") else path
    return inside["name"]


def _where_it_is(evidence: Evidence, path: str) -> tuple[str, str]:
    """Why a file is not there, and what to do, as far as Python files of the lab tell."""
    name = _in_lab(path)
    if not name:
        return "", "look whether it is there on a compute node, and spelt so"
    file = PurePosixPath(name)
    modules = evidence.written.own_modules if file.suffix == ".py" else ()
    if f"experiments/{evidence.experiment}/{file.with_suffix('')}" in modules:
        return (
            ": the working folder is the unpacked lab, and the file stands in the experiment's folder",
            f'say "$TUNEPLANE_EXP_DIR/{name}"',
        )
    why = ": it is not among the files of the lab that were submitted"
    near = get_close_matches(str(file.with_suffix("")), modules, 1, 0.7)
    if near:
        return why, f"did you mean {near[0]}.py?"
    if "/" not in name and not file.suffix:
        return (
            "",
            "say its whole path: nothing of the login shell's set-up (conda, aliases, its PATH) reaches a job",
        )
    return (
        why,
        "files that git does not know are not taken along: look at .gitignore, git add -A && git commit",
    )


def line_endings(evidence: Evidence) -> Finding | None:
    """A script that was saved with Windows line endings."""
    if evidence.state not in ENDED_BADLY or not evidence.written.crlf:
        return None
    script = f"experiments/{evidence.experiment}/train.sh"
    log = evidence.logs[0] if evidence.logs else None
    return Finding(
        "script-line-endings",
        "train.sh has Windows line endings (CRLF): bash takes the carriage return for a part of its words",
        f"sed -i 's/\\r$//' {script}, then git add -A && git commit",
        evidence=last_lines(log, 2),
        **(at(evidence, log) if log else {}),
    )


def _contained(evidence: Evidence) -> bool:
    return evidence.job is not None and evidence.job.runtime != "none"


RULES = (
    line_endings,
    scaffold_unedited,
    contract_variable_missing,
    unbound_variable,
    script_syntax,
    command_not_found,
    not_executable,
    file_missing,
)
