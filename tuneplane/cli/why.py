"""`tp job why RUN`: one sentence of cause, then where, by what evidence, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuneplane.cli.completion import complete_runs
from tuneplane.cli.show import show_json, show_notices, size
from tuneplane.kernel.errors import Exit

if TYPE_CHECKING:
    from tuneplane.diagnose.evidence import Evidence
    from tuneplane.diagnose.finding import Finding


@click.command("why")
@click.argument("run", shell_complete=complete_runs)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--save-case",
    "case_folder",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write what was found, without names, into DIR: to send on. Read it first.",
)
def why_command(run: str, as_json: bool, case_folder: Path | None) -> int:
    """Say in one sentence why RUN is as it is, and what to do."""
    from tuneplane.diagnose.gather import gather
    from tuneplane.diagnose.verdict import diagnose
    from tuneplane.runs.index import current_user, find_run
    from tuneplane.runs.logs import known_secrets

    folder = find_run(run)
    masks = known_secrets(folder)
    evidence = _masked(gather(folder), masks)
    findings = diagnose(evidence)
    if case_folder is not None:
        from tuneplane.diagnose.case import save_case

        told = {"causes": [f.cause for f in findings]}
        path = save_case(case_folder, evidence, [current_user(), folder.path.parents[1].name], masks, told)
        show_notices([f"{path} holds no names that are known here; read it before you send it"])
    if as_json:
        show_json(_json(evidence, findings))
    else:
        _show(evidence, findings)
    return Exit.DONE


def _masked(evidence: Evidence, masks: tuple[str, ...]) -> Evidence:
    """Without the values of secrets that are known (C11)."""
    from tuneplane.diagnose.jsonform import map_texts
    from tuneplane.runs.logs import MASK

    def change(text: str) -> str:
        for mask in masks:
            text = text.replace(mask, MASK)
        return text

    return map_texts(evidence, change) if masks else evidence


def _json(evidence: Evidence, findings: list[Finding]) -> dict[str, object]:
    first, *others = [finding.as_dict() for finding in findings]
    return {
        "run_id": evidence.run_id,
        "state": evidence.state,
        "finding": first,
        "others": others,
        "unread": list(evidence.unread),
        "unsearched_bytes": _unsearched(evidence),
    }


def _unsearched(evidence: Evidence) -> int:
    return sum(log.size_bytes - log.searched_bytes for log in evidence.logs)


def _show(evidence: Evidence, findings: list[Finding]) -> None:
    for place, finding in enumerate(findings):
        if place == 0:
            click.echo(f"{evidence.run_id}: {finding.sentence}")
            _show_details(finding)
        else:
            click.echo(f"\nalso: {finding.sentence}")
            _show_details(finding)
    notices = [f"not looked at: {told}" for told in evidence.unread]
    if _unsearched(evidence):
        left, whole = _unsearched(evidence), sum(log.size_bytes for log in evidence.logs)
        notices.append(
            f"the logs hold {size(whole)}, of which {size(left)} in their middle were not searched"
        )
    show_notices(notices)


def _show_details(finding: Finding) -> None:
    where = []
    if finding.node is not None:
        where.append(f"node {finding.node}" + (f" ({finding.host})" if finding.host else ""))
    if finding.rank is not None:
        where.append(f"rank {finding.rank}")
    rows = [("where", ", ".join(where)), ("certainty", finding.certainty)]
    rows += [("evidence" if i == 0 else "", line) for i, line in enumerate(finding.evidence)]
    rows += [("remedy" if i == 0 else "", line) for i, line in enumerate(finding.remedy.splitlines())]
    for name, text in rows:
        if text.strip():
            click.echo(f"  {name:<10} {_printable(text)}".rstrip())


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
