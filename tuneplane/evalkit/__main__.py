"""`python3 -m tuneplane.evalkit`: evaluate a model, write the report, log its values as points."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tuneplane.evalkit.harness import Evaluation, HarnessError, evaluate
from tuneplane.evalkit.model import find_export
from tuneplane.evalkit.report import Row, report_path
from tuneplane.kernel import env
from tuneplane.kernel.errors import Exit, Fault, TunePlaneError, UsageError


def main(arguments: list[str] | None = None) -> int:
    """Evaluate; the exit code is lm-eval's own where it failed."""
    given = parser().parse_args(arguments)
    try:
        asked = evaluation(given)
        rows = evaluate(asked)
    except HarnessError as error:
        print(f"tuneplane: {error}", file=sys.stderr)
        return error.code
    except TunePlaneError as error:
        print(f"tuneplane: {error}", file=sys.stderr)
        return int(error.exit_code)
    log_rows(rows)
    print(f"tuneplane: report  {report_path(asked.out)}")
    return int(Exit.DONE)


def evaluation(given: argparse.Namespace) -> Evaluation:
    """What the command line asked. Raises UsageError, OperationError."""
    tasks = tuple(task for text in given.tasks for task in map(str.strip, text.split(",")) if task)
    if not tasks:
        raise UsageError(
            Fault("no task to evaluate", "--tasks", "name at least one: tasks=hellaswag,arc_easy")
        )
    out = Path(given.out).absolute()
    model = given.model or str(find_export(Path(given.export_of).absolute() if given.export_of else out))
    if Path(model).is_dir():
        model = str(Path(model).absolute())
    return Evaluation(
        model=model,
        out=out,
        tasks=tasks,
        num_fewshot=given.num_fewshot,
        limit=given.limit,
        batch_size=given.batch_size,
        apply_chat_template=given.apply_chat_template,
        system_instruction=given.system_instruction,
        include_path=str(Path(given.include_path).absolute()) if given.include_path else "",
        dtype=given.dtype,
        seed=given.seed,
        run_id=os.environ.get(env.NRL_RUN_ID, ""),
        subject=given.subject,
    )


def parser() -> argparse.ArgumentParser:
    """The command line, as the adapter writes it."""
    parser = argparse.ArgumentParser(prog="python3 -m tuneplane.evalkit", allow_abbrev=False)
    parser.add_argument("--model", default="", help="a folder, or a hub's name in the cache")
    parser.add_argument("--export-of", default="", help="an output folder whose hf_export is the model")
    parser.add_argument("--out", required=True, help="the output folder that takes eval/report.json")
    parser.add_argument("--tasks", action="append", default=[], help="names, comma-separated; repeatable")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--batch-size", type=batch_size, default=1)
    parser.add_argument("--apply-chat-template", action="store_true")
    parser.add_argument("--system-instruction", default="")
    parser.add_argument("--include-path", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--subject", default="", help="run id of the run that trained the model")
    return parser


def batch_size(text: str) -> int | str:
    """A number, or lm-eval's `auto`."""
    return int(text) if text.isdecimal() else text


def log_rows(rows: list[Row]) -> None:
    """The values as points, `eval/<task>/<metric>`: nothing outside a job, and it never raises (C16, C17)."""
    from tuneplane.report import finish, log

    values = {f"{row.task}/{row.name.replace(', ', '/')}": row.value for row in rows if row.value is not None}
    log({f"eval/{name}": value for name, value in values.items()}, step=0)
    finish()


if __name__ == "__main__":
    sys.exit(main())
