"""Makes the runs of `tests/cases` whose ranks torchrun starts, on this machine as two nodes, and saves them.

    python tests/tools/cases_ranks.py NAME…

As record_cases.py, with real agents and torchrun in place of `tp submit`: some faults need a program that
misbehaves inside the check before training. Without names every run of the table is made.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT)]

from rank_runs import JOINED, claim_for, rank_run, start_nodes  # noqa: E402
from run_fixture import runs_below  # noqa: E402
from test_bridge_preflight import CHECKS, TRAINS  # noqa: E402

from tuneplane.diagnose.case import save_case  # noqa: E402
from tuneplane.diagnose.gather import gather  # noqa: E402
from tuneplane.diagnose.verdict import diagnose  # noqa: E402

HANGS_TOGETHER = JOINED + "if rank == 1: dist.barrier()\nelse: dist.recv(torch.ones(1), 1)\n"

OVERCOME = JOINED + (
    "import faulthandler\nfaulthandler.dump_traceback(all_threads=True)\n"
    "if rank == 1: raise ValueError('after a dump of its own')\ndist.all_reduce(torch.ones(1))\n"
)


@dataclass(frozen=True)
class RankCase:
    """One run. program: of every rank; empty: `train` is a train.sh. expect: as in expect.json."""

    name: str
    how: str
    program: str
    expect: Mapping[str, Any]
    train: str = ""
    nodes: int = 1
    ranks: int = 2
    ends_alone: bool = True  # else its second node is told to end, as Slurm does
    spec: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    RankCase(
        "torchrun-exit",
        "rank 1 leaves with exit code 3 and no word; torchrun calls its victim the root cause",
        JOINED + "if rank == 1: sys.exit(3)\ndist.all_reduce(torch.ones(1))\n",
        {"cause": "rank-exit", "node": 0, "rank": 1, "not": ["first-failing-rank"]},
    ),
    RankCase(
        "torchrun-hang-together",
        "--hang-limit: both ranks are in torch.distributed, each in another call",
        HANGS_TOGETHER,
        {"cause": "hang-limit", "certainty": "likely", "says": "rank 0 in recv, rank 1 in barrier"},
        spec={"hang_limit_s": 4.0},
    ),
    RankCase(
        "hang-without-stacks",
        "--hang-limit: a train.sh of one's own, which says nothing on SIGQUIT",
        "",
        {"cause": "hang-limit", "certainty": "likely", "says": "no process said where it was"},
        train="echo training; sleep 600",
        spec={"hang_limit_s": 2.0},
    ),
    RankCase(
        "hang-near",
        "near miss: a program that dumps its stacks by itself and then raises",
        OVERCOME,
        {"cause": "first-failing-rank", "rank": 1, "not": ["hang-limit"]},
        spec={"hang_limit_s": 60.0},
    ),
    RankCase(
        "preflight-stopped",
        "--preflight: a rank is stopped while its node is measured",
        CHECKS + "if last: preflight._Check._measure = stops\npreflight.run_preflight(answer_s=4)\n",
        {"cause": "preflight-failed", "node": 1, "says": "stopped answering", "not": ["command-failed"]},
        nodes=2,
        ranks=1,
        ends_alone=False,
    ),
    RankCase(
        "preflight-well",
        "near miss: --preflight found nothing, and a rank raises afterwards",
        TRAINS + "if dist.get_rank() == 1: raise ValueError('no such class: 11')\ndist.all_reduce(x)\n",
        {"cause": "first-failing-rank", "rank": 1, "not": ["preflight-failed"]},
        spec={"preflight": True},
    ),
)


def record(case: RankCase, where: Path) -> None:
    """Make one run and save its case."""
    with runs_below(where) as make:
        if case.program:
            run = rank_run(make, case.program, nodes=case.nodes, ranks=case.ranks, **case.spec)
        else:
            run = make(case.train, **case.spec)
            claim_for(run, case.nodes)
        agents = start_nodes(run)
        codes = [run.finish(agents[0], 120).returncode]
        for agent in agents[1:]:
            if not case.ends_alone:
                agent.terminate()
            codes.append(run.finish(agent, 120).returncode)
        run.end(code=max(codes))
        evidence = gather(run.folder)
        folder = ROOT / "tests" / "cases" / case.name
        (folder / "evidence.json").unlink(missing_ok=True)
        save_case(folder, evidence, (), (), {"causes": []})
        (folder / "evidence.json").chmod(0o644)
        text = json.dumps({"how": case.how, **case.expect}, indent=1, ensure_ascii=False) + "\n"
        (folder / "expect.json").write_text(text)
        for finding in diagnose(evidence):
            print(f"{case.name}: {finding.cause} ({finding.certainty}): {finding.sentence}", flush=True)


def main() -> None:
    names = sys.argv[1:]
    for case in CASES:
        if not names or case.name in names:
            with tempfile.TemporaryDirectory(prefix="cases-") as where:
                record(case, Path(where))


if __name__ == "__main__":
    os.umask(0o022)
    main()
