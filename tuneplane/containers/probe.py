"""What an image has of what a run needs: a question that is put to it in a container, and what its answer means.

`tp image check` asks beforehand, the node agent where a command failed at once; both start `PROBE` their own way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

OK, WARN, FAIL, UNCHECKED = "ok", "warn", "fail", "unchecked"

OLDEST_PYTHON = (3, 9)
"""What `tuneplane.report` runs on."""

_MARK = "tuneplane-probe "

# Python 3.0 and later read this. Nothing of the image is imported: that could take minutes, or the GPU.
_ASK_PYTHON = """\
import ctypes, json, os, re, sys
sys.path.pop(0)  # the working directory, which no script has first
from importlib.util import find_spec
try:
    from importlib import metadata
except ImportError:
    metadata = None

def folder(name):
    try:
        return list(find_spec(name).submodule_search_locations)[0]
    except Exception:
        return None

def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""

def distribution(name):
    try:
        found = metadata.distribution(name)
        return {"version": found.version, "summary": found.metadata["Summary"] or ""}
    except Exception:
        return None

def driver():
    try:
        version = ctypes.c_int()
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
        return None if failed else version.value
    except Exception:
        return None

found = {"version": list(sys.version_info[:3]), "executable": sys.executable, "driver": driver()}
found["home"] = "%d %s" % (sys.version_info[0], sys.prefix)
found["packages"] = {name: (distribution(name) or {}).get("version") for name in sys.argv[1:]}
ours = folder("tuneplane")
found["tuneplane"] = {
    "distribution": distribution("tuneplane"),
    "folder": ours,
    "report": bool(ours) and os.path.isfile(os.path.join(ours, "report", "__init__.py")),
    # What makes it this project's: others of the name have a module report as well, which posts points elsewhere.
    "lines": bool(ours) and os.path.isfile(os.path.join(ours, "report", "lines.py")),
}
torch = folder("torch")
if torch:
    text = read(os.path.join(torch, "version.py"))
    values = dict(re.findall(r"(?m)^(__version__|cuda)[^=]*= *['\\"]?([^'\\"\\n]*)", text))
    found["torch"] = {"version": values.get("__version__"), "cuda": values.get("cuda")}
print("tuneplane-probe interpreter=" + json.dumps(found))
"""

_ASK_SHELL = """\
say() { printf 'tuneplane-probe %s=%s\\n' "$1" "$2"; }
program=$1
shift
say path "$PATH"
say bash "$(command -v bash)"
say bash_version "$(bash -c 'printf %s "$BASH_VERSION"' 2>/dev/null)"
say python "$(command -v python3)"
say plain_python "$(command -v python)"
say plain_home "$(python -c 'import sys; print("%d %s" % (sys.version_info[0], sys.prefix))' 2>/dev/null)"
say cuda "${CUDA_VERSION-}"
command -v python3 >/dev/null || exit 0
exec python3 -c "$program" "$@"
"""


def probe_argv(packages: Sequence[str] = ()) -> list[str]:
    """The command to start in the container. packages: distributions whose versions are wanted."""
    return ["/bin/sh", "-c", _ASK_SHELL, "probe", _ASK_PYTHON, *packages]


@dataclass(frozen=True)
class Python:
    """The interpreter that `python3` leads to.

    home: its major version and prefix, which tell two interpreters apart. driver: of CUDA, 12040 for 12.4.
    """

    version: tuple[int, ...]
    executable: str
    home: str
    packages: Mapping[str, str | None] = field(default_factory=dict)
    tuneplane: Mapping[str, Any] = field(default_factory=dict)
    torch: Mapping[str, str | None] | None = None
    driver: int | None = None


@dataclass(frozen=True)
class Answer:
    """What was found on the image's `path`; empty texts where there is nothing."""

    path: str = ""
    bash: str = ""
    bash_version: str = ""
    python: str = ""
    plain_python: str = ""
    plain_home: str = ""
    cuda: str = ""
    interpreter: Python | None = None


_TEXTS = frozenset(field.name for field in dataclasses.fields(Answer)) - {"interpreter"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. level: OK, WARN, FAIL or UNCHECKED."""

    level: str
    what: str
    remedy: str = ""


def read_answer(output: str) -> Answer | None:
    """The answer in what the container printed; None where it never came to it."""
    values: dict[str, Any] = {}
    told = None
    for line in output.splitlines():
        mark, name, value = line[: len(_MARK)], *line[len(_MARK) :].partition("=")[::2]
        if mark == _MARK and name == "interpreter":
            with suppress(ValueError):  # cut short
                found = json.loads(value)
                told = Python(**{**found, "version": tuple(found["version"])})
        elif mark == _MARK and name in _TEXTS:
            values[name] = value
    if "path" not in values:
        return None
    return Answer(**values, interpreter=told)


def judge(answer: Answer, version: str, *, custom: bool = True, in_capsule: bool = False) -> list[Finding]:
    """What the answer means, but for a recipe's packages.

    version: of this TunePlane. custom: the script is the user's own and need not be Python. in_capsule: the
    recipe reports to the platform, so that `tuneplane.report` comes with the capsule (C24).
    """
    return [
        *_bash(answer),
        *_python(answer, custom),
        *(_tuneplane(answer.interpreter, version, in_capsule) if answer.interpreter else ()),
        *_cuda(answer),
    ]


def _bash(answer: Answer) -> Iterator[Finding]:
    if answer.bash:
        yield Finding(OK, f"bash {answer.bash_version.partition('(')[0]} at {answer.bash}")
    else:
        yield Finding(FAIL, f"no bash on the image's PATH ({answer.path})", "install it: it runs train.sh")


def _python(answer: Answer, custom: bool) -> Iterator[Finding]:
    found = answer.interpreter
    if found is None:
        level = WARN if custom else FAIL
        what = f"no python3 on the image's PATH ({answer.path})"
        if answer.python:
            what = f"python3 at {answer.python} does not run"
        yield Finding(level, what, "install Python 3.9 or newer, or put it on the image's PATH")
        return
    name = ".".join(map(str, found.version))
    if found.version[:2] < OLDEST_PYTHON:
        what = f"python3 is {name} at {answer.python}, and tuneplane.report needs 3.9 or newer"
        yield Finding(WARN if custom else FAIL, what, "put a newer one first on the image's PATH")
    else:
        yield Finding(OK, f"python3 is {name} at {answer.python}")
    if answer.plain_home and answer.plain_home != found.home:
        what = f"python ({answer.plain_python}) is another interpreter than python3 ({answer.python})"
        yield Finding(WARN, what, "name the one in train.sh that has your packages")


def _tuneplane(found: Python, version: str, in_capsule: bool) -> Iterator[Finding]:
    installed, folder = found.tuneplane.get("distribution"), found.tuneplane.get("folder")
    if installed and not found.tuneplane.get("lines"):
        summary = f" ({installed['summary']})" if installed["summary"] else ""
        told = "its tuneplane.report writes no points here"
        if not found.tuneplane.get("report"):
            told = "it has no tuneplane.report"
        yield Finding(
            WARN if in_capsule else FAIL,
            f"the image's tuneplane {installed['version']}{summary} is another project's of that name: {told}",
            "pip uninstall tuneplane, then install this project's wheel in the image",
        )
    elif folder and not found.tuneplane.get("report"):
        what = f"import tuneplane finds {folder}, which has no tuneplane.report"
        yield Finding(WARN if in_capsule else FAIL, what, "rename it, or take it off the image's PYTHONPATH")
    elif in_capsule or (folder and not installed):
        yield Finding(
            OK, "tuneplane.report comes with the capsule" if in_capsule else f"tuneplane at {folder}"
        )
    elif not installed:
        yield Finding(
            WARN,
            "no tuneplane in the image: import tuneplane fails there",
            "install this project's wheel in the image, unless the trainer reports elsewhere",
        )
    elif installed["version"] != version:
        what = f"the image has tuneplane {installed['version']}, this is {version}"
        yield Finding(WARN, what, "install the same version in the image")
    else:
        yield Finding(OK, f"tuneplane {version}")


def _cuda(answer: Answer) -> Iterator[Finding]:
    """Source: NVIDIA's CUDA Compatibility guide: a newer driver always; within a major version mostly."""
    found = answer.interpreter
    torch = found.torch if found else None
    if torch and torch["cuda"] in (None, "None"):
        yield Finding(OK, f"torch {torch['version']} is built without CUDA")
        return
    named = (torch["cuda"] if torch else None) or answer.cuda
    if not named:
        return
    source = f"torch {torch['version']}" if torch and torch["cuda"] else "the image"
    driver = found.driver if found else None
    if driver is None:
        what = f"{source} has CUDA {named}: not checked against a driver, no GPU here"
        yield Finding(UNCHECKED, what)
        return
    numbers = [int(part) for part in named.split(".")[:2] if part.isdigit()]
    major, minor = (*numbers, 0, 0)[:2]
    supported = f"{driver // 1000}.{driver % 1000 // 10}"
    if (major, minor) <= (driver // 1000, driver % 1000 // 10):
        yield Finding(OK, f"{source} has CUDA {named}, the driver here runs up to {supported}")
    elif major == driver // 1000:
        what = (
            f"{source} has CUDA {named}, the driver here {supported}: most of it works, new features do not"
        )
        yield Finding(WARN, what, "take an image of the driver's version where something is missing")
    else:
        what = f"{source} has CUDA {named}, and the driver here runs {supported} at most"
        yield Finding(FAIL, what, "take an image for an older CUDA, or have the driver updated")
