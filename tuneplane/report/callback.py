"""`TunePlaneCallback`: a trainer of transformers or TRL reports its logs, and saves and ends when it is asked to.

Known to the trainer by its methods alone (C19). Users import it from `tuneplane.report`.
"""

from __future__ import annotations

import functools

from tuneplane import report
from tuneplane.report.together import Together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Callable

TRAIN, VALIDATION = "train", "validation"

_EVALUATION = "eval_"  # transformers' default of metric_key_prefix
_RUNTIME = "_runtime"  # every evaluation's log has `<its prefix>_runtime`, whatever the prefix
_OF_BOTH = ("epoch", "num_input_tokens_seen")  # transformers adds these to every log
_MOST_SETTINGS = 200
_LONGEST_TEXT = 200


class _Process:
    """What this process has told already: a later training of the same attempt took up nothing."""

    trainings = 0


def _never_raising(event: Callable[..., None]) -> Callable[..., None]:
    """An event that fails costs its own report alone, never the training (C16)."""

    @functools.wraps(event)
    def called(*arguments: Any, **more: Any) -> None:
        try:
            event(*arguments, **more)
        except Exception:
            report._stumbled()

    return called


class TunePlaneCallback:
    """`callbacks=[TunePlaneCallback()]`, or `trainer.add_callback(TunePlaneCallback)`.

    monitor_hardware: as of `init`. stop_when_asked: after the step at which `should_stop()` is seen, save a
        checkpoint and end training; of several ranks, all after the same step.
    """

    def __init__(self, *, monitor_hardware: bool = False, stop_when_asked: bool = True) -> None:
        self._monitor_hardware = monitor_hardware
        self._stop_when_asked = stop_when_asked
        self._together: Together | None = None
        self._evaluated: tuple[Any, frozenset[str]] = (None, frozenset())

    def __getattr__(self, name: str) -> Any:
        """Events that mean nothing to us: trainers call every one that they know, and know new ones each year."""
        if name.startswith("on_"):
            return _pass_over
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @_never_raising
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Open the session, with the training arguments and the model's settings as hparams."""
        first = _Process.trainings == 0
        _Process.trainings += 1
        if self._stop_when_asked:
            self._together = Together(f"tuneplane/training-{_Process.trainings}")
        if _reports(state):
            resumed = state.global_step if first else 0
            report.init(monitor_hardware=self._monitor_hardware, resume_step=resumed + 1 if resumed else None)
            report.init(hparams=settings(args, model))  # last: a stranger's settings may raise

    @_never_raising
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Report what the trainer logs, an evaluation's under `validation/`."""
        if not logs or not _reports(state):
            return
        train, validation = sorted_out(logs)
        if train:
            report.log(train, step=state.global_step, prefix=TRAIN)
        if validation:
            self._evaluated = (state.global_step, frozenset(validation))
            report.log(validation, step=state.global_step, prefix=VALIDATION)

    @_never_raising
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Report what an evaluation found and the trainer has not logged itself."""
        if not metrics or not _reports(state):
            return
        step, logged = self._evaluated
        logged = logged if step == state.global_step else frozenset()
        found = {name: value for name, value in sorted_out(metrics)[1].items() if name not in logged}
        if found:
            report.log(found, step=state.global_step, prefix=VALIDATION)

    @_never_raising
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Where the run has been asked to save and end, have the trainer do so."""
        together, self._together = self._together, None  # lost where it fails: once told is enough
        if together is not None and together.is_time_to_stop(state.global_step):
            control.should_save = True
            control.should_training_stop = True
        self._together = together

    @_never_raising
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have everything written."""
        if _reports(state):
            report.finish()


def sorted_out(logs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a trainer's log is training's and what an evaluation's, the latter without `eval_`. Pure.

    Evaluations under another prefix than `eval` keep it: `test_loss` → `validation/test_loss`.
    """
    others = tuple(
        f"{name[: -len(_RUNTIME)]}_"
        for name in logs
        if name.endswith(_RUNTIME) and name != f"{TRAIN}{_RUNTIME}"
    )
    train: dict[str, Any] = {}
    validation: dict[str, Any] = {}
    for key, value in logs.items():
        if key.startswith(_EVALUATION):
            name = key[len(_EVALUATION) :]
            # One with a namespace of its own would keep that, and be taken for training's.
            validation[f"{VALIDATION}/{name}" if "/" in name else name] = value
        elif others and key.startswith(others):
            validation[key] = value
        else:
            train[key] = value
    if validation:
        for name in _OF_BOTH:
            train.pop(name, None)
    return train, validation


def settings(args: Any, model: Any) -> dict[str, Any]:
    """The training arguments as they are, and under `model` the plain values of the model's config."""
    found = dict(args.to_dict() if hasattr(args, "to_dict") else vars(args))
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})
    plain = {
        str(name): value
        for name, value in values.items()
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT)
    }
    if plain:
        found["model"] = dict(list(plain.items())[:_MOST_SETTINGS])
    return found


def _reports(state: Any) -> bool:
    return bool(getattr(state, "is_world_process_zero", True))


def _pass_over(*_: Any, **__: Any) -> None:
    """Answers an event without changing the trainer's control."""
