"""The text of a discovered cluster profile: YAML whose every value says where it came from; and its file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from tuneplane.compose.layers import USER, find_layers
from tuneplane.discover.choice import GUESS, Chosen, Value
from tuneplane.discover.here import Here
from tuneplane.discover.slurm import Site
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.profile import is_profile_name

_PLAIN = re.compile(r"[A-Za-z~/][A-Za-z0-9_./~-]*")
_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "null", "none", "~", "y", "n"))


def profile_text(name: str, chosen: Chosen, site: Site, here: Here, date: str) -> str:
    """The file. `# GUESS` stands where nobody said so; everything else names its source."""
    kind = chosen.kind
    what = f"{kind.gpus} {kind.gpu_type or 'GPUs'}" if kind.gpus else f"{kind.cpus} CPUs"
    lines = [
        f"# Cluster profile {name}, written by `tp cluster discover` on {date} from what Slurm"
        f" {site.version or '(version not known)'} said.",
        f"# Each value says where it came from. {GUESS}: nobody said so; look at those first.",
        f"# Prove it: tp cluster check {name}, then tp doctor --profile {name} --deep. All keys: docs/site.md.",
        *(f"# Note: {note}" for note in chosen.notes),
        "defaults:",
        f"  - /container@container: {here.runtime} # {_runtime_why(here)}",
        "  - _self_",
        "",
        f"description: {_scalar(f'nodes of {what}, partition {chosen.partition.name}')}",
    ]
    lines += [_line(value, 0) for value in chosen.values if "." not in value.key]
    lines += ["slurm:", *(_line(value, 2) for value in chosen.values if value.key.startswith("slurm."))]
    if here.binary and here.runtime != "none":
        lines += [
            "container:",
            f"  binary: {_scalar(here.binary)} # {GUESS}: its path on this machine; nodes may differ",
        ]
    return "\n".join(lines) + "\n"


def _runtime_why(here: Here) -> str:
    if here.runtime == "none":
        return f"{GUESS}: no container runtime on this machine"
    return f"{GUESS}: {here.runtime_version or here.runtime} is on this machine; nodes mostly have the same"


def _line(value: Value, indent: int) -> str:
    key = value.key.rpartition(".")[2]
    why = " ".join(value.why.split())
    told = f"{GUESS}: {why}" if value.guess else why
    return f"{' ' * indent}{key}: {_scalar(value.value)} # {told}"


def _scalar(value: object) -> str:
    """A value as YAML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_scalar(v) for v in value)}]"
    text = str(value)
    if isinstance(value, int) or (_PLAIN.fullmatch(text) and text.lower() not in _WORDS):
        return text
    return json.dumps(text, ensure_ascii=False)


def profile_path(name: str, environ: dict[str, str]) -> Path:
    """A profile's file in the user's configuration folder. Raises UsageError for a name that none can have."""
    if not is_profile_name(name):
        raise UsageError(
            Fault(f"{name!r} is no name of a profile", "NAME", "letters, digits, '.', '_' and '-', like h200")
        )
    folder = next(layer.folder for layer in find_layers(None, environ) if layer.name == USER)
    return folder / "cluster" / f"{name}.yaml"


def write_profile(path: Path, text: str) -> None:
    """Write a new file, never over another. Raises UsageError, OperationError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise UsageError(
            Fault(
                f"{path} is there already, and is never overwritten",
                "NAME",
                "choose another name, or --print",
            )
        ) from None
    except OSError as error:
        raise OperationError(Fault(f"not written: {error.strerror}", str(error.filename or path))) from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
