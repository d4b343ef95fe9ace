"""Trainers of transformers, and so of TRL, report by themselves: each gets `TunePlaneCallback`.

Installed by the bridge. A callback that the program gives itself takes the place of this one.
"""

from __future__ import annotations

import functools

from tuneplane.bridge.imports import after_import
from tuneplane.bridge.preparation import say_hook_failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_OURS = "_tuneplane_hook"
"""Marks the callback that came from here."""


def install() -> None:
    """From now on, once transformers has been imported, every `Trainer` that is made has the callback."""
    after_import("transformers.trainer", _patch)


def _patch(module: ModuleType) -> None:
    try:
        trainer: Any = vars(module)["Trainer"]
        init, add_callback = _adding(trainer.__init__), _giving_way(trainer.add_callback)
        trainer.__init__, trainer.add_callback = init, add_callback
    except Exception as error:  # a transformers of another shape: it trains without us
        say_hook_failed("transformers", error)


def _adding(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, *arguments: Any, **more: Any) -> None:
        init(self, *arguments, **more)
        try:
            _add(self)
        except Exception as error:
            say_hook_failed("transformers", error)

    return __init__


def _giving_way(add_callback: Any) -> Any:
    """A program's own callback may come after `__init__`: two would report everything twice."""

    @functools.wraps(add_callback)
    def wrapped(self: Any, callback: Any) -> Any:
        try:
            if _is_callback(callback) and not hasattr(callback, _OURS):
                handler = self.callback_handler
                handler.callbacks = [one for one in handler.callbacks if not hasattr(one, _OURS)]
        except Exception as error:
            say_hook_failed("transformers", error)
        return add_callback(self, callback)

    return wrapped


def _add(trainer: Any) -> None:
    from tuneplane.report import TunePlaneCallback

    if not any(map(_is_callback, trainer.callback_handler.callbacks)):
        callback = TunePlaneCallback()
        setattr(callback, _OURS, True)
        trainer.add_callback(callback)


def _is_callback(callback: Any) -> bool:
    from tuneplane.report import TunePlaneCallback

    kind = callback if isinstance(callback, type) else type(callback)
    return issubclass(kind, TunePlaneCallback)
