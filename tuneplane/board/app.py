"""The board's addresses, and what each answers. Made by `serve`; whatever may stall is done by workers."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tuneplane import spec as jobspec
from tuneplane.board import wire
from tuneplane.board.access import Access, Application, Guard
from tuneplane.board.answers import overview_answer, read_details, runs_answer
from tuneplane.board.assets import Asset
from tuneplane.board.lines import RELATIVE, STEP, TIME, View
from tuneplane.board.logtail import read_stamp, read_tail
from tuneplane.board.watch import Listed, Watch
from tuneplane.board.worker import Worker
from tuneplane.collect.series import Series
from tuneplane.export.rows import rows, write_csv
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.runs.artifacts import list_artifacts, output_folder

T = TypeVar("T")

WAIT_S = 15.0
"""How long a page waits for the storage before it is told that this does not answer."""

MAX_RUNS, MAX_METRICS, MAX_BUCKETS = 500, 200, 4_000
"""Of one request: more than any screen shows."""


class Board:
    """Answers requests from what `watch` knows. about: facts of the board itself, for the page's head."""

    def __init__(self, watch: Watch, assets: dict[str, Asset], about: dict[str, str]) -> None:
        self._watch, self._assets, self._about = watch, assets, about
        # Two, so that one run on a storage that hangs does not keep the other tabs empty.
        self._files = [Worker("board-files-1"), Worker("board-files-2")]
        self._next = 0

    def application(self, access: Access) -> Application:
        """The ASGI application, guarded."""
        routes = [
            Route("/", self._page, methods=["GET"]),
            Route("/static/{name}", self._asset, methods=["GET"]),
            Route("/api/runs", self._runs, methods=["GET"]),
            Route("/api/overviews", self._overviews, methods=["GET"]),
            Route("/api/lines", self._lines, methods=["GET"]),
            Route("/api/lines.csv", self._csv, methods=["GET"]),
            Route("/api/details", self._details, methods=["GET"]),
            Route("/api/log", self._log, methods=["GET"]),
            Route("/api/artifacts", self._artifacts, methods=["GET"]),
        ]
        handlers = {HTTPException: _told, TunePlaneError: _failed, OSError: _failed, TimeoutError: _stalled}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), access)

    async def _page(self, request: Request) -> Response:
        return self._serve("index.html")

    async def _asset(self, request: Request) -> Response:
        return self._serve(request.path_params["name"])

    def _serve(self, name: str) -> Response:
        asset = self._assets.get(name)  # of what was there at the start: no path is ever made of a request
        if asset is None:
            raise HTTPException(404, "no such file")
        return Response(asset.content, media_type=asset.media_type)

    async def _runs(self, request: Request) -> Response:
        self._watch.touch()
        states = self._watch.states()
        known = {listed.state.run_id: self._watch.known(listed.state.run_id) for listed in states.runs}
        return _json({**runs_answer(states, known, self._watch.notice()), "about": self._about})

    async def _overviews(self, request: Request) -> Response:
        self._watch.touch()
        ids = _run_ids(request)
        seen = request.query_params.getlist("seen")
        known = await _wait(self._watch.fresh(ids))
        stamps = [*seen, *[""] * len(ids)]
        there = [
            entry for entry in zip(ids, known, stamps, strict=False) if self._watch.run(entry[0]) is not None
        ]

        def answer() -> bytes:  # tens of thousands of metrics take seconds
            return wire.encode({"overviews": [overview_answer(*entry) for entry in there]})

        return Response(await asyncio.to_thread(answer), media_type="application/json")

    async def _lines(self, request: Request) -> Response:
        self._watch.touch()
        order = request.query_params.get("order", STEP)
        if order not in (STEP, RELATIVE, TIME):
            raise HTTPException(400, f"order is {STEP}, {RELATIVE} or {TIME}")
        view = View(
            order,
            _number(request, "low", -math.inf),
            _number(request, "high", math.inf),
            int(min(max(_number(request, "buckets", 1000), 16), MAX_BUCKETS)),
        )
        block = await _wait(self._watch.block(_run_ids(request), _metric_ids(request), view))
        return Response(block, media_type="application/octet-stream")

    async def _csv(self, request: Request) -> Response:
        table = await _wait(self._watch.table(_run_ids(request), _metric_ids(request)))
        blocks = _csv_rows([(run, name, line) for run, name, line in table if isinstance(line, Series)])
        headers = {"content-disposition": "attachment"}  # the page names it
        return StreamingResponse(blocks, media_type="text/csv; charset=utf-8", headers=headers)

    async def _details(self, request: Request) -> Response:
        listed = self._listed(request)
        overview = self._watch.known(listed.state.run_id).overview
        return _json(await self._read(lambda: read_details(listed, overview)))

    async def _log(self, request: Request) -> Response:
        listed = self._listed(request)
        asked = request.query_params.get("attempt", "")
        attempt = int(asked) if asked.isascii() and asked.isdecimal() and len(asked) < 10 else None
        seen = request.query_params.get("seen", "")

        def read() -> dict[str, object]:
            stamp = read_stamp(listed.folder)
            if stamp == seen:
                return {"stamp": stamp, "same": True}
            return {"stamp": stamp, **asdict(read_tail(listed.folder, attempt))}

        return _json(await self._read(read))

    async def _artifacts(self, request: Request) -> Response:
        listed = self._listed(request)

        def read() -> dict[str, object]:
            job = jobspec.read(listed.folder.job)
            found, skipped = list_artifacts(listed.folder, job)
            artifacts = [asdict(artifact) for artifact in found]
            return {
                "folder": str(output_folder(listed.folder, job)),
                "artifacts": artifacts,
                "skipped": skipped,
            }

        return _json(await self._read(read))

    def _listed(self, request: Request) -> Listed:
        self._watch.touch()
        listed = self._watch.run(request.query_params.get("run", ""))
        if listed is None:
            raise HTTPException(404, "no such run")
        return listed

    async def _read(self, call: Callable[[], T]) -> T:
        self._next += 1
        return await _wait(self._files[self._next % len(self._files)].ask(call))


async def _wait(future: Future[T]) -> T:
    """What a worker is asked for. Raises TimeoutError where the storage keeps it waiting."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), WAIT_S)
    except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
        raise TimeoutError from None


def _run_ids(request: Request) -> list[str]:
    ids = list(dict.fromkeys(request.query_params.getlist("run")))
    if len(ids) > MAX_RUNS:
        raise HTTPException(400, f"at most {MAX_RUNS} runs at once")
    return ids


def _metric_ids(request: Request) -> list[str]:
    ids = list(dict.fromkeys(request.query_params.getlist("metric")))
    if len(ids) > MAX_METRICS:
        raise HTTPException(400, f"at most {MAX_METRICS} metrics at once")
    return ids


def _number(request: Request, name: str, default: float) -> float:
    try:
        number = float(request.query_params.get(name, default))
    except ValueError:
        raise HTTPException(400, f"{name} is a number") from None
    return default if math.isnan(number) else number


def _csv_rows(table: list[tuple[str, str, Series]]) -> Iterator[str]:
    """What `tp job export-metrics` writes of these lines, with hidden points, in blocks."""
    text = io.StringIO()
    for index, (run, name, series) in enumerate(table):
        write_csv(rows(run, {name: series}, hidden=True), text, headed=index == 0)
        yield text.getvalue().encode("utf-8", "replace").decode()
        text.seek(0)
        text.truncate()


def _json(value: object) -> Response:
    return Response(wire.encode(value), media_type="application/json")


def _error(status: int, told: str) -> Response:
    response = _json({"error": told})
    response.status_code = status
    return response


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))


async def _failed(request: Request, error: Exception) -> Response:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _error(500, words)


async def _stalled(request: Request, error: Exception) -> Response:
    return _error(503, "the storage of the runs does not answer")
