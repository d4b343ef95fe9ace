"""A saved case: the evidence of a run, without names, as a file that can be sent, kept and judged again."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuneplane import __version__
from tuneplane.diagnose.anonymous import anonymise
from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.jsonform import as_json, from_json
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_json

EVIDENCE = "evidence.json"


def save_case(
    folder: Path, evidence: Evidence, users: Iterable[str], secrets: Iterable[str], told: dict[str, Any]
) -> Path:
    """Write an anonymised case into a new folder. told: what was said of it. Raises UsageError, OperationError."""
    names = set(users)
    with suppress(KeyError, OSError):
        names.add(getpass.getuser())
    path = folder / EVIDENCE
    if path.exists():
        raise UsageError(Fault(f"{path} is there already", "--save-case", "name a new folder"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            path,
            {**as_json(anonymise(evidence, names, secrets)), "tuneplane": __version__, "told": told},
            0o600,
        )
    except OSError as error:
        raise OperationError(Fault(f"not written: {error.strerror}", str(path))) from None
    return path


def read_case(folder: Path) -> Evidence:
    """The evidence of a saved case. Raises UsageError where it is none."""
    path = folder / EVIDENCE
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(Fault(f"no case: {error.strerror}", str(path))) from None
    except ValueError as error:
        raise UsageError(Fault(f"no case: {error}", str(path))) from None
