"""torchelastic's error file: what ended this rank, as torch's own `@record` writes it, without importing torch.

Written by the bridge; read by torchrun's summary and by the node agent.
"""

from __future__ import annotations

import os

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by torchrun for each rank: the path of a file that is not there yet."""


def write_error_file(error: BaseException) -> None:
    """Write it where torchrun asked for it and nobody has: a user's own `@record` knows more. Never raises."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    try:
        if not os.path.lexists(path):
            from pathlib import Path

            from tuneplane.kernel.files import create_once

            create_once(Path(path), error_text(error))
    except Exception:  # its exit code and its traceback tell of the failure all the same
        return


def error_text(error: BaseException) -> str:
    """The form of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler` (torch 2.4 to 2.13)."""
    import json
    import time
    import traceback

    return json.dumps(
        {
            "message": {
                "message": f"{type(error).__name__}: {_text(error)}",
                "extraInfo": {
                    "py_callstack": "".join(
                        traceback.format_exception(type(error), error, error.__traceback__)
                    ),
                    "timestamp": str(int(time.time())),
                },
            }
        }
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # as tracebacks say it
        return "<exception str() failed>"
