"""The page's files, built from `web/` by `make board` and kept in memory. Called by `serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError

MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "app.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "licenses.txt": "text/plain; charset=utf-8",
}
"""All that the page consists of."""


@dataclass(frozen=True)
class Asset:
    """One file as it is served."""

    content: bytes
    media_type: str


def read_assets(folder: Path | None = None) -> dict[str, Asset]:
    """Every file of the page, by name. Raises OperationError where it was not built."""
    folder = folder or Path(__file__).resolve().parent / "static"
    found: dict[str, Asset] = {}
    for name, media_type in MEDIA_TYPES.items():
        try:
            found[name] = Asset((folder / name).read_bytes(), media_type)
        except FileNotFoundError:
            raise OperationError(
                Fault(
                    "the board's page was not built",
                    str(folder / name),
                    "in a checkout: make board (it needs Node.js 18 or newer and npm); else install a wheel: "
                    "make wheel",
                )
            ) from None
        except OSError as error:
            raise OperationError(Fault(f"cannot be read: {error.strerror}", str(folder / name))) from None
    return found
