"""One thread that does one thing after the other: what may stall with the storage, away from the server's loop.

Called by `watch` and `app`. The thread is a daemon: a filesystem that hangs does not keep the board from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """`ask` has something done in the thread. Whenever nothing is asked, `idle` is called.

    idle: does a little, and returns after how many seconds it wants to be called again. It must not raise.
    """

    def __init__(self, name: str, idle: Callable[[], float] | None = None) -> None:
        self._idle = idle
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[], T]) -> Future[T]:
        """Have `call` done in the thread, after what was asked before."""
        future: Future[T] = Future()
        self._asked.put((future, call))
        return future

    def end(self, timeout_s: float) -> bool:
        """Let the thread end after what was asked; whether it did within this time."""
        self._asked.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        wait_s = 0.0 if self._idle else None
        while True:
            try:
                asked = self._asked.get(timeout=wait_s) if wait_s != 0.0 else self._asked.get_nowait()
            except queue.Empty:
                wait_s = self._idle() if self._idle else None
                continue
            if asked is None:
                return
            future, call = asked
            if not future.set_running_or_notify_cancel():  # who asked has gone
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
