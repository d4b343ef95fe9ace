"""The `configs/` tree of this installation: inside the package in a wheel, beside it in a checkout.

The catalog and compose ask for it; nobody else knows where it lies.
"""

from __future__ import annotations

from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError


def packaged_configs() -> Path:
    """The packaged configuration folder. Raises OperationError where the installation lost it."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "recipe").is_dir():
            return folder
    raise OperationError(
        Fault(
            "this installation of tuneplane has no configs folder",
            str(package),
            "install it again: pip install --force-reinstall tuneplane",
        )
    )
