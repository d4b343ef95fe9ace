"""What the bridge sets up before the entry: hooks into frameworks, and the error file that torchrun reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_job import ReportJob
from test_bridge import BRIDGE, ROOT, Ended, run, write

from tuneplane.bridge.command import read_command

pytestmark = pytest.mark.timeout(60)

NAME = st.text("ab./ü '=-", min_size=1, max_size=4).filter(lambda name: not name.startswith("-"))
WORD = st.one_of(NAME, st.sampled_from(["", "-m", "--hook", "--hook=x", "--", "-", "-h", "--help", "\n"]))


@settings(max_examples=50)
@given(hooks=st.lists(NAME, max_size=2), entry=NAME, words=st.lists(WORD, max_size=4))
def test_whatever_stands_behind_the_entry_is_the_entrys_own(
    hooks: list[str], entry: str, words: list[str]
) -> None:
    options = [word for hook in hooks for word in ("--hook", hook)]
    script = read_command([*options, entry, *words])
    module = read_command([*options, "-m", entry, *words])
    assert (script.entry, script.is_module, script.arguments, script.hooks) == (entry, False, words, hooks)
    assert (module.entry, module.is_module, module.arguments, module.hooks) == (entry, True, words, hooks)


FRAMEWORK = """\
class Callbacks:
    def __init__(self, given):
        self.callbacks = given

class Trainer:
    def __init__(self, callbacks=()):
        "Made."
        self.callback_handler = Callbacks(list(callbacks))
    def add_callback(self, callback):
        one = callback() if isinstance(callback, type) else callback
        self.callback_handler.callbacks.append(one)
"""

TRAINS = """\
import sys
assert "transformers" not in sys.modules and "tuneplane.report.callback" not in sys.modules
from transformers import Trainer
from tuneplane.report import TunePlaneCallback

class Own(TunePlaneCallback):
    "A user's, with more to it."

class SFTTrainer(Trainer):
    def __init__(self, callbacks=()):
        super().__init__(callbacks)

def names(trainer):
    return [type(one).__name__ for one in trainer.callback_handler.callbacks]

print(names(Trainer()), names(Trainer()), names(SFTTrainer()), names(SFTTrainer([3])))
print(names(Trainer([TunePlaneCallback()])), names(SFTTrainer([Own()])))
later = Trainer()
later.add_callback(4)
later.add_callback(Own)
print(names(later), Trainer.__init__.__doc__)
print([finder for finder in sys.meta_path if getattr(finder, "name", "").startswith("transformers")])
"""


def framework(folder: Path, trainer: str = FRAMEWORK) -> None:
    (folder / "transformers").mkdir()
    (folder / "transformers/__init__.py").write_text(
        "import importlib\n"
        "def __getattr__(name):\n"
        "    if name.startswith('_'): raise AttributeError(name)\n"
        "    return getattr(importlib.import_module('transformers.trainer'), name)\n"
    )
    (folder / "transformers/trainer.py").write_text(trainer)


def hooked(folder: Path, script: str) -> Ended:
    write(folder, script)
    return run([*BRIDGE, "--hook", "transformers", "s.py"], folder)


def test_every_trainer_has_the_callback_once_and_the_users_own_comes_first(tmp_path: Path) -> None:
    framework(tmp_path)
    assert hooked(tmp_path, TRAINS) == Ended(
        0,
        "['TunePlaneCallback'] ['TunePlaneCallback'] ['TunePlaneCallback'] ['int', 'TunePlaneCallback']\n"
        "['TunePlaneCallback'] ['Own']\n"
        "['int', 'Own'] Made.\n"
        "[]\n",
        "",
    )


def test_a_framework_that_is_never_imported_is_not_imported_by_the_hook(tmp_path: Path) -> None:
    framework(tmp_path, "print('imported')")
    ended = hooked(
        tmp_path, "import importlib.util as u\nprint(u.find_spec('transformers.trainer').loader.path[-10:])"
    )
    assert ended == Ended(0, "trainer.py\n", "")


@pytest.mark.parametrize(
    ("trainer", "why"),
    [
        ("class Other: pass", "KeyError: 'Trainer'"),
        ("class Trainer: pass", "AttributeError: type object 'Trainer' has no attribute 'add_callback'"),
        (FRAMEWORK.replace(".append(one)", "[9]"), "IndexError: list index out of range"),
    ],
)
def test_a_hook_that_fails_says_so_in_a_line_and_training_goes_on(
    trainer: str, why: str, tmp_path: Path
) -> None:
    framework(tmp_path, trainer)
    ended = hooked(
        tmp_path, "import transformers.trainer as t\nt.Trainer() if hasattr(t, 'Trainer') else 0\nprint('on')"
    )
    assert (ended.code, ended.stdout) == (0, "on\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("tuneplane: hook transformers failed in process ")
    assert line.endswith(f" ({why}); training goes on without it")


@pytest.mark.parametrize(
    ("trainer", "script", "last"),
    [
        ("def f():\n    1 / 0\nf()\n", "", "ZeroDivisionError: division by zero"),
        (FRAMEWORK, "Trainer(nothing=1)\n", "got an unexpected keyword argument 'nothing'"),
    ],
)
def test_a_traceback_through_the_framework_shows_no_hook(
    trainer: str, script: str, last: str, tmp_path: Path
) -> None:
    framework(tmp_path, trainer)
    ended = hooked(tmp_path, f"from transformers import Trainer\n{script}")
    assert ended.code == 1
    assert ended.stderr.rstrip().endswith(last)
    assert "tuneplane" not in ended.stderr


def error_file(folder: Path, script: str, **more: str) -> tuple[Ended, Any]:
    write(folder, script)
    path = Path(more.setdefault("TORCHELASTIC_ERROR_FILE", str(folder / "error.json")))
    ended = run([*BRIDGE, "s.py"], folder, **more)
    return ended, json.loads(path.read_text()) if path.is_file() else None


def test_what_a_rank_raises_is_written_for_torchrun(tmp_path: Path) -> None:
    ended, told = error_file(tmp_path, "def f():\n    raise ValueError('ü', 3)\nf()\n")
    assert ended == run(["s.py"], tmp_path)
    assert told["message"]["message"] == "ValueError: ('ü', 3)"
    assert told["message"]["extraInfo"]["py_callstack"] == ended.stderr


@pytest.mark.parametrize(
    "script",
    [
        "raise SystemExit(3)",
        "raise SystemExit('why')",
        "raise KeyboardInterrupt",
        "import os, sys\nif os.fork():\n    os.wait()\nelse:\n    1 / 0",
    ],
)
def test_what_is_no_failure_of_the_rank_is_not_written(script: str, tmp_path: Path) -> None:
    ended, told = error_file(tmp_path, script)
    assert ended == run(["s.py"], tmp_path)
    assert told is None


def test_what_a_users_own_record_has_written_stands(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    ended, told = error_file(tmp_path, f"open({str(path)!r}, 'w').write('[1]')\n1 / 0\n")
    assert (ended.code, told) == (1, [1])


@pytest.mark.parametrize("place", ["gone/error.json", "s.py/error.json", ""])
def test_an_error_file_that_cannot_be_written_changes_nothing(place: str, tmp_path: Path) -> None:
    ended, told = error_file(
        tmp_path, "1 / 0\n", TORCHELASTIC_ERROR_FILE=str(tmp_path / place) if place else ""
    )
    assert ended == run(["s.py"], tmp_path)
    assert told is None


@pytest.mark.contract("C21")
def test_the_last_point_before_the_end_is_reported(tmp_path: Path) -> None:
    """The writer's thread lives on: the process leaves by itself, once reporting has flushed."""
    job = ReportJob(tmp_path / "run")
    write(
        tmp_path,
        "from tuneplane.report import log\nfor i in range(1000): log({'loss': i}, step=i)\nraise SystemExit(4)\n",
    )
    ended = run([*BRIDGE, "s.py"], tmp_path, **job.environment(PYTHONPATH=str(ROOT), PATH=os.environ["PATH"]))
    assert ended == Ended(4, "", "")
    assert list(job.metrics().series["loss"].steps) == list(range(1000))
