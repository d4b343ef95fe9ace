"""What is set up in a training process before its entry runs: stack dumps on request, hooks, the ranks' check.

Called by the bridge, in every rank. Nothing here may keep training from its start but a hook that is not there,
and a check that was asked for.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
from _signal import SIG_DFL, SIGQUIT, getsignal  # type: ignore[import-not-found]  # `signal` costs 2 ms

from tuneplane.bridge.command import refuse
from tuneplane.bridge.processgroups import keep_process_groups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tuneplane.bridge.command import Command

HOOKS = "tuneplane.bridge.hooks"


def prepare(command: Command) -> None:
    """Everything before the entry. Ends the process with 2 where a hook is not known."""
    for name in command.hooks:
        if not (name.isidentifier() and importlib.util.find_spec(f"{HOOKS}.{name}")):
            refuse(f"unknown hook {name!r}; there are: {', '.join(hook_names())}")
    dump_stacks_on_request()
    keep_process_groups()
    for name in command.hooks:
        install_hook(name)
    if command.preflight:
        from tuneplane.bridge.preflight import run_preflight

        run_preflight()


def dump_stacks_on_request() -> None:
    """Have SIGQUIT write the stacks of all threads to stderr, where nobody has set what it does."""
    try:
        if getsignal(SIGQUIT) == SIG_DFL:
            faulthandler.register(SIGQUIT, all_threads=True)
    except (OSError, RuntimeError, ValueError):  # no stderr, or not the main thread: no dumps
        return


def hook_names() -> list[str]:
    """The hooks that this bridge has."""
    from pkgutil import iter_modules

    return sorted(module.name for module in iter_modules(importlib.import_module(HOOKS).__path__))


def install_hook(name: str) -> None:
    """Install one of `hook_names`; one that fails says so in a line, and training starts without it."""
    try:
        importlib.import_module(f"{HOOKS}.{name}").install()
    except Exception as error:
        say_hook_failed(name, error)


def say_hook_failed(name: str, error: BaseException) -> None:
    """One line on stderr."""
    from tuneplane.report.stderr import say

    try:
        why = f"{type(error).__name__}: {error}"
    except Exception:  # a stranger's exception may have no text
        why = type(error).__name__
    say(f"hook {name} failed in process {os.getpid()} ({' '.join(why.split())}); training goes on without it")
