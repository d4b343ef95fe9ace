"""Makes the runs of `tests/cases` for real, one after another, and saves what `tp job why` finds of each.

    python tests/tools/record_cases.py local --torch PYTHON NAME…
    python tests/tools/record_cases.py slurm --testbed /var/lib/tuneplane-testbed NAME…

A case is kept from the first version that could record it: rules are judged by runs that were there before them.
Without names every run of that place is made. `--torch`: an interpreter that has torch, for runs of several ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CASES = ROOT / "tests" / "cases"
URL = "https://tracker.example.org/lab"
WAIT_S = 120.0

sys.path[:0] = [str(HERE.parent), str(ROOT)]


@dataclass(frozen=True)
class CaseRun:
    """One run to record.

    train: what train.sh does. cause: of the finding that is to be told first. near: causes that must not be found.
    says: a part of the sentence.
    until: what to wait for before it is looked at: an end, or a line of the log. act: done in between.
    """

    name: str
    cause: str
    train: str
    how: str
    files: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ("--profile", "local")
    near: tuple[str, ...] = ()
    until: str = ""
    certainty: str = ""
    says: str = ""
    rank: int | None = None
    node: int | None = None
    act: Callable[[Place, str], None] | None = None
    why: tuple[str, ...] = ()
    config: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Place], None] | None = None
    after: Callable[[Place], None] | None = None
    starts: bool = True


class Place:
    """A lab on this machine, with a home and a configuration of its own."""

    def __init__(self, torch: str) -> None:
        self.torch = torch
        self.base = Path(tempfile.mkdtemp(prefix="cases-"))
        self.home, self.programs = self.base / "home", self.base / "bin"
        for folder in (self.home, self.programs, self.base / "site"):
            folder.mkdir()
        (self.home / ".gitconfig").write_text("[user]\nname = You\nemail = you@example.org\n")
        tp = self.programs / "tp"
        tp.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tuneplane.cli.main "$@"\n')
        tp.chmod(0o755)
        if torch and (Path(torch).parent / "py-spy").exists():
            (self.programs / "py-spy").symlink_to(Path(torch).parent / "py-spy")
        self.sh(["tp", "init", str(self.base / "lab")], cwd=self.base)

    @property
    def lab(self) -> Path:
        return self.base / "lab"

    def sh(self, argv: list[str], cwd: Path | None = None, code: int | None = 0) -> str:
        environ = {
            "PATH": f"{self.programs}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "TUNEPLANE_CONFIG_DIR": str(self.base / "site"),
            "LANG": "C.UTF-8",
        }
        done = subprocess.run(
            argv,
            cwd=cwd or self.lab,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        if code is not None and done.returncode != code:
            raise SystemExit(f"{shlex.join(argv)}: exit {done.returncode}\n{done.stderr}{done.stdout}")
        return done.stdout + done.stderr

    def configure(self, files: dict[str, str]) -> None:
        """The site's configuration, for one run."""
        shutil.rmtree(self.base / "site")
        for name, text in {"x": "", **files}.items():
            path = self.base / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text:
                filled = text.replace("@TORCHBIN@", str(Path(self.torch).parent))
                path.write_text(filled.replace("@BASE@", str(self.base)))

    def write(self, name: str, files: dict[str, str]) -> None:
        self.sh(["tp", "new", name, "--method", "custom/custom"])
        for file, text in files.items():
            path = self.lab / "experiments" / name / file
            if file.startswith("../"):
                path = self.lab / file.lstrip("./")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("@TORCH@", self.torch).replace("@BASE@", str(self.base)))
        self.sh(["git", "add", "-A"])
        self.sh(["git", "commit", "-q", "-m", name])

    def folder(self, run: str) -> Path:
        return Path(json.loads(self.sh(["tp", "job", "status", run, "--json"]))["folder"])

    def state(self, run: str) -> str:
        return str(json.loads(self.sh(["tp", "job", "status", run, "--json"]))["state"])

    def close(self) -> None:
        for run in json.loads(self.sh(["tp", "job", "ls", "--json"])):
            self.sh(["tp", "job", "stop", run["run_id"]], code=None)
        shutil.rmtree(self.base, ignore_errors=True)


FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "LOST")


def record(place: Place, case: CaseRun) -> None:
    """Make one run and save its case."""
    place.configure(case.config)
    if case.prepare:
        case.prepare(place)
    name = f"c-{case.name}"
    train = {"train.sh": f"#!/bin/bash\nset -euo pipefail\n{case.train}\n"} if case.train else {}
    place.write(name, {**train, **case.files})
    words = ["tp", "submit" if case.starts else "render", name, *case.flags, "--observability-url", URL]
    said = place.sh([*words, "--json"], code=None)
    try:
        run = str(json.loads(said)["run_id"])
    except ValueError:
        run = name  # Slurm refused it
        print(said)
    deadline = time.monotonic() + WAIT_S
    while case.starts:
        logs = place.sh(["tp", "job", "logs", run], code=None)
        state = place.state(run)
        if (case.until and (case.until in logs or state == case.until)) or (
            not case.until and state in (*FINAL, "NOT_SUBMITTED")
        ):
            break
        if time.monotonic() > deadline or (case.until and state in FINAL):
            raise SystemExit(f"{case.name}: it is {state}\n{logs}")
        time.sleep(0.3)
    if case.act:
        case.act(place, run)
    save(place, case, run)
    if case.after:
        case.after(place)
    place.sh(["tp", "job", "stop", run], code=None)


def save(place: Place, case: CaseRun, run: str) -> None:
    """Save the case of a run, with what is expected of it."""
    scratch = place.base / "case"
    shutil.rmtree(scratch, ignore_errors=True)
    print(place.sh(["tp", "job", "why", run, *case.why, "--save-case", str(scratch)]))
    keep(case, (scratch / "evidence.json").read_text())


def keep(case: CaseRun, evidence: str) -> None:
    """Put a case among the others."""
    folder = CASES / case.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evidence.json").write_text(evidence)
    expect(case)
    print(f"== {case.name} -> {folder}", flush=True)


def expect(case: CaseRun) -> None:
    """Write what is expected of a case."""
    expected: dict[str, object] = {"how": case.how, "cause": case.cause}
    expected |= {"not": list(case.near)} if case.near else {}
    expected |= {"certainty": case.certainty} if case.certainty else {}
    expected |= {"rank": case.rank} if case.rank is not None else {}
    expected |= {"node": case.node} if case.node is not None else {}
    expected |= {"says": case.says} if case.says else {}
    text = json.dumps(expected, indent=1, ensure_ascii=False) + "\n"
    (CASES / case.name / "expect.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", choices=("local", "slurm", "expect"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--torch", default="", help="an interpreter that has torch")
    parser.add_argument("--testbed", type=Path, default=Path("/var/lib/tuneplane-testbed"))
    given = parser.parse_intermixed_args()
    if given.where == "expect":  # the tables were changed, the runs were not
        import cases_local
        import cases_slurm

        for case in [*cases_local.RUNS, *(made.run for made in cases_slurm.CASES)]:
            expect(case)
        return
    if given.where == "slurm":
        import cases_slurm

        cases_slurm.record_all(given.testbed, given.names, given.torch)
        return
    from cases_local import RUNS

    place = Place(given.torch)
    try:
        for case in RUNS:
            needs_torch = "@TORCH@" in case.train
            if (not given.names or case.name in given.names) and (given.torch or not needs_torch):
                record(place, case)
    finally:
        place.close()


if __name__ == "__main__":
    os.umask(0o022)
    main()
