"""The entry: a script or module, run as the `__main__` of this process as Python itself would run it.

Called by the bridge once the process is prepared. `__main__` stays: what is pickled from it can be found.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

    from tuneplane.bridge.command import Command

_PYC_HEADER_BYTES = 16  # PEP 552
_NO_FILE = 2  # exit code of Python for a script that it cannot open


def make_main(command: Command) -> None:
    """Put a new `__main__` into `sys.modules`, and set `sys.argv` and `sys.path` for the entry."""
    bridge = sys.modules["__main__"]
    main = type(sys)("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=vars(bridge).get("__loader__"))
    if "__annotations__" in vars(bridge):  # Python 3.14 gives none to a new `__main__`
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if command.is_module:
        # What Python has there while it looks for the module; runpy puts the module's file there.
        sys.argv[:] = ["-m", *command.arguments]
        return
    sys.argv[:] = [command.entry, *command.arguments]
    unsafe = not getattr(sys.flags, "safe_path", sys.flags.isolated)
    if unsafe and sys.path[:1] == [_working_folder()]:
        del sys.path[0]  # `python -m` put it there, for the bridge
    place = _absolute(command.entry)
    if _is_importable(place):
        sys.path.insert(0, place)
    elif unsafe:
        sys.path.insert(0, os.path.dirname(os.path.realpath(command.entry)))


def run_main(command: Command) -> BaseException | None:
    """Run the entry to its end; what it raised."""
    try:
        if command.is_module:
            _runpy_main(command.entry, True)
        elif _is_importable(_absolute(command.entry)):
            _runpy_main("__main__", False)
        else:
            main = sys.modules["__main__"]
            exec(_code_of_script(main, _absolute(command.entry)), vars(main))
    except BaseException as error:
        return error
    return None


def _runpy_main(name: str, alter_argv: bool) -> None:
    """What `python -m` itself calls: its frames stand in a module's traceback with or without the bridge."""
    runner: Any = runpy
    runner._run_module_as_main(name, alter_argv)


def _code_of_script(main: ModuleType, file: str) -> CodeType:
    """The code of a script; `main` then holds what Python says there of it."""
    try:
        with open(file, "rb") as opened:
            content = opened.read()
    except OSError as error:
        python = getattr(sys, "orig_argv", [sys.executable])[0]
        print(f"{python}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(_NO_FILE)
    compiled = content.startswith(MAGIC_NUMBER[:2])
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", file)
    main.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
    if compiled:
        import marshal

        code: CodeType = marshal.loads(content[_PYC_HEADER_BYTES:])
        return code
    return compile(content, file, "exec", dont_inherit=True)


def _is_importable(path: str) -> bool:
    """Whether modules can be imported from there: a folder or a zip file. Python asks the same."""
    if sys.path_importer_cache.get(path) is not None:
        return True
    for hook in sys.path_hooks:
        try:
            sys.path_importer_cache[path] = hook(path)
        except ImportError:
            continue
        return True
    return False


def _absolute(path: str) -> str:
    """As Python makes the path of a script absolute: nothing in it is tidied up."""
    return path if os.path.isabs(path) else f"{_working_folder()}/{path}"


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return ""
