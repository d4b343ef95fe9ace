"""The end of a training process: what was raised is shown as Python shows it, then the process surely leaves.

Called by the bridge before the entry and after it. Decision 25 says why not all of this is left to Python.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from _signal import SIG_DFL, SIGINT, signal  # type: ignore[import-not-found]

from tuneplane.bridge.errorfile import write_error_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

FLUSH_S = 10.0
"""How long files that the program left open may take to be flushed, where its threads live on: a disk may hang."""

GONE_S = 0.05
"""How long a thread that has ended may take to be gone for the kernel too."""

_BRIDGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Ending:
    """How this process is to end: nothing yet (None), an exit code, or a signal where it is negative."""

    code: int | None = None


def leave_in_the_end() -> None:
    """Have the process leave once all else is done: threads waited for, every other callback of atexit run.

    Called before anything registers one, since they run last in, first out. Where something in Python's own start
    has, the end is Python's alone: that callback is not to be lost.
    """
    if not atexit._ncallbacks():
        atexit.register(_leave)


def end(error: BaseException | None, note: bool) -> None:
    """End as the entry did: show what it raised, and raise what gives Python's exit code.

    note: write torchelastic's error file, for what its own `@record` writes it for.
    """
    Ending.code = 0
    if error is None:
        return
    if isinstance(error, SystemExit):
        Ending.code = _code_of(error)
        raise error
    without_bridge(error)
    if note and isinstance(error, Exception):
        write_error_file(error)
    Ending.code = 1
    _show(error)
    if type(error) is KeyboardInterrupt:  # the parent is told by the signal itself
        Ending.code = -SIGINT
        sys.excepthook = _shown_already
        raise KeyboardInterrupt
    sys.exit(1)


def without_bridge(error: BaseException) -> None:
    """Take the bridge's own frames out of the traceback of `error`, and of those of all that led to it."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _spliced(one.__traceback__)
        pending += [one.__cause__, one.__context__]
        group = getattr(one, "exceptions", None)  # of an exception group
        if isinstance(group, (tuple, list)):
            pending += [member for member in group if isinstance(member, BaseException)]


def _leave() -> None:
    """Python's last callback. A process without other threads is left to Python.

    Where daemon and native threads live on, taking the interpreter to pieces among them may hang for ever: there
    the process ends without that.
    """
    code = Ending.code
    if code is None or sys.flags.inspect or os.environ.get("PYTHONINSPECT"):
        return
    if _is_alone() or not _flush_standard():
        return
    _flush_files()
    if code < 0:
        signal(-code, SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _spliced(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_BRIDGE):
        traceback = traceback.tb_next
    entry = traceback
    while entry is not None:
        following = entry.tb_next
        while following is not None and following.tb_frame.f_code.co_filename.startswith(_BRIDGE):
            following = following.tb_next
        if following is not entry.tb_next:
            entry.tb_next = following
        entry = following
    return traceback


def _code_of(error: SystemExit) -> int:
    """The exit code that Python takes from it, 0 to 255; what is no number it prints, and fails."""
    code: Any = error.code
    if code is None:
        return 0
    if not isinstance(code, int):
        return 1
    return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF


def _show(error: BaseException) -> None:
    """Give it to `sys.excepthook`, as Python does."""
    last: Any = sys
    last.last_type, last.last_value, last.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        last.last_exc = error
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        print("sys.excepthook is missing", file=sys.stderr)
        hook = sys.__excepthook__
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit as asked:
        Ending.code = _code_of(asked)
        raise
    except BaseException as failure:
        without_bridge(failure)
        print("Error in sys.excepthook:", file=sys.stderr, flush=True)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr, flush=True)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _shown_already(*_: Any) -> None:
    """Stands in for `sys.excepthook` where that has been called."""


def _is_alone() -> bool:
    """Whether no thread is left but this one, native ones counted too."""
    deadline_s = time.monotonic() + GONE_S
    try:
        while len(os.listdir("/proc/self/task")) > 1:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.001)
    except OSError:
        return False
    return True


def _flush_standard() -> bool:
    """False where it fails: Python tells of that by a message and by code 120 as it ends."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:
        return False
    return True


def _flush_files() -> None:
    """Write out what stands in buffers: of files that the program left open, and of C's stdio."""
    import _thread

    done = _thread.allocate_lock()
    done.acquire()

    def flush() -> None:
        try:
            _flush_open_files()
            _flush_stdio()
        finally:
            done.release()

    try:
        _thread.start_new_thread(flush, ())
        done.acquire(timeout=FLUSH_S)
    except RuntimeError:  # no thread to be had: nothing bounds it then
        flush()


def _flush_open_files() -> None:
    import gc
    import io

    # Of real types: `isinstance` asks an object for its class, and a lazy module imports itself then.
    kinds = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]
    # Text first: it flushes into the buffer beneath it.
    for file in sorted(files, key=lambda file: not issubclass(type(file), io.TextIOWrapper)):
        try:
            if not file.closed:
                file.flush()
        except Exception:  # read-only, detached, a full disk: as at Python's own end
            continue


def _flush_stdio() -> None:
    try:
        import ctypes

        ctypes.CDLL(None).fflush(None)
    except Exception:  # a Python without ctypes
        return
