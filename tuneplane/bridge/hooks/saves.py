"""What a trainer of transformers leaves is whole: its final model as `hf_export`, each checkpoint's state.

Installed by the bridge for the trl adapter, whose `output_dir` is `<out>/checkpoints`.
"""

from __future__ import annotations

import functools
import os

from tuneplane.bridge.imports import after_import
from tuneplane.bridge.preparation import say_hook_failed
from tuneplane.kernel import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

PARTIAL = ".partial"
PICKLED = "training_args.bin"
"""No part of a model, and loading it runs code."""


def install() -> None:
    """From now on, once transformers has been imported, its trainers save so."""
    after_import("transformers.trainer", _patch)


def _patch(module: ModuleType) -> None:
    try:
        trainer: Any = vars(module)["Trainer"]
        state: Any = vars(module)["TrainerState"]
        trainer.save_model = _final_apart(trainer.save_model)
        state.save_to_json = _in_one_piece(state.save_to_json)
        if hasattr(trainer, "_run_epoch"):  # private, and so perhaps not there
            trainer._run_epoch = _no_step_too_many(trainer._run_epoch)
    except Exception as error:  # a transformers of another shape: it saves as it always did
        say_hook_failed("saves", error)


def _in_one_piece(save: Any) -> Any:
    """A checkpoint counts as complete once its state is there: no kill and no full disk leaves half of it."""

    @functools.wraps(save)
    def save_to_json(self: Any, json_path: str) -> None:
        save(self, f"{json_path}{PARTIAL}")
        os.replace(f"{json_path}{PARTIAL}", json_path)

    return save_to_json


def _no_step_too_many(run_epoch: Any) -> Any:
    """A run that was cut after its last step only saves: transformers 5 counts steps after it did one more."""

    @functools.wraps(run_epoch)
    def _run_epoch(self: Any, *arguments: Any, **more: Any) -> Any:
        if 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
            return None
        return run_epoch(self, *arguments, **more)

    return _run_epoch


def _final_apart(save: Any) -> Any:
    """What a script saves into the trainer's own output_dir is the model of the end: beside the checkpoints."""

    @functools.wraps(save)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        out = os.environ.get(env.OUT_DIR, "")
        target = os.path.abspath(output_dir or self.args.output_dir)
        if _internal_call or not out or target != os.path.join(os.path.abspath(out), "checkpoints"):
            save(self, output_dir, _internal_call)
            return
        step, steps = self.state.global_step, self.state.max_steps
        if step < steps:  # it was asked to stop, and the script cannot tell
            _say(
                self,
                f"stopped after step {step} of {steps}: the checkpoint is there, no final model is written",
            )
            return
        place = _write(save, self, out, step)
        _say(self, f"the model of step {step} is in {place}")

    return save_model


def _write(save: Any, trainer: Any, out: str, step: int) -> str:
    """Save into a folder that gets its name once it is whole; every rank takes part, one writes."""
    from pathlib import Path

    from tuneplane.hf_export.folder import ADAPTER, EXPORT, FINAL, Origin, written_whole

    place = Path(out) / (ADAPTER if hasattr(trainer.model, "peft_config") else EXPORT)
    if not trainer.args.should_save:
        save(trainer, str(place), True)
        return str(place)
    attempt = os.environ.get(env.ATTEMPT, "")
    origin = Origin(FINAL, step, os.environ.get(env.NRL_RUN_ID, ""), int(attempt) if attempt.isdigit() else 0)
    with written_whole(place, origin) as new:
        save(trainer, str(new), True)
        (new / PICKLED).unlink(missing_ok=True)
    return str(place)


def _say(trainer: Any, what: str) -> None:
    if trainer.is_world_process_zero():
        print(what, flush=True)
