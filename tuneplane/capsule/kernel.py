"""The kernel: which files of the installed package travel, and the zip application that starts on a node.

The capsule packs `kernel_files`; submit writes the application beside it. Both hold Python sources alone.
"""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import tuneplane
from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_atomic

# Every part runs with nothing but the standard library of Python 3.9; a part the package lacks is left out.
KERNEL_PARTS = (
    "__init__.py",
    "spec.py",
    "kernel",
    "report",
    "node",
    "containers",
    "bridge",
    "hf_export",
    "evalkit",
    "recipes/__init__.py",
    "recipes/adapters",
    "plugins",
    "watchdog",
)

_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that the format knows: the same archive on every day
_ZIP_MODE = 0o100644
# Plain enough for Python 3.6, the system Python of some clusters, to read and refuse.
_MAIN = b"""\
import sys

if sys.version_info < (3, 9):
    sys.exit("tuneplane needs Python 3.9 or newer on a node; %s is %s" % (sys.executable, sys.version))

if __name__ == "__main__":
    from tuneplane.node.main import main

    sys.exit(main())
"""


@dataclass(frozen=True)
class KernelFile:
    """One file of the kernel: `path` as imported (`tuneplane/spec.py`), `source` where it is installed."""

    path: str
    source: Path


def kernel_files(package: Path | None = None) -> list[KernelFile]:
    """The kernel's .py files, sorted, of the package that is running (or of the folder `package`).

    A wheel, an editable install and a folder of links to either give the same. Raises OSError.
    """
    root = Path(tuneplane.__file__).parent if package is None else package
    found: list[KernelFile] = []
    for part in KERNEL_PARTS:
        place = root / part
        if place.suffix == ".py":
            sources = [place] if place.is_file() else []
        else:
            # Links are followed: some package managers install each file as one.
            sources = [
                Path(folder, name)
                for folder, _, names in os.walk(place, followlinks=True)
                for name in names
                if name.endswith(".py")
            ]
        found.extend(KernelFile(f"tuneplane/{s.relative_to(root).as_posix()}", s) for s in sources)
    return sorted(found, key=lambda f: os.fsencode(f.path))


def kernel_application(package: Path | None = None) -> bytes:
    """`kernel.pyz`: `python3 -I -S kernel.pyz …` calls `tuneplane.node.main:main`.

    An uncompressed zip, the same bytes for the same files under any Python, umask and date. Raises OSError.
    """
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as application:
        _add(application, "__main__.py", _MAIN)
        for file in kernel_files(package):
            _add(application, file.path, file.source.read_bytes())
    return content.getvalue()


def write_kernel_application(path: Path, package: Path | None = None) -> str:
    """Write `kernel_application` to `path`, mode 0444. Returns its sha256 in hex; raises OperationError."""
    try:
        content = kernel_application(package)
        write_atomic(path, content, 0o444)
    except OSError as error:
        raise OperationError(Fault(f"the kernel cannot be written ({error.strerror})", str(path))) from error
    return sha256_bytes(content)


def _add(application: zipfile.ZipFile, name: str, content: bytes) -> None:
    member = zipfile.ZipInfo(name, _ZIP_DATE)
    member.external_attr = _ZIP_MODE << 16
    member.create_system = 3  # Unix, where external_attr holds a mode
    application.writestr(member, content)
