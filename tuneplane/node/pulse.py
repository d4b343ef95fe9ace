"""Signs of life between the nodes of a run, over the network: each to node 0, and its answer.

`fence.py` reads them. A node that is cut off may see the shared storage all the same, or not even that; files
alone do not tell. UDP on the port whose TCP side is the trainer's: nothing else needs to be open.
"""

from __future__ import annotations

import errno
import hashlib
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

SIGNATURE_BYTES = 16

LONGEST_BYTES = 256

ENDED_TIMES = 3

LONGEST_KEY_BYTES = 64
"""Of blake2b."""

SHORTEST_S = 0.001
"""A time-out of 0 would mean a socket that never waits."""

ANSWERED = (0, errno.ECONNREFUSED)
"""What a connection comes to where there is a host."""


class Silence:
    """How long somebody has not been heard, counted in the listener's own ticks.

    A tick adds `most_s` at the most: a process that was itself stopped (a suspended job) blames nobody for it.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s, self._silent_s, self._at = most_s, 0.0, 0.0
        self._heard = False

    def hear(self) -> None:
        self._heard, self._silent_s = True, 0.0

    def tick(self, now: float) -> float | None:
        """Seconds of silence at `now`, on the monotonic clock; None where nothing was ever heard."""
        self._silent_s += min(now - self._at, self._most_s) if self._at else 0.0
        self._at = now
        return self._silent_s if self._heard else None


class Pulse:
    """One node's end of it: node 0 and every other one speak to each other.

    A socket that cannot be had means silence.

    key: known to this attempt's nodes alone, so that no message of another attempt counts.
    """

    def __init__(
        self, rank: int, others: Iterable[int], address: str, port: int, key: str, interval_s: float
    ) -> None:
        self._rank, self._address, self._port = rank, address, port
        self._key, self._interval_s = key.encode()[:LONGEST_KEY_BYTES], interval_s
        self._lock = threading.Lock()
        self._silences = {other: Silence(1.5 * interval_s) for other in others}
        self.ending = False
        """Told along: this node ends its attempt."""
        self.told_ending = False
        """Node 0 said that it ends the attempt."""
        self.hung = self.told_hung = False
        """The same of an attempt that hangs."""
        self.ended: set[int] = set()
        """Nodes that said that their command has ended by itself: they are silent from then on."""
        self._has_ended = False
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._senders: dict[int, Any] = {}
        self._open: socket.socket | None = None

    def start(self) -> None:
        """Speak and listen from here on."""
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def silences_s(self) -> dict[int, float | None]:
        """Node → seconds since it was heard, None where it never was. Called at every interval."""
        now = time.monotonic()
        with self._lock:
            return {other: silence.tick(now) for other, silence in self._silences.items()}

    def say_ended(self) -> None:
        """Tell the others that this node's command has ended by itself, more than once: datagrams get lost."""
        self._has_ended = True
        opened = self._open
        if opened is None:
            return
        for _ in range(ENDED_TIMES):
            with suppress(OSError):
                if self._rank != 0:
                    opened.send(self._message())
                for sender in list(self._senders.values()):
                    opened.sendto(self._message(), sender)

    def _run(self) -> None:
        while True:
            try:
                with self._socket() as opened:
                    self._open = opened
                    self._answer(opened) if self._rank == 0 else self._ask(opened)
            except OSError:
                time.sleep(self._interval_s)

    def reach(self, others: Iterable[int], within_s: float) -> set[int]:
        """Those whose hosts answer a connection, if only by refusing it: a network that loses datagrams alone."""
        hosts = {rank: sender[0] for rank, sender in self._senders.items()} if self._rank == 0 else {}
        hosts = hosts or {0: self._address}
        reached: set[int] = set()
        deadline = time.monotonic() + within_s
        with ExitStack() as stack, suppress(OSError):  # no more files: who was not asked was not reached
            waiting = stack.enter_context(selectors.DefaultSelector())
            for other in set(others) & hosts.keys():
                opened = stack.enter_context(socket.socket(self._family, socket.SOCK_STREAM))
                opened.setblocking(False)
                code = opened.connect_ex((hosts[other], self._port))
                if code == errno.EINPROGRESS:
                    waiting.register(opened, selectors.EVENT_WRITE, other)
                elif code in ANSWERED:
                    reached.add(other)
            while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in waiting.select(left_s):
                    waiting.unregister(key.fileobj)
                    if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in ANSWERED:  # type: ignore[union-attr]
                        reached.add(key.data)
        return reached

    def _socket(self) -> socket.socket:
        opened = socket.socket(self._family, socket.SOCK_DGRAM)
        if self._rank == 0:
            opened.bind((self._address, self._port))
        else:
            opened.connect((self._address, self._port))
        return opened

    def _answer(self, opened: socket.socket) -> None:
        """Hear all, and speak to all of them at every interval: of two ways one may lose what the other brings."""
        speaks_at = time.monotonic()
        while True:
            opened.settimeout(max(SHORTEST_S, speaks_at - time.monotonic()))
            try:
                message, sender = opened.recvfrom(LONGEST_BYTES)
            except socket.timeout:  # Python 3.9: not TimeoutError yet
                pass
            else:
                rank = self._hear(message)
                if rank is not None:
                    self._senders[rank] = sender
            if time.monotonic() >= speaks_at:
                speaks_at = time.monotonic() + self._interval_s
                for sender in list(self._senders.values()):
                    with suppress(OSError):  # no way to it just now
                        opened.sendto(self._message(), sender)

    def _ask(self, opened: socket.socket) -> None:
        """Speak at every interval, and hear what comes meanwhile: what is left lying would be heard too late."""
        while True:
            until = time.monotonic() + self._interval_s
            with suppress(OSError):  # refused: node 0 does not listen yet; no route: cut off
                opened.send(self._message())
            while (left_s := until - time.monotonic()) > 0:
                opened.settimeout(left_s)
                try:
                    self._hear(opened.recv(LONGEST_BYTES))
                except socket.timeout:
                    break
                except OSError:
                    time.sleep(max(0.0, until - time.monotonic()))

    def _message(self) -> bytes:
        state = "hung" if self.hung else "ended" if self._has_ended else "ending" if self.ending else "alive"
        text = f"tuneplane {self._rank} {state}".encode()
        return self._signature(text) + text

    def _hear(self, message: bytes) -> int | None:
        """The node that sent this, noted; None for what is none of this attempt's."""
        signature, text = message[:SIGNATURE_BYTES], message[SIGNATURE_BYTES:]
        if self._signature(text) != signature:
            return None
        _, rank, state = text.decode("ascii").split()
        with self._lock:
            silence = self._silences.get(int(rank))
            if silence is None:
                return None
            silence.hear()
        if rank == "0" and state == "ending":
            self.told_ending = True
        if rank == "0" and state == "hung":
            self.told_hung = True
        if state == "ended":
            self.ended = self.ended | {int(rank)}
        return int(rank)

    def _signature(self, text: bytes) -> bytes:
        return hashlib.blake2b(text, key=self._key, digest_size=SIGNATURE_BYTES).digest()
