"""Signs of life between the nodes of a run, over the network: each to node 0, and its answer.

`fence.py` reads them. A node that is cut off may see the shared storage all the same, or not even that; files
alone do not tell. UDP on the port whose TCP side is the trainer's: nothing else needs to be open.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

SIGNATURE_BYTES = 16

LONGEST_BYTES = 256

ENDED_TIMES = 3

LONGEST_KEY_BYTES = 64
"""Of blake2b."""


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
    """One node's end of it. Node 0 answers, every other node asks. A socket that cannot be had means silence.

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
        self.ended: set[int] = set()
        """Nodes that said that their command has ended by itself: they are silent from then on."""
        self._has_ended = False
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

    def _socket(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        opened = socket.socket(family, socket.SOCK_DGRAM)
        if self._rank == 0:
            opened.bind((self._address, self._port))
        else:
            opened.connect((self._address, self._port))
            opened.settimeout(self._interval_s)
        return opened

    def _answer(self, opened: socket.socket) -> None:
        while True:
            message, sender = opened.recvfrom(LONGEST_BYTES)
            rank = self._hear(message)
            if rank is not None:
                self._senders[rank] = sender
                try:
                    opened.sendto(self._message(), sender)
                except OSError:  # no way back to it just now
                    continue

    def _ask(self, opened: socket.socket) -> None:
        while True:
            begun = time.monotonic()
            try:
                opened.send(self._message())
                self._hear(opened.recv(LONGEST_BYTES))
            except socket.timeout:  # Python 3.9: not TimeoutError yet
                continue
            except OSError:  # refused: node 0 does not listen yet; no route: cut off
                pass
            time.sleep(max(0.0, self._interval_s - (time.monotonic() - begun)))

    def _message(self) -> bytes:
        state = "ended" if self._has_ended else "ending" if self.ending else "alive"
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
        if state == "ended":
            self.ended = self.ended | {int(rank)}
        return int(rank)

    def _signature(self, text: bytes) -> bytes:
        return hashlib.blake2b(text, key=self._key, digest_size=SIGNATURE_BYTES).digest()
