"""`tp board` as its user starts it, and a browser's part of the talk, by hand. For tests and the bench."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

START_S = 20.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        def refuse(word: str) -> None:
            raise AssertionError(f"{word} is no JSON")

        return json.loads(self.body, parse_constant=refuse)


class BoardServer:
    """A running board. `link` is the last one that it printed, `said` all its lines."""

    def __init__(self, argv: list[str], home: Path, environment: Mapping[str, str]) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("tp")), "board", *argv],
            env={**kept, "HOME": str(home), "TUNEPLANE_STORE_DIR": str(home / "store"), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.home = home
        self.said: list[str] = []
        self._links: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.link = self.next_link()
        self.cookie = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            if found := re.search(r"http://\S+", line):
                self._links.put(found[0])

    def next_link(self) -> str:
        """The next link that is printed."""
        try:
            self.link = self._links.get(timeout=START_S)
        except queue.Empty:
            raise AssertionError(f"no link: {self.said}") from None
        return self.link

    @property
    def port(self) -> int:
        return urlsplit(self.link).port or 80

    @property
    def token(self) -> str:
        return self.link.partition("token=")[2].partition("#")[0]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)

    def request(
        self,
        target: str,
        headers: Mapping[str, str] | None = None,
        method: str = "GET",
        cookie: str | None = None,
    ) -> Answer:
        """One request, target as it is; `cookie` None: that of `sign_in`."""
        connection = self.connect()
        given = dict(headers or {})
        sent = self.cookie if cookie is None else cookie
        if sent:
            given["Cookie"] = sent
        with contextlib.closing(connection):
            connection.putrequest(method, target, skip_host="Host" in given, skip_accept_encoding=True)
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def sign_in(self) -> Answer:
        """Use the link; later requests carry the cookie."""
        answer = self.request(f"/?token={self.token}", cookie="")
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    def get(self, path: str, *query: tuple[str, Any], status: int = 200) -> Any:
        """The JSON of an address."""
        answer = self.request(f"{path}?{urlencode(query)}" if query else path)
        assert answer.status == status, answer
        return answer.json

    def lines(self, *query: tuple[str, Any]) -> list[dict[str, Any]]:
        """`/api/lines`, decoded: each line's head, with its columns."""
        answer = self.request(f"/api/lines?{urlencode(query)}")
        assert answer.status == 200, answer
        (length,) = struct.unpack("<I", answer.body[:4])
        head = json.loads(answer.body[4 : 4 + length])
        values = array("d")
        values.frombytes(answer.body[(4 + length + 7) // 8 * 8 :])
        offset = 0
        for line in head["lines"]:
            for name, count in (("steps", "points"), ("values", "points"), ("times", "points")):
                line[name] = values[offset : offset + line[count]]
                offset += line[count]
            for name in ("mean_x", "mean_y"):
                line[name] = values[offset : offset + line["means"]]
                offset += line["means"]
        assert offset == len(values)
        found: list[dict[str, Any]] = head["lines"]
        return found

    def overview(self, run_id: str, seen: str = "") -> Any:
        (one,) = self.get("/api/overviews", ("run", run_id), ("seen", seen))["overviews"]
        return one

    def wait_for(self, true: Callable[[], Any], what: str, deadline_s: float = 15.0) -> Any:
        """What `true` returns once that is something; fail after a while."""
        until = time.monotonic() + deadline_s
        while True:
            found = true()
            if found:
                return found
            assert time.monotonic() < until, f"not within {deadline_s:.0f} s: {what}"
            time.sleep(0.05)

    def wait_for_runs(self, count: int) -> list[dict[str, Any]]:
        """The list of runs, once so many are there."""

        def listed() -> Any:
            runs = self.get("/api/runs")["runs"]
            return runs if len(runs) >= count else None

        found: list[dict[str, Any]] = self.wait_for(listed, f"{count} runs")
        return found

    def end(self) -> int:
        """As Ctrl-C does; its exit code."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextlib.contextmanager
def board(home: Path, *argv: str, **environment: str) -> Iterator[BoardServer]:
    """A board that is gone afterwards; on a free port unless `argv` says otherwise."""
    where = [] if any(word.startswith("--port") for word in argv) or "--socket" in argv else ["--port", "0"]
    server = BoardServer([*where, *(word for word in argv if word != "--socket")], home, environment)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(timeout=10)


def raw(port: int, request: bytes) -> bytes:
    """What is answered to these very bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        connection.settimeout(5)
        answer = b""
        while block := connection.recv(65536):
            answer += block
    return answer
