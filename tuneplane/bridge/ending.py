"""The end of a training process: what was raised is shown as Python shows it, then the process surely leaves.

Called by the bridge once the entry has ended. Decision 25 says why it does not leave all of this to Python.
"""

from __future__ import annotations

import os
import sys
from _signal import SIG_DFL, SIGINT, signal  # type: ignore[import-not-found]

from tuneplane.bridge.errorfile import write_error_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, NoReturn

FLUSH_S = 10.0
"""How long files that the program left open may take to be flushed, where its threads live on: a disk may hang."""

_BRIDGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def without_bridge(error: BaseException) -> BaseException:
    """`error` with the bridge's own frames taken out of its traceback, and of those of all that led to it."""
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
    return error


def ended_by(error: BaseException, note: bool) -> tuple[int, int | None]:
    """Show what ended the entry. Exit code, and the signal to die of: Ctrl-C is told to the parent by that.

    note: write torchelastic's error file, for what its own `@record` writes it for.
    """
    if isinstance(error, SystemExit):
        return _code_of(error), None
    if note and isinstance(error, Exception):
        write_error_file(error)
    code = _show(error)
    if code is not None:
        return code, None
    return 1, SIGINT if type(error) is KeyboardInterrupt else None


def leave(code: int, by_signal: int | None) -> NoReturn:
    """End the process: threads are waited for, callbacks of atexit run, everything written, then it is gone.

    A process without other threads is left to Python. Where daemon and native threads live on, taking the
    interpreter to pieces among them may hang for ever: there the process ends without that.
    """
    if by_signal is None and (sys.flags.inspect or os.environ.get("PYTHONINSPECT")):
        sys.exit(code)
    _wait_for_threads()
    _run_callbacks()
    if by_signal is not None and _flush_standard():
        signal(by_signal, SIG_DFL)
        os.kill(os.getpid(), by_signal)
    if not _is_alone() and _flush_standard():
        _flush_files()
        os._exit(code & 0xFF)
    sys.exit(code)


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
    """The exit code that Python takes from it; what is no number it prints, and fails."""
    code: Any = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code if -(1 << 63) <= code < 1 << 63 else -1
    if sys.stderr is not None:
        try:
            print(code, file=sys.stderr)
        except Exception:  # Python too goes on without the text
            return 1
    return 1


def _show(error: BaseException) -> int | None:
    """Give it to `sys.excepthook`; an exit code where that asks for one by SystemExit."""
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
        return _code_of(asked)
    except BaseException as failure:
        without_bridge(failure)
        print("Error in sys.excepthook:", file=sys.stderr, flush=True)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr, flush=True)
        sys.__excepthook__(type(error), error, error.__traceback__)
    return None


def _wait_for_threads() -> None:
    """What Python does first: wait for the threads that are no daemons."""
    threading: Any = sys.modules.get("threading")
    if threading is None:
        return
    try:
        threading._shutdown()
    except BaseException as error:  # Ctrl-C, or a handler's SystemExit: the end goes on
        without_bridge(error)
        print(f"Exception ignored in: {threading!r}", file=sys.stderr, flush=True)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _run_callbacks() -> None:
    import atexit

    try:
        atexit._run_exitfuncs()
    except BaseException:  # Python 3.9 raises the last failure again; each has been shown
        return


def _is_alone() -> bool:
    """Whether no thread is left but this one, native ones counted too."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


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
