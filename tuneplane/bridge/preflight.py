"""The check before training: do all ranks come, reach each other, and run alike fast? The bridge calls it in each.

Ranks meet at torchrun's own store, so that one which stops answering is known by its name: in a collective alone
every other rank would wait as it does. torch is imported here, the training's own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, Callable

MEET_S = 300.0
"""How long the last rank may come after the first: importing torch from a cold storage takes minutes."""

ANSWER_S = 60.0
"""How long connecting, the collective and the exchange may take together: NCCL connects thousands within it."""

GRACE_S = 5.0
"""How much longer rank 0 waits for the others' own word that they waited in vain."""

LAST_S = 2.0
"""How long ranks stay after a verdict, each node's first rank half as long."""

LOOK_S = 0.1

SLOWER = 4.0
"""So many times slower than the median is a fault; a busy node or a longer way makes less."""

LEAST_S = 0.02
"""And slower by at least so much: below it, clocks and schedulers are measured."""

ROUNDS = 3
"""The best of them counts: another program may have had the processor meanwhile."""

FILE = "preflight.json"
"""What was found, for the node agent: beside the error file of each rank."""

FAILED = 1


@dataclass(frozen=True)
class Place:
    """One rank in its job, by torchrun's variables.

    hosts: of the nodes, as far as the attempt's claim tells. placed: the node of each rank, once all have met:
    nodes may have different numbers of them.
    """

    rank: int
    ranks: int
    local: int
    ranks_here: int
    node: int
    nodes: int
    hosts: tuple[str, ...] = ()
    placed: tuple[int, ...] = ()

    def node_of(self, rank: int) -> int:
        return self.placed[rank] if self.placed else min(rank // self.ranks_here, self.nodes - 1)

    def host_of(self, node: int) -> str:
        return self.hosts[node] if node < len(self.hosts) else f"node {node}"

    def leaders(self) -> list[int]:
        """The first rank of each node, once all have met."""
        return [self.placed.index(node) for node in range(self.nodes)]


@dataclass(frozen=True)
class Verdict:
    """What the check found, as all ranks are told it. node: the one to blame, where it is one."""

    ok: bool
    told: str
    node: int | None = None


def run_preflight(meet_s: float = MEET_S, answer_s: float = ANSWER_S) -> None:
    """Check, and return where all is well. Otherwise the process ends with exit code 1: rank 0 has said why."""
    place = read_place(os.environ)
    if place is None or place.ranks < 2:
        return
    started = time.monotonic()
    torch: Any = importlib.import_module("torch")
    try:
        verdict = _Check(place, torch, meet_s, answer_s, started).run()
    except (
        Exception
    ) as error:  # the store is gone, or torch cannot do it here: whatever it is, it is no network
        verdict = Verdict(False, f"rank {place.rank} could not check: {_said(error)}", place.node)
    _tell(place, verdict)
    if not verdict.ok:
        # The others read the verdict first: this process may hold the store, and torchrun ends its neighbours.
        time.sleep(LAST_S if place.local else LAST_S / 2)
        os._exit(FAILED)  # threads that wait for a rank that is gone would hold up an ordinary end


class _Check:
    """One rank's part of it."""

    def __init__(self, place: Place, torch: Any, meet_s: float, answer_s: float, started: float) -> None:
        self.place, self.torch, self.dist = place, torch, torch.distributed
        self.meet_s, self.answer_s, self.started = meet_s, answer_s, started
        self.store = self._store()
        self.network = self._store(joins=True)
        """A connection of its own, for what may hang: one that waits holds up whoever else would use it."""
        self.stage = "meeting"

    def run(self) -> Verdict:
        """Meet, measure, and hear rank 0's verdict."""
        place = self.place
        self.store.set(f"here/{place.rank}", str(place.node))
        if place.rank == 0:
            missing = self._wait_for("here", self.meet_s - (time.monotonic() - self.started))
            found = absent(place, missing, "did not come", self.meet_s)
            if found.ok:
                nodes = [int(self.store.get(f"here/{rank}")) for rank in range(place.ranks)]
                self.store.set("placed", json.dumps(nodes))
            self._set("met", found)
        met = self._hear("met", self.meet_s + GRACE_S)
        if not met.ok:
            return met
        place = self.place = replace(place, placed=tuple(json.loads(self.store.get("placed"))))
        met_s = time.monotonic() - self.started
        self.store.set(f"done/{place.rank}", json.dumps(self._measured()))
        if place.rank == 0:
            missing = self._wait_for("done", self.answer_s + GRACE_S)
            found = absent(place, missing, "stopped answering", self.answer_s)
            if found.ok:
                reports = [json.loads(self.store.get(f"done/{r}")) for r in range(place.ranks)]
                found = judge(place, reports, met_s)
            self._set("verdict", found)
        verdict = self._hear("verdict", self.answer_s + 2 * GRACE_S)
        if verdict.ok:
            self.dist.destroy_process_group()
        return verdict

    def _store(self, joins: bool = False) -> Any:
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = self.dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            self.place.ranks,
            not shared and self.place.rank == 0 and not joins,
            timedelta(seconds=self.meet_s),
            multi_tenant=not shared,
        )
        return self.dist.PrefixStore("tuneplane/preflight", store)

    def _wait_for(self, what: str, within_s: float) -> list[int]:
        """The ranks that have not set their key of a stage within so long."""
        keys = {rank: f"{what}/{rank}" for rank in range(self.place.ranks)}
        deadline = time.monotonic() + max(LOOK_S, within_s)
        while time.monotonic() < deadline:
            if self.store.check(list(keys.values())):
                return []
            time.sleep(LOOK_S)
        return [rank for rank, key in keys.items() if not self.store.check([key])]

    def _set(self, key: str, verdict: Verdict) -> None:
        self.store.set(key, json.dumps({"ok": verdict.ok, "told": verdict.told, "node": verdict.node}))

    def _hear(self, key: str, within_s: float) -> Verdict:
        """Rank 0's word; where none comes, that is the verdict."""
        try:
            self.store.wait([key], timedelta(seconds=within_s))
            value = json.loads(self.store.get(key))
            return Verdict(bool(value["ok"]), str(value["told"]), value["node"])
        except Exception:  # DistStoreError from torch 2.2 on, RuntimeError before: none of them says more
            return absent(self.place, [0], "stopped answering", within_s)

    def _measured(self) -> dict[str, Any]:
        """What this rank found, or its error; within the time, whatever hangs."""
        found: dict[str, Any] = {}

        def measure() -> None:
            try:
                found.update(self._measure())
            except Exception as error:
                found["error"] = _said(error)

        thread = threading.Thread(target=measure, daemon=True)
        thread.start()
        thread.join(self.answer_s)
        if thread.is_alive():
            return {"error": "", "stage": self.stage}
        return {**found, "stage": self.stage}

    def _measure(self) -> dict[str, Any]:
        torch, dist, place = self.torch, self.dist, self.place
        gpu = torch.cuda.is_available() and torch.cuda.device_count() > place.local
        before = torch.cuda.current_device() if gpu else None
        if gpu:
            torch.cuda.set_device(place.local)
        device = f"cuda:{place.local}" if gpu else "cpu"
        self.stage = "connecting"
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=self.network,
            rank=place.rank,
            world_size=place.ranks,
            # Longer than the check: NCCL's own watchdog would end the process before the verdict.
            timeout=timedelta(seconds=4 * self.answer_s),
        )
        self.stage = "all-reduce"
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones)
        if int(ones.item()) != place.ranks:
            raise RuntimeError(f"an all-reduce of {place.ranks} ranks counted {int(ones.item())}")
        large = torch.ones(1 << 20, device=device)
        reduce_s = self._best(lambda: dist.all_reduce(large), large)
        self.stage = "computing"
        matrix = torch.ones(4096 if gpu else 512, 4096 if gpu else 512, device=device)
        compute_s = self._best(lambda: [torch.mm(matrix, matrix) for _ in range(10)], matrix)
        self.stage = "exchange"
        links = self._exchange(torch.ones((16 << 20) if gpu else (1 << 20), device=device))
        if before is not None:
            torch.cuda.set_device(before)
        return {"compute_s": compute_s, "reduce_s": reduce_s, "links": links}

    def _best(self, act: Callable[[], object], tensor: Any) -> float:
        """Seconds of the quickest of a few rounds."""
        times = []
        for _ in range(ROUNDS):
            begun = time.monotonic()
            act()
            if tensor.is_cuda:
                self.torch.cuda.synchronize()
            times.append(time.monotonic() - begun)
        return min(times)

    def _exchange(self, tensor: Any) -> dict[str, float]:
        """Seconds for a tensor there and back, for each pair of neighbouring nodes that this rank began."""
        found: dict[str, float] = {}
        leaders = self.place.leaders()
        for first, second in pairs(self.place.nodes):
            one, other = leaders[first], leaders[second]
            if self.place.rank not in (one, other):
                continue
            self.stage = f"exchange between {self.place.host_of(first)} and {self.place.host_of(second)}"
            begins = self.place.rank == one

            def both_ways(begins: bool = begins, peer: int = other if begins else one) -> None:
                for sends in (begins, not begins):
                    self.dist.send(tensor, peer) if sends else self.dist.recv(tensor, peer)

            both_ways()  # connects
            took_s = self._best(both_ways, tensor)
            if begins:
                found[f"{first}-{second}"] = took_s
        return found


def read_place(environ: Mapping[str, str]) -> Place | None:
    """This rank's place; None where torchrun did not start it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    try:
        rank, ranks, local, ranks_here, node, nodes = (int(environ[name]) for name in names)
    except (KeyError, ValueError):
        return None
    hosts: tuple[str, ...] = ()
    marker = environ.get("TUNEPLANE_STOP_FILE", "")
    with suppress(OSError, ValueError, AttributeError):
        start = json.loads((Path(marker).parent / "start.json").read_text(encoding="utf-8"))
        hosts = tuple(str(host) for host in start.get("hosts") or [])
    return Place(rank, ranks, local, ranks_here, node, nodes, hosts)


def pairs(nodes: int) -> list[tuple[int, int]]:
    """Neighbouring nodes in a ring, so ordered that no node is in two exchanges at once for long. Pure."""
    ring = [(node, node + 1) for node in range(nodes - 1)]
    ring += [(nodes - 1, 0)] if nodes > 2 else []
    return ring[::2] + ring[1::2]


def absent(place: Place, ranks: list[int], did: str, within_s: float) -> Verdict:
    """The verdict on ranks of which there is no word; well where there are none. Pure."""
    if not ranks:
        return Verdict(True, "")
    nodes = sorted({place.node_of(rank) for rank in ranks})
    told = []
    for node in nodes:
        here = [rank for rank in ranks if place.node_of(rank) == node]
        whole = len(here) > 1 and all(r in ranks for r in range(place.ranks) if place.node_of(r) == node)
        which = "all its ranks" if whole else f"rank{'s' if len(here) > 1 else ''} {_numbers(here)}"
        told.append(f"{which} on {place.host_of(node)} (node {node})")
    return Verdict(
        False, f"{'; '.join(told)} {did} within {within_s:.0f} s", nodes[0] if len(nodes) == 1 else None
    )


def judge(place: Place, reports: list[dict[str, Any]], met_s: float) -> Verdict:
    """The verdict on what all ranks reported. Pure."""
    failed = {rank: report for rank, report in enumerate(reports) if "error" in report}
    if failed:
        return _broken(place, failed)
    compute = [float(report["compute_s"]) for report in reports]
    slow = slow_ones(compute)
    if slow:
        nodes = sorted({place.node_of(rank) for rank in slow})
        worst = max(compute[rank] for rank in slow) / median(compute)
        where = ", ".join(f"{place.host_of(node)} (node {node})" for node in nodes)
        told = f"rank{'s' if len(slow) > 1 else ''} {_numbers(slow)} on {where} computes {worst:.0f} times slower"
        return Verdict(False, f"{told} than the median of all", nodes[0] if len(nodes) == 1 else None)
    links = {tuple(map(int, k.split("-"))): float(v) for r in reports for k, v in r["links"].items()}
    blamed = slow_node(links, place.nodes)
    if blamed is not None:
        node, times = blamed
        told = (
            f"the links of {place.host_of(node)} (node {node}) are {times:.0f} times slower than the median"
        )
        return Verdict(False, told, node)
    slowest = max(links, key=lambda pair: links[pair], default=None)
    told = (
        f"{place.ranks} ranks on {place.nodes} node{'s' if place.nodes > 1 else ''} met after {met_s:.1f} s"
    )
    told += f", all-reduce of 4 MiB {1000 * max(float(r['reduce_s']) for r in reports):.1f} ms"
    if slowest is not None:
        ends = " and ".join(place.host_of(node) for node in slowest)
        told += f", slowest exchange {1000 * links[slowest]:.1f} ms between {ends}"
    return Verdict(True, told)


def slow_ones(times: list[float]) -> list[int]:
    """Which of these are several times slower than their median. Pure."""
    limit = _limit(times)
    return [place for place, took_s in enumerate(times) if took_s > limit]


def slow_node(links: Mapping[tuple[int, ...], float], nodes: int) -> tuple[int, float] | None:
    """The node all of whose links are slow, and how many times slower; of two nodes none can be told. Pure."""
    if nodes < 3 or not links:
        return None
    best = [min(took_s for pair, took_s in links.items() if node in pair) for node in range(nodes)]
    slow = slow_ones(best)
    if not slow:
        return None
    node = max(slow, key=lambda n: best[n])
    return node, best[node] / median(best)


def _limit(times: list[float]) -> float:
    middle = median(times) if len(times) > 2 else min(times)
    return max(SLOWER * middle, middle + LEAST_S)


def _broken(place: Place, failed: Mapping[int, Mapping[str, Any]]) -> Verdict:
    """Ranks that found an error, or waited in vain although all answer: they do not reach each other."""
    own = {rank: report for rank, report in failed.items() if report["error"]} or failed
    rank = min(own)
    report = own[rank]
    nodes = {place.node_of(r) for r in own}
    what = f": {report['error']}" if report["error"] else " did not end in time"
    who = f"rank{'s' if len(own) > 1 else ''} {_numbers(sorted(own))}"
    where = f"{who} of {place.ranks} on {', '.join(place.host_of(n) for n in sorted(nodes))}"
    return Verdict(
        False,
        f"{where} failed while {report['stage']}{what}",
        next(iter(nodes)) if len(nodes) == 1 and place.nodes > 1 else None,
    )


def _numbers(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _said(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _tell(place: Place, verdict: Verdict) -> None:
    """One line by rank 0, or by each node's first where rank 0 is gone; and a note for the agent."""
    gone = not verdict.ok and verdict.node == 0 and place.local == 0
    if place.rank == 0 or gone:
        with suppress(OSError, ValueError):
            print(f"tuneplane: preflight: {verdict.told}", file=sys.stderr, flush=True)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file:
        note = {"ok": verdict.ok, "told": verdict.told, "node": verdict.node}
        with suppress(OSError):
            (Path(error_file).parent / FILE).write_text(json.dumps(note), encoding="utf-8")
