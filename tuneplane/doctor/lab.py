"""The lab around the working directory: what would stop a submit there, and what its methods cannot do."""

from __future__ import annotations

from pathlib import Path

from tuneplane.doctor.check import FAIL, OK, WARN, Check
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.lab.experiments import list_experiments
from tuneplane.lab.git import commit_faults, read_state
from tuneplane.lab.marker import Lab
from tuneplane.recipes.adapters import check_operation
from tuneplane.recipes.catalog import Catalog

SCAFFOLD_END = "no training command yet"
OPERATIONS = ("export", "eval")


def look_at_lab(lab: Lab, catalog: Catalog) -> list[Check]:
    """Its commit, and its experiments: locks, scaffolds that nobody edited, operations that a method refuses."""
    try:
        experiments = list_experiments(lab, catalog)
    except TunePlaneError as error:
        return [Check("lab", FAIL, fault.what, fault.remedy) for fault in error.faults]
    count = "1 experiment" if len(experiments) == 1 else f"{len(experiments)} experiments"
    checks = [Check("lab", OK, f"{lab.name} in {lab.root}: {count}"), *_commit(lab)]
    refusing: list[str] = []
    for experiment in experiments:
        for fault in experiment.state.faults:
            checks.append(Check(f"experiment {experiment.name}", FAIL, fault.what, fault.remedy))
        script = lab.root / "experiments" / experiment.name / "train.sh"
        if _is_scaffold(script):
            told = f"train.sh is the scaffold as it was made: it ends with `{SCAFFOLD_END}`, exit 1"
            mend = f"replace the last two lines of {script.relative_to(lab.root)} by your own command"
            checks.append(Check(f"experiment {experiment.name}", WARN, told, mend))
        refusing += _refusals(experiment.name, experiment.state.lock, catalog)
    if refusing:
        checks.append(Check("operations", OK, "; ".join(refusing)))
    return checks


def _commit(lab: Lab) -> list[Check]:
    """Whether a submit would take the lab as it is: what is committed is what runs (C26)."""
    try:
        state = read_state(lab.root)
    except TunePlaneError as error:
        return [Check("lab commit", FAIL, fault.what, fault.remedy) for fault in error.faults]
    if state.git_missing:  # told with the machine
        return []
    faults = commit_faults(state)
    if faults:
        return [Check("lab commit", WARN, f"{f.what}; a submit refuses it so", f.remedy) for f in faults]
    return [Check("lab commit", OK, f"{(state.commit or '')[:12]}, and nothing uncommitted")]


def _is_scaffold(script: Path) -> bool:
    """Whether a script still ends as the scaffold does."""
    try:
        lines = [line.strip() for line in script.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return False
    said = [line for line in lines if line and not line.startswith("#")]
    return len(said) > 1 and said[-1] == "exit 1" and SCAFFOLD_END in said[-2]


def _refusals(name: str, lock: object, catalog: Catalog) -> list[str]:
    """Operations that the experiment's adapter has not, in the words of `tp export` and `tp eval`."""
    recipe_name = getattr(lock, "recipe", "")
    told = []
    for operation in OPERATIONS:
        try:
            check_operation(catalog.get(recipe_name).adapter, operation)
        except TunePlaneError as error:
            told.append(f"{name}: {error.faults[0].what}")
        except (KeyError, AttributeError):
            continue
    return told
