"""Which Pythons an image has, and which of them has a module: asked of the image itself, for a few seconds.

`gather.py` calls it where a run failed for want of a module.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from tuneplane.containers import Container, launch
from tuneplane.diagnose.evidence import Interpreter
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.files import write_atomic

ANSWER_S = 25.0
MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,80}")

SCRIPT = r"""
default=$(command -v python3 || command -v python)
seen=
IFS=:
for folder in $PATH /usr/local/bin /usr/bin /opt/conda/bin /opt/*/bin /venv/bin /root/*/bin /workspace/*/bin; do
  folder=$(cd -P "$folder" 2>/dev/null && pwd) || continue
  for python in "$folder"/python3 "$folder"/python "$folder"/python3.[0-9]*; do
    case $python in *-config) continue;; esac
    [ -x "$python" ] || continue
    real=$(readlink -f "$python")
    prefix=${python%/bin/*}
    case ":$seen:" in *":$prefix|$real:"*) continue;; esac
    seen="$seen:$prefix|$real"
    timeout 5 "$python" -c '
import sys, importlib.util as u
try: there = u.find_spec(sys.argv[1]) is not None
except Exception: there = False
words = [sys.argv[2], "%d.%d.%d" % sys.version_info[:3], str(sys.argv[2] == sys.argv[3]), str(there)]
print("\t".join(words))
' "$1" "$python" "$default" 2>/dev/null
  done
done
exit 0
"""


def read_interpreters(
    module: str, runtime: str, binary: str, options: tuple[str, ...], image: str, path: str
) -> tuple[Interpreter, ...] | str:
    """Every Python that is found in the image, or why it cannot be asked. path: PATH where there is no image."""
    if not MODULE.fullmatch(module):
        return f"{module!r} is no name of a module"
    with tempfile.TemporaryDirectory(prefix="tuneplane-why-") as folder:
        places = {name: f"{folder}/{name}" for name in ("tmp", "home", "runtime")}
        for place in places.values():
            Path(place).mkdir()
        container = Container(
            runtime="enroot"
            if runtime == "pyxis"
            else runtime,  # pyxis starts images in steps of Slurm alone
            binary=binary,
            image=image,
            options=options,
            workdir="/",
            tmp_dir=places["tmp"],
            home_dir=places["home"],
            state_dir=places["runtime"],
        )
        environ = {"PATH": path} if runtime == "none" else {}
        try:
            started = launch(container, ["sh", "-c", SCRIPT, "sh", module], environ, [], {"PATH": path})
            for name, text in started.files.items():
                write_atomic(Path(name), text, 0o600)
            done = subprocess.run(
                started.argv,
                env=started.environ,
                cwd=started.cwd,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=ANSWER_S,
                check=False,
            )
        except TunePlaneError as error:
            return error.faults[0].what
        except subprocess.TimeoutExpired:
            return f"the image did not answer within {ANSWER_S:.0f} s"
        except OSError as error:
            return f"{runtime}: {error.strerror}"
    found = parse_interpreters(done.stdout)
    if not found and done.returncode != 0:
        return f"the image cannot be started here: {' '.join(done.stderr.split())[-200:]}"
    return found


def parse_interpreters(said: str) -> tuple[Interpreter, ...]:
    """Rows of path, version, default, has it."""
    rows = [line.split("\t") for line in said.splitlines()]
    return tuple(Interpreter(r[0], r[1], r[2] == "True", r[3] == "True") for r in rows if len(r) == 4)
