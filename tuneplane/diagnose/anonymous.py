"""Taking people, places and secrets out of evidence, each name by the same other one everywhere.

What is known to be private is replaced wherever it stands; what looks private (addresses, tokens, paths that are
not the system's) too. Words of an exception's message stay: whoever sends a case on reads it first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.jsonform import map_texts

SYSTEM_FOLDERS = (
    *("/usr", "/opt", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/dev", "/proc", "/sys", "/tmp", "/var/tmp"),
    *("/run", "/root/.cache/pip", "/nix/store", "/cvmfs"),
)
"""Folders that say nothing of a person; what packages installed there keeps its names."""

PACKAGES = re.compile(r"/(?:site|dist)-packages(?:/|$)|/lib/python3")

NODE_FIELDS = ("BatchHost", "NodeList", "FailedNode", "ReqNodeList", "SchedNodeList", "ExcNodeList")

_KEPT = re.compile(
    r"runs|attempts|slurm|ingest|out|checkpoints?|checkpoint-\d+|logs?|hf_export|eval|report\.json|work|home|tmp|"
    r"data|images?|experiments|common|configs|train\.(?:sh|py)|node-\d+\.(?:log|json|beat)|\d+|\d+\.out|local\.out|"
    r"job\.(?:json|sbatch)|kernel\.pyz|capsule\.tar|secrets\.env|\.canary|\.tuneplane|kernel|tuneplane|"
    r"python[\d.]*|bin|lib|src|\.|\.\.|\*|tuneplane-\d+|step-?\d+|scratch|shared|storage|venv|\.venv|outputs?|results?|"
    r"[\w-]*\.sif|[\w-]*\.sqsh"
)
"""Parts of a path that say nothing of a person, and that rules may look for."""

_PATH = re.compile(r"(?<![\w./:@-])(?:~|/)(?:[\w.@+%-]+/)*[\w.@+%-]*[\w@+%-]/?(?![\w])")
_URL = re.compile(r"\b(https?|ftp|s3|gs|hf|docker)://[^\s'\"<>)\]]+")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_IPV4 = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0|255\.)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])")
_TOKEN = re.compile(
    r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|wandb_|AKIA|xox[bp]-)[\w-]{8,}|\b(?:[0-9a-f]{40,}|[A-Za-z0-9_-]{48,})\b"
)
_SECRET_VALUE = re.compile(
    r"(?i)\b((?:\w*(?:token|secret|passw(?:or)?d|api_?key|credential)\w*)\s*[=:]\s*)(?!TOKEN)[^\s,;'\"]+"
)
_FRAME = re.compile(r'^(\s*File ")([^"]+)(", line \d+(?:, in .*)?)$')
_PREFIX = re.compile(r"^(?:\[\w+ ?\d+\]:? ?)+")
"""Of a rank: torchrun's, torch's, or both."""


class Anonymiser:
    """Replaces names, the same ones by the same ones. users, hosts, …: what is known to be private."""

    def __init__(self, evidence: Evidence, users: Iterable[str] = (), secrets: Iterable[str] = ()) -> None:
        self.made: dict[tuple[str, str], str] = {}
        self.known: list[tuple[str, str]] = []
        for secret in secrets:
            self.known.append((secret, self._other("TOKEN", secret)))
        self._learn(evidence, users)
        self.known.sort(key=lambda pair: -len(pair[0]))
        self._words = re.compile(
            "|".join(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9[])" for word, _ in self.known)
            or r"(?!)"
        )
        self._by_word = dict(self.known)
        self._others = {"exp", *self._by_word.values()}

    def _learn(self, evidence: Evidence, users: Iterable[str]) -> None:
        self.known.append((evidence.run_id, "exp-20000101-000000-aaaa"))
        hosts = {*evidence.hosts, *(n.host for n in evidence.nodes), *(log.host for log in evidence.logs)}
        hosts |= {failure.host for log in evidence.logs for failure in log.failures}
        fields = evidence.slurm.fields
        hosts |= {fields.get(name, "") for name in NODE_FIELDS}
        hosts |= {step.nodes for step in evidence.slurm.steps} | {os.uname().nodename}
        hosts |= {said.split()[0] for said in evidence.slurm.nodes_now}
        for host in sorted(hosts - {"", "127.0.0.1", "localhost"}):
            self.known.append((host, self._other("node", host)))
            short = host.split(".")[0]
            if short != host:
                self.known.append((short, self._other("node", host)))
        for user in sorted(set(users) - {"", "root"}):
            self.known.append((user, self._other("user", user)))
        if len(evidence.experiment) > 2 and evidence.experiment not in _ORDINARY:
            self.known.append((evidence.experiment, "exp"))
        accounts = {fields.get("Account", ""), evidence.job.account if evidence.job else ""}
        for account in sorted(accounts):
            if len(account) > 2:
                self.known.append((account, self._other("account", account)))

    def _other(self, kind: str, text: str) -> str:
        key = (kind, text)
        if key not in self.made:
            number = sum(1 for other, _ in self.made if other == kind) + 1
            self.made[key] = f"{kind}{number}"
        return self.made[key]

    def text(self, text: str) -> str:
        """A text without what is private."""
        frame = _FRAME.match(text)
        if frame and not frame[2].startswith("<"):
            return f"{frame[1]}{self._path(frame[2])}{frame[3]}"
        text = self._words.sub(lambda m: self._by_word[m[0]], text)
        text = _URL.sub(lambda m: f"{m[1]}://{self._other('address', m[0])}.example.org", text)
        text = _EMAIL.sub(lambda m: f"{self._other('user', m[0])}@example.org", text)
        text = _PATH.sub(lambda m: self._path(m[0]), text)
        text = _SECRET_VALUE.sub(lambda m: m[1] + self._other("TOKEN", m[0]), text)
        text = _TOKEN.sub(lambda m: self._other("TOKEN", m[0]), text)
        text = _IPV4.sub(lambda m: f"192.0.2.{self._number(m[0])}", text)
        return _IPV6.sub(lambda m: f"2001:db8::{self._number(m[0])}", text)

    def _number(self, address: str) -> str:
        return self._other("address", address).removeprefix("address")

    def _path(self, path: str) -> str:
        path = self._words.sub(lambda m: self._by_word[m[0]], path)
        if path in ("/", "~", "~/") or (
            any(path == folder or path.startswith(f"{folder}/") for folder in SYSTEM_FOLDERS)
            and not path.startswith(("/tmp/", "/var/tmp/"))
        ):
            return path
        packages = PACKAGES.search(path)
        head, tail = (path[: packages.start()], path[packages.start() :]) if packages else (path, "")
        return "/".join(self._part(part) for part in head.split("/")) + tail

    def _part(self, part: str) -> str:
        if not part or part == "~" or _KEPT.fullmatch(part) or part in self._others or part[0] == "<":
            return part
        if part.startswith("exp-20000101"):
            return part
        stem, dot, ending = part.rpartition(".")
        if dot and stem and re.fullmatch(r"[a-z]{1,6}\d?", ending):
            return f"{self._other('file', stem)}.{ending}"
        return self._other("d", part)


_ORDINARY = frozenset(("train", "test", "first", "exp", "demo", "run", "main", "eval", "out", "work", "data"))


def anonymise(evidence: Evidence, users: Iterable[str] = (), secrets: Iterable[str] = ()) -> Evidence:
    """The evidence without names of people, hosts and folders, and without lines of the user's code."""
    maker = Anonymiser(evidence, users, secrets)
    return _without_code(map_texts(evidence, maker.text))


def _without_code(evidence: Evidence) -> Evidence:
    """Frames of tracebacks keep their place and lose the line of code, where it is not an installed package's."""
    from dataclasses import replace

    logs = tuple(
        replace(log, traces=tuple(replace(t, lines=_bare(t.lines)) for t in log.traces))
        for log in evidence.logs
    )
    nodes = []
    for node in evidence.nodes:
        failure = node.failure
        if failure is not None and failure.trace is not None:
            failure = replace(failure, trace=replace(failure.trace, lines=_bare(failure.trace.lines)))
        nodes.append(replace(node, failure=failure))
    return replace(
        evidence,
        nodes=tuple(nodes),
        logs=tuple(replace(log, tail=_bare(log.tail), head=_bare(log.head)) for log in logs),
    )


def _bare(lines: tuple[str, ...]) -> tuple[str, ...]:
    kept: list[str] = []
    for line in lines:
        before = _PREFIX.sub("", kept[-1]) if kept else ""
        frame = _FRAME.match(before)
        own = _PREFIX.sub("", line)
        hidden = frame and own.startswith("    ") and not PACKAGES.search(frame[2])
        kept.append(line[: len(line) - len(own.lstrip())] + "…" if hidden else line)
    return tuple(kept)
