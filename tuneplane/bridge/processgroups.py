"""Process groups of torch that a program has destroyed: those of gloo live on until the process ends.

Called by the bridge before the entry. One that is freed may wait for ever for its own thread: decision 25.
"""

from __future__ import annotations

from tuneplane.bridge.imports import after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_kept: list[Any] = []


def keep_process_groups() -> None:
    """From now on, should torch be imported: `destroy_process_group` leaves what it destroys in memory."""
    after_import("torch.distributed.distributed_c10d", _patch)


def _patch(module: ModuleType) -> None:
    import functools

    known: Any = module
    destroy = getattr(known, "destroy_process_group", None)
    if destroy is None:
        return

    @functools.wraps(destroy)
    def destroy_process_group(*arguments: Any, **more: Any) -> Any:
        try:
            _kept.extend(group for group, (backend, _) in known._world.pg_map.items() if "gloo" in backend)
        except Exception:  # a torch of another shape: as without us
            _kept.clear()
        return destroy(*arguments, **more)

    known.destroy_process_group = destroy_process_group
