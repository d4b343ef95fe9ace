"""A script or module under the bridge does what it does under plain Python: every case runs both ways."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from interpreters import pythons

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[1]
BRIDGE = ["-m", "tuneplane.bridge"]


class Ended(NamedTuple):
    """How a process ended and what it said."""

    code: int
    stdout: str
    stderr: str


class Case(NamedTuple):
    """`words`: after `python` or `python -m tuneplane.bridge`. `script`: what s.py, m.py and the others hold."""

    words: list[str]
    script: str = ""
    options: tuple[str, ...] = ()  # of Python itself
    stdin: str = ""


def environment(**more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TUNEPLANE_", "PYTHON"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", **more}


def run(
    words: list[str],
    folder: Path,
    python: str = sys.executable,
    stdin: str = "",
    timeout_s: float = 60.0,
    **more: str,
) -> Ended:
    done = subprocess.run(
        [python, *words],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        env=environment(**more),
        timeout=timeout_s,
        check=False,
    )
    return Ended(done.returncode, *(re.sub(r" at 0x[0-9a-f]+", "", t) for t in (done.stdout, done.stderr)))


def write(folder: Path, script: str) -> None:
    """The same program as a script, a module, a package, a folder and a zip file."""
    for place in ("s.py", "m.py", "p/__init__.py", "p/__main__.py", "p/sub.py", "d/__main__.py", "a b/ü.py"):
        path = folder / place
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if place == "p/__init__.py" else script)
    (folder / "d/beside.py").write_text("NAME = __name__\n")
    (folder / "link.py").symlink_to("d/__main__.py")
    with zipfile.ZipFile(folder / "z.zip", "w") as archive:
        archive.writestr("__main__.py", script)


def same(case: Case, folder: Path, python: str = sys.executable) -> Ended:
    """Run it both ways; what it does by itself, which the bridge must not change."""
    write(folder, case.script)
    alone = run([*case.options, *case.words], folder, python, case.stdin)
    bridged = run([*case.options, *BRIDGE, *case.words], folder, python, case.stdin)
    assert bridged == alone
    return alone


SHOW = """\
import os, sys
told = {name: value for name, value in globals().items() if name != "__builtins__"}
print(sys.argv, sys.path[:2], told, type(__builtins__))
print(sys.modules["__main__"].__dict__ is globals(), __name__, sys.flags, sys.warnoptions, sys._xoptions)
print(sys.stdin.read(), sys.stdout.encoding, os.getcwd(), sys.excepthook is sys.__excepthook__)
"""

RAISES = (
    "def f(n):\n    return f(n - 1) if n else 1 / 0\ntry:\n    f(2)\nexcept ZeroDivisionError as e:\n    {}\n"
)

POOL = """\
import multiprocessing, os, sys, threading

class Thing:
    def __init__(self, x):
        self.x = x

def work(thing):
    return Thing(thing.x * 2), __name__, sys.argv, multiprocessing.current_process().name.partition("-")[0]

print("imported as", __name__, flush=True) if __name__ == "__main__" else None
if __name__ == "__main__":
    with multiprocessing.get_context({!r}).Pool(1) as pool:
        for thing, *more in pool.map(work, [Thing(1), Thing(2)], chunksize=1):
            print(type(thing) is Thing, thing.x, *more)
    child = multiprocessing.get_context({!r}).Process(target=sys.exit, args=(7,))
    child.start()
    child.join()
    print(child.exitcode)
"""

ORDER = """\
import atexit, sys, threading, time, weakref
atexit.register(print, "first registered")
weakref.finalize(sys.modules[__name__], print, "finalized")
atexit.register(sys.stderr.write, "second registered\\n")
def late():
    time.sleep(0.1)
    print("thread done", flush=True)
threading.Thread(target=late).start()
print("main done", flush=True)
{}
"""

HOOK = "import sys\ndef mine(kind, value, trace):\n    print('mine', kind, value, trace.tb_lineno)\n    {}\n"

CASES: dict[str, Case] = {
    "what a script sees": Case(["s.py", "a b", "", "-m", "--hook", "'\"$x", "ü\n"], SHOW, stdin="hello"),
    "what a relative script sees": Case(["d/.././s.py"], SHOW),
    "what a script by a link sees": Case(["link.py", "-"], SHOW),
    "what a module sees": Case(["-m", "m", "-m", "x"], SHOW, stdin="hello"),
    "what a package sees": Case(["-m", "p"], SHOW),
    "what a module in a package sees": Case(["-m", "p.sub"], SHOW),
    "what a folder sees": Case(["d", "x"], SHOW + "import beside\nprint(beside.NAME)\n"),
    "what a zip file sees": Case(["./z.zip", "x"], SHOW),
    "an exception in a script": Case(["s.py"], RAISES.format("raise")),
    "an exception in a module": Case(["-m", "m"], RAISES.format("raise")),
    "an exception in a zip file": Case(["z.zip"], RAISES.format("raise")),
    "chained causes": Case(["s.py"], RAISES.format("raise ValueError('ü') from e")),
    "a syntax error": Case(["s.py"], "x = 1\ndef f(:\n    pass\n"),
    "a syntax error in a module": Case(["-m", "m"], "x = 1\ndef f(:\n    pass\n"),
    "exit with a text": Case(["s.py"], "import sys\nsys.exit('that is ü')\n"),
    "Ctrl-C in a script": Case(["s.py"], "raise KeyboardInterrupt\n"),
    "Ctrl-C in a module": Case(["-m", "m"], "raise KeyboardInterrupt('now')\n"),
    "order of the end": Case(["s.py"], ORDER.format("")),
    "order of a failed end": Case(["-m", "m"], ORDER.format("raise ValueError('last')")),
    "a spawn pool": Case(["s.py", "x"], POOL.format("spawn", "spawn")),
    "a missing script": Case(["nope.py"]),
    "a missing module": Case(["-m", "nope.more"]),
}

CASES |= {
    "a name with a space": Case(["a b/ü.py"], SHOW),
    "exit 0": Case(["s.py"], "raise SystemExit\n"),
    "exit 3": Case(["-m", "m"], "import sys\nsys.exit(3)\n"),
    "exit 300": Case(["s.py"], "import sys\nsys.exit(300)\n"),
    "exit -1": Case(["s.py"], "import sys\nsys.exit(-1)\n"),
    "exit True": Case(["s.py"], "import sys\nsys.exit(True)\n"),
    "exit 2**70": Case(["s.py"], "import sys\nsys.exit(2**70)\n"),
    "exit with a tuple": Case(["s.py"], "import sys\nsys.exit((1, 'x'))\n"),
    "exit past everything": Case(["s.py"], "import os\nprint('x', flush=True)\nos._exit(9)\n"),
    "exit in a callback": Case(["s.py"], "import atexit, sys\natexit.register(sys.exit, 5)\n"),
    "a callback that raises": Case(["s.py"], "import atexit\natexit.register(int, 'x')\n"),
    "killed": Case(["s.py"], "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"),
    "an exception that is no Exception": Case(["s.py"], "class E(BaseException): pass\nraise E('x')\n"),
    "an exception without a text": Case(
        ["s.py"], "class E(Exception):\n    def __str__(self): 1 / 0\nraise E\n"
    ),
    "an unchained cause": Case(["s.py"], RAISES.format("raise ValueError from None")),
    "a context": Case(["s.py"], RAISES.format("[][1]")),
    "a failed import": Case(["s.py"], "import m2.x\n"),
    "an indentation error": Case(["s.py"], "if 1:\nx\n"),
    "an empty script": Case(["s.py"], ""),
    "a docstring and annotations": Case(["s.py"], "'doc'\nx: int = 1\nprint(__doc__, __annotations__)\n"),
    "no inherited future": Case(["s.py"], "def f(x: int): pass\nprint(f.__annotations__)\n"),
    "source of a frame": Case(["s.py"], "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))\n"),
    "pickling of main": Case(
        ["s.py"],
        "import pickle\nclass A: pass\ndef f(): return 1\nprint(pickle.loads(pickle.dumps((A, f))) == (A, f))\n",
    ),
    "a forkserver pool": Case(["s.py", "x"], POOL.format("forkserver", "forkserver")),
    "a fork pool": Case(["s.py", "x"], POOL.format("fork", "fork")),
    "a spawn pool of a module": Case(["-m", "p.sub", "x"], POOL.format("spawn", "spawn")),
    "a pool of processes": Case(
        ["s.py"],
        "from concurrent.futures import ProcessPoolExecutor\nimport multiprocessing as m\n"
        "def f(x): return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(1, mp_context=m.get_context('spawn')) as e: print(list(e.map(f, [1, 2])))\n",
    ),
    "a fork that runs to the end": Case(
        ["s.py"],
        "import os, sys, atexit\nif os.fork():\n    print(os.wait()[1], flush=True)\n"
        "else:\n    atexit.register(print, 'child ends', flush=True)\n    sys.exit(4)\n",
    ),
    "a warning": Case(["s.py"], "import warnings\nwarnings.warn('old', DeprecationWarning)\n"),
    "a warning of a function": Case(
        ["s.py"],
        "import warnings\ndef f(): warnings.warn('old', DeprecationWarning, stacklevel=2)\nf()\n",
    ),
    "a syntax warning": Case(["s.py"], "x = 1\nassert (x, 'y')\n"),
    "a warning as an error": Case(
        ["s.py"], "import warnings\nwarnings.warn('old')\n", ("-W", "error::UserWarning")
    ),
    "Python's own options": Case(["s.py"], SHOW, ("-X", "dev", "-O", "-u")),
    "isolated from its folder": Case(["s.py"], SHOW, ("-P",) if sys.version_info >= (3, 11) else ()),
    "runpy inside": Case(
        ["s.py"],
        "import runpy, sys\nif __name__ == '__main__':\n"
        "    print(sorted(runpy.run_path('s.py', run_name='again')) == sorted(runpy.run_module('m')))\n"
        "    print(sys.argv, sys.modules['__main__'].__name__)\n",
    ),
    "a user's excepthook": Case(["s.py"], HOOK.format("") + "sys.excepthook = mine\n1 / 0\n"),
    "a user's excepthook that exits": Case(
        ["s.py"], HOOK.format("sys.exit(8)") + "sys.excepthook = mine\n1 / 0\n"
    ),
    "a user's excepthook that raises": Case(
        ["s.py"], HOOK.format("[][1]") + "sys.excepthook = mine\n1 / 0\n"
    ),
    "a thread that raises": Case(
        ["s.py"],
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()\n",
    ),
    "what is deleted last": Case(
        ["s.py"],
        "class Gone:\n    def __del__(self): print('deleted')\ngone = Gone()\nx = open('left', 'w')\n",
    ),
    "stdout closed": Case(["s.py"], "import sys\nsys.stdout.close()\nsys.exit(6)\n"),
    "stdout closed below": Case(["s.py"], "import os\nprint('lost')\nos.close(1)\n"),
    "no stdout": Case(["s.py"], "import sys\nsys.stdout = sys.stderr = None\nsys.exit('lost')\n"),
    "a folder without a program": Case(["p/__pycache__"]),
    "an asked handler": Case(
        ["s.py"],
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(31))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('not reached')\n",
    ),
    "SIGTERM": Case(
        ["s.py"], "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nprint('not reached')\n"
    ),
}
if sys.version_info >= (3, 11):
    CASES["an exception group"] = Case(
        ["s.py"],
        "def f(x): raise x\nall = []\nfor e in (ValueError(1), TypeError('x')):\n    try: f(e)\n"
        "    except Exception as e: all.append(e)\nraise ExceptionGroup('both', all)\n",
    )


@pytest.mark.parametrize("name", CASES)
def test_a_program_does_what_it_does_without_the_bridge(name: str, tmp_path: Path) -> None:
    same(CASES[name], tmp_path)


ON_OTHERS = (
    "what a script sees",
    "what a package sees",
    "what a folder sees",
    "an exception in a script",
    "an exception in a module",
    "a syntax error",
    "Ctrl-C in a script",
    "order of a failed end",
    "a spawn pool",
    "a missing script",
)
OTHERS = {version: python for version, python in pythons((3, 9)).items() if python != sys.executable}


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_so_it_does_under_every_python_that_images_have(version: str, tmp_path: Path) -> None:
    for number, name in enumerate(ON_OTHERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        same(CASES[name], folder, OTHERS[version])


STAYING = """\
import os, sys, threading, time, atexit, weakref
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
class Stuck:
    def __del__(self):
        time.sleep(600)
stuck = Stuck()
atexit.register(print, "callback")
text = open("text", "w")
text.write("text ü")
raw = open("raw", "wb")
raw.write(b"raw")
print("said")
"""


@pytest.mark.parametrize(
    ("last", "code"),
    [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("sys.exit('x')", 1), ("raise KeyboardInterrupt", -2)],
)
def test_a_process_whose_threads_live_on_leaves_and_loses_nothing(
    last: str, code: int, tmp_path: Path
) -> None:
    """By itself it would hang for ten minutes while the interpreter is taken to pieces."""
    write(tmp_path, STAYING + last)
    ended = run([*BRIDGE, "s.py"], tmp_path)
    assert (ended.code, ended.stdout) == (code, "said\ncallback\n")
    assert (tmp_path / "text").read_text() == "text ü"
    assert (tmp_path / "raw").read_bytes() == b"raw"
    assert "tuneplane" not in ended.stderr


def test_a_callback_that_was_there_before_the_bridge_is_not_lost(tmp_path: Path) -> None:
    """A coverage tool that Python's own start brings in registers before anybody."""
    (tmp_path / "sitecustomize.py").write_text("import atexit\natexit.register(print, 'earliest')\n")
    write(
        tmp_path,
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n",
    )
    ended = run([*BRIDGE, "s.py"], tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert ended == Ended(0, "earliest\n", "")


def test_a_stack_dump_can_be_asked_for_and_the_program_goes_on(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import os, signal\ndef here():\n    os.kill(os.getpid(), signal.SIGQUIT)\nhere()\nprint('on')\n",
    )
    ended = run([*BRIDGE, "s.py"], tmp_path)
    assert (ended.code, ended.stdout) == (0, "on\n")
    assert 's.py", line 3 in here' in ended.stderr


def test_a_programs_own_handler_of_sigquit_is_the_one_that_is_called(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import os, signal\nsignal.signal(signal.SIGQUIT, lambda *_: print('mine'))\n"
        "os.kill(os.getpid(), signal.SIGQUIT)\n",
    )
    assert run([*BRIDGE, "s.py"], tmp_path) == Ended(0, "mine\n", "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "no script and no module given"),
        (["--hook"], "--hook needs a name"),
        (["-m"], "-m needs a name"),
        (["--hok", "x", "s.py"], "unknown option --hok"),
        (["--hook", "transformer", "s.py"], "unknown hook 'transformer'; there are: "),
        (["--hook=../x", "s.py"], "unknown hook '../x'; there are: "),
    ],
)
def test_what_the_bridge_does_not_know_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    write(tmp_path, "print('started')")
    ended = run([*BRIDGE, *words], tmp_path)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"tuneplane.bridge: {why}")


def test_it_says_how_it_is_called(tmp_path: Path) -> None:
    ended = run([*BRIDGE, "--help"], tmp_path)
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: python -m tuneplane.bridge [")
