"""Acting once a module has been imported, without importing it: for hooks into what only the program imports.

Used by `tuneplane.bridge.hooks`. Nothing of it is left once the module is there.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Callable


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` once, as soon as the module `name` has run. `then` must not raise."""
    module = sys.modules.get(name)
    watching = [finder for finder in sys.meta_path if isinstance(finder, _Watch) and finder.name == name]
    if module is not None:
        then(module)
    elif watching:  # one a name: two would look for the module through each other without end
        watching[0].then.append(then)
    else:
        sys.meta_path.insert(0, _Watch(name, then))


class _Watch:
    """A finder that finds what the others find, and has its loader tell when the module has run."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = [then]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        """Have this one loader say so. Its class, and so what others ask of it, stays the same."""
        if loader is None or "exec_module" in getattr(loader, "__dict__", {}):
            return
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if module.__name__ == self.name:
                loader.__dict__.pop("exec_module", None)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                for then in self.then:
                    then(module)

        loader.exec_module = exec_module
