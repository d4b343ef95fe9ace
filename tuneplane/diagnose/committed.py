"""What an experiment's committed code says of reporting and of the Python it runs: words searched in the capsule.

A look and no analysis: it finds a name that stands in the text, and never runs or parses the code.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path, PurePosixPath

from tuneplane.diagnose.evidence import Code

MOST_FILE_BYTES = 512 << 10
MOST_BYTES = 24 << 20
"""Of code that is read at all: a lab of more text than this has its first part searched."""

_REPORTS = re.compile(rb"tuneplane\.report|tuneplane import report|TunePlaneCallback|tuneplane\.plugins")
_IMPORTS = re.compile(rb"^\s*(?:from|import)\s+tuneplane\b", re.MULTILINE)
_PYTHON = re.compile(r"(?<![\w./-])((?:[\w./$\"{}-]*/)?python(?:3(?:\.\d+)?)?)(?=[\s\"';]|$)", re.MULTILINE)
_KERNEL = ".tuneplane/"
"""The kernel's own copy in the capsule, which reports and is not the user's."""


def read_code(capsule: Path, entrypoint: str) -> Code:
    """Raises OSError, tarfile.TarError where the capsule cannot be read."""
    files, left = 0, MOST_BYTES
    reports, imports, modules = [], [], set()
    pythons: tuple[str, ...] = ()
    crlf = False
    experiment = PurePosixPath(entrypoint).parent
    with tarfile.open(capsule, "r:") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if not member.isfile() or name.startswith(_KERNEL):
                continue
            parts = PurePosixPath(name).parts
            if parts[0] == "experiments" and not name.startswith(f"{experiment}/"):
                continue  # another experiment
            files += 1
            if name.endswith(".py"):
                modules.add(_module(name, experiment))
            script = name == entrypoint or name.endswith((".py", ".sh", ".ipynb", ".yaml"))
            if not script or member.size > min(MOST_FILE_BYTES, left):
                continue
            left -= member.size
            source = archive.extractfile(member)
            text = source.read() if source else b""
            if _REPORTS.search(text):
                reports.append(name)
            if _IMPORTS.search(text):
                imports.append(name)
            if name == entrypoint:
                crlf = b"\r\n" in text
                code = re.sub(r"(?m)^\s*#.*$", "", text.decode("utf-8", "replace"))
                pythons = tuple(dict.fromkeys(_PYTHON.findall(code)))
    return Code(
        files=files,
        reports=tuple(sorted(reports)[:20]),
        imports=tuple(sorted(imports)[:20]),
        pythons=pythons[:10],
        crlf=crlf,
        own_modules=tuple(sorted(modules - {""}))[:200],
    )


def _module(name: str, experiment: PurePosixPath) -> str:
    """The name under which a file of the lab could be imported, with its folder: `common/data`."""
    path = PurePosixPath(name)
    folder = path.parent
    if path.name == "__init__.py":
        path, folder = folder, folder.parent
    if len(folder.parts) > 2 and folder != experiment:
        return ""
    return str(path.with_suffix(""))
