"""The lines of an ingest file, as ASCII text. Written by Session and Writer, read by `tuneplane.collect.points`.

The first line is a header; every later one is numbered (`n`), so that a reader can tell what is missing:
`{"n":0,"t":…,"s":…,"m":{…}}` a point, `"h":{…}` hparams, `"r":step` where the attempt took up again,
`"d":{"points":…,"values":…}` how many points and values were dropped so far.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from tuneplane.report.ingest import Ingest

FORMAT_VERSION = 1
MAX_LINE_BYTES = 8 << 20
"""No line is longer: readers skip what is past 16 MiB."""

_MAX_HEADS = 4096
_heads: dict[str, str] = {}  # names as JSON with their colon: a trainer logs the same few names all day


def header_line(ingest: Ingest, host: str, pid: int, started_s: float) -> str:
    """Who writes this file: the run and token (as its digest) bind it to the run, against mix-ups."""
    import hashlib

    from tuneplane import __version__

    header = {
        "v": FORMAT_VERSION,
        "run_id": ingest.run_id,
        "attempt": ingest.attempt,
        "rank": ingest.rank,
        "host": host,
        "pid": pid,
        "token_sha256": hashlib.sha256(ingest.token.encode("utf-8", "surrogateescape")).hexdigest(),
        "started": round(started_s, 3),
        "tuneplane": __version__,
    }
    return json.dumps(header, separators=(",", ":")) + "\n"


def point_body(time_s: float, step: int | float, numbers: Mapping[str, int | float]) -> str:
    """A point without its number. Floats have twelve digits, which cost no more than nine; ints have all."""
    parts = []
    for name, number in numbers.items():
        head = _heads.get(name) or _remember(name)
        if type(number) is not float:
            parts.append(f"{head}{number}")
        elif number - number == 0.0:
            parts.append(f"{head}{number:.12g}")
        else:
            parts.append(head + json.dumps(number))  # NaN, Infinity, -Infinity
    return f'"t":{time_s:.3f},"s":{step!r},"m":{{{",".join(parts)}}}'


def hparams_body(time_s: float, hparams: Mapping[str, Any]) -> str:
    """Hyper-parameters, plain JSON already."""
    return f'"t":{time_s:.3f},"h":{json.dumps(hparams, separators=(",", ":"))}'


def resume_body(time_s: float, step: int | float) -> str:
    """The first step that this attempt does anew."""
    return f'"t":{time_s:.3f},"r":{step!r}'


def dropped_body(time_s: float, points: int, values: int) -> str:
    """How many points and values this process dropped since it began."""
    return f'"t":{time_s:.3f},"d":{{"points":{points},"values":{values}}}'


def numbered(number: int, body: str) -> str:
    """A whole line."""
    return f'{{"n":{number},{body}}}\n'


def unicode(text: str) -> str:
    """Text with `?` for each lone surrogate, which most readers of JSON refuse."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _remember(name: str) -> str:
    if len(_heads) >= _MAX_HEADS:
        _heads.clear()
    head = _heads[name] = json.dumps(unicode(name)) + ":"
    return head
