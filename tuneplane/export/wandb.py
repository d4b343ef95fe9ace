"""Sending a run's points by wandb's own client, what is new at each call. Called by `tp job sync wandb`.

The client is imported when it is used. Its credentials are its own: they are neither read nor shown here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneplane.collect.printable import escaped
from tuneplane.collect.series import Series
from tuneplane.export.sent import Batch, Note
from tuneplane.kernel.errors import Fault, OperationError, UsageError

STEP, ATTEMPT, TIME = "tuneplane/step", "tuneplane/attempt", "tuneplane/time"
"""Keys of every row: our own step (wandb drops a row whose own step comes late), attempt, unix time."""

RENAMED = "metrics/"
"""Before names that would mean something else to wandb: those with `_` first, and our own keys."""

_LONGEST_ID = 100
"""wandb takes 128."""

_QUIET = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
}
"""No measurement of this machine goes along: the run was elsewhere. Those that this client knows are set."""


@dataclass(frozen=True)
class Target:
    """Where points go. project, entity: empty for wandb's own default. offline: a folder on this disk instead."""

    project: str = ""
    entity: str = ""
    offline: Path | None = None

    def key(self, run_id: str, environ: Mapping[str, str]) -> str:
        """A file name for the note of one run and this target."""
        place = str(self.offline) if self.offline else environ.get("WANDB_BASE_URL", "")
        told = (
            self.project or environ.get("WANDB_PROJECT", ""),
            self.entity or environ.get("WANDB_ENTITY", ""),
            place,
        )
        digest = hashlib.sha256("\0".join((run_id, *told)).encode("utf-8", "surrogateescape")).hexdigest()
        return f"{run_id[:60]}-{digest[:16]}"


def offline_folder(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    """Where wandb is to write to instead of sending, by flag or by its own `WANDB_MODE`; None where it sends.

    Raises UsageError where the environment turns wandb off.
    """
    mode = environ.get("WANDB_MODE", "")
    if mode == "disabled" or environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        raise UsageError(Fault("wandb is turned off", "WANDB_MODE", "unset it, or say offline"))
    if given is None and mode in ("offline", "dryrun"):
        given = Path(environ.get("WANDB_DIR") or ".")
    return None if given is None else Path.cwd() / given


def wandb_id(run_id: str) -> str:
    """The run's id at wandb, the same at every call."""
    clean = re.sub(r"[^A-Za-z0-9_.-]", "-", run_id)
    if len(clean) <= _LONGEST_ID:
        return clean
    return f"{clean[: _LONGEST_ID - 17]}-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}"


def metric_name(name: str) -> str:
    """A metric's name at wandb."""
    clean = escaped(name)
    return RENAMED + clean if clean.startswith(("_", "tuneplane/")) else clean


def import_wandb() -> Any:
    """The client. Raises OperationError where it is not installed."""
    import sys

    try:
        import wandb
    except ImportError as error:
        missing = error.name in (None, "wandb")
        what = (
            "wandb is not installed for the Python that runs tp"
            if missing
            else f"wandb does not start: {error}"
        )
        raise OperationError(Fault(what, sys.executable, "pip install wandb")) from None
    if not hasattr(wandb, "init"):  # a folder of that name is a package without a word of code
        raise OperationError(
            Fault("what is imported as wandb is not wandb's client", str(wandb.__path__), "pip install wandb")
        )
    return wandb


class Session:
    """One run at wandb, open for rows. What the note has on its way is sent at once.

    group: wandb's word for runs that belong together. config: hyper-parameters. sent: points by now.
    Raises OperationError in wandb's own words.
    """

    def __init__(
        self,
        target: Target,
        run_id: str,
        group: str,
        note: Note,
        config: Mapping[str, Any],
        series: Mapping[str, Series],
    ) -> None:
        self._target, self._run_id, self._group = target, run_id, group
        self._note, self._config = note, config
        self._scratch: Path | None = None
        self.sent = 0
        self._drop_half_written()
        self._run = self._open()
        self._arrived = int(getattr(self._run, "starting_step", 0) or 0)
        try:
            if self._arrived > note.next_row:
                raise OperationError(
                    Fault(
                        f"wandb has {self._arrived} rows of {wandb_id(run_id)}, and no note here tells of them",
                        str(note.path),
                        "sync from where it was synced before, or give another --project",
                    )
                )
            for batch in note.pending:
                self._send(batch, series)
        except OperationError:
            self.abandon()
            raise

    def send(self, series: Mapping[str, Series]) -> None:
        """Send what is new in these lines."""
        batch = self._note.plan(series)
        if batch is not None:
            self._send(batch, series)

    def close(self) -> None:
        """Wait until all has arrived, and note it."""
        self._close(0)
        self._note.confirm()

    def abandon(self) -> None:
        """Leave without waiting for more than wandb's own end; the next call sends again what is not noted."""
        with suppress(OperationError):
            self._close(1)

    def _open(self) -> Any:
        wandb = import_wandb()
        place = self._target.offline
        if place is None:
            place = self._scratch = Path(tempfile.mkdtemp(prefix="tuneplane-wandb-"))
        else:
            place.mkdir(parents=True, exist_ok=True)
        known = getattr(wandb.Settings, "model_fields", {})
        try:
            run = wandb.init(
                project=self._target.project or None,
                entity=self._target.entity or None,
                id=wandb_id(self._run_id),
                name=self._run_id,
                group=self._group or None,
                resume="allow",
                mode="online" if self._target.offline is None else "offline",
                dir=str(place),
                config={str(name): value for name, value in self._config.items()},
                settings=wandb.Settings(**{k: v for k, v in _QUIET.items() if k in known}),
            )
            run.define_metric(STEP, hidden=True)
            run.define_metric("*", step_metric=STEP)
            run.define_metric("system/*", step_metric=TIME)
        except BaseException as error:
            self._drop_scratch()
            if isinstance(error, Exception):
                raise _told(error) from None
            raise
        if self._target.offline is not None:
            self._note.folder = str(run.settings.sync_dir)
            self._note.write()
        return run

    def _drop_scratch(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _drop_half_written(self) -> None:
        """A folder that a killed call was writing: all of it goes out again, into a new one."""
        folder, offline = self._note.folder, self._target.offline
        if not folder or offline is None:
            return
        path = Path(folder)
        ours = path.name.startswith("offline-run-") and path.name.endswith(f"-{wandb_id(self._run_id)}")
        if ours and offline in path.parents and not list(path.glob("*.synced")):
            shutil.rmtree(path, ignore_errors=True)

    def _send(self, batch: Batch, series: Mapping[str, Series]) -> None:
        values = {name: _by_place(line) for name, line in series.items()}
        for number, row in enumerate(batch.rows(), batch.first_row):
            if number < self._arrived:
                continue
            found = {
                name: values[name][row.attempt, row.step]
                for name in row.names
                if (row.attempt, row.step) in values.get(name, {})
            }
            if not found:  # its file was removed meanwhile; the number stays its own
                continue
            time_s = max(time_s for _, time_s in found.values())
            data: dict[str, Any] = {metric_name(name): value for name, (value, _) in found.items()}
            data |= {STEP: _whole(row.step), ATTEMPT: row.attempt, TIME: time_s, "_timestamp": time_s}
            try:
                self._run.log(data, step=number)
            except Exception as error:
                raise _told(error) from None
            self.sent += len(found)

    def _close(self, code: int) -> None:
        try:
            self._run.finish(exit_code=code)
        except Exception as error:
            raise _told(error) from None
        finally:
            self._drop_scratch()


def _by_place(line: Series) -> dict[tuple[int, float], tuple[float, float]]:
    """Value and time by attempt and step. A point may have been planned before it was hidden."""
    found = {
        (attempt, step): (value, time_s)
        for attempt, step, value, time_s in zip(
            line.attempts, line.steps, line.values, line.times_s, strict=True
        )
    }
    for attempt, points in line.hidden.items():
        for step, value, time_s in zip(points.steps, points.values, points.times_s, strict=True):
            found[attempt, step] = (value, time_s)
    return found


def _whole(step: float) -> float:
    return int(step) if step == int(step) else step


def _told(error: Exception) -> OperationError:
    """What wandb said, without the key that it was said with."""
    words = escaped(" ".join(str(error).split()))[:1000] or type(error).__name__
    key = os.environ.get("WANDB_API_KEY", "")
    if key:
        words = words.replace(key, "•••")
    return OperationError(Fault(f"wandb: {words}", "tp job sync wandb", _advice(words)))


_NO_PLACE = re.compile(r"\b(40[34]|not found|permission|forbidden|entity|project)\b", re.IGNORECASE)
"""What wandb says of a project or entity that there is not, or that this user may not write to."""


def _advice(words: str) -> str:
    if "API key" in words or "login" in words:
        return "wandb login"
    if _NO_PLACE.search(words):
        flags = "--project and --entity, or WANDB_PROJECT and WANDB_ENTITY"
        return f"is there such a project, and may you write to it? {flags} say which"
    return "what arrived is noted: say it again"
