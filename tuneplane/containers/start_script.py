"""The script that is the first process in every container: the command's environment, folder and end.

Runtimes take the image away when their first process ends, though what it started still saves; enroot and pyxis
cannot be told every value of an environment. So the image's own `sh` reads this file, and no argv has a value.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from tuneplane.containers.container import Container
from tuneplane.kernel.errors import Fault

_NAME = "start.sh"

RUN, ENTER = "run", "enter"
"""Its first argument: the command of the attempt, or another one beside it."""

_FROM_IMAGE = ("PATH", "HOME", "TMPDIR")
"""Not taken from `env`: PATH is the image's (C10), the other two are folders of the container."""

BEFORE_THE_IMAGES = ("PYTHONPATH",)
"""What `env` has of these goes before what the image has, which stays: its own packages may be there (C24)."""

_KEPT_BY_SHELLS = frozenset(
    (
        *("_", "UID", "EUID", "PPID", "GROUPS", "SHELLOPTS", "BASHOPTS", "LINENO", "OPTIND", "FUNCNAME"),
        *("DIRSTACK", "HISTCMD", "PIPESTATUS", "RANDOM", "SRANDOM", "SECONDS"),
        *("EPOCHSECONDS", "EPOCHREALTIME", "IFS", "BASH_VERSION", "PWD", "OLDPWD", "SHLVL"),
    )
)
"""Names that dash, bash and busybox keep or change themselves, so that they would not arrive as given."""

_HEAD = """\
# The start of one command in its container: sh FILE run COMMAND..., or beside it: sh FILE enter COMMAND...
[ -z "${BASH_VERSION-}" ] || set -o posix
tp_mode=$1
shift
"""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH where the image has none, as Apptainer has it."""

_PATH = f"""\
case $(export -p) in
  (*'export PATH='*) ;;
  (*) export PATH={DEFAULT_PATH} ;;
esac
"""

_FORGET = """\
# What the way to here left in the environment, none of it the image's.
for tp_name in $(
  export -p | while IFS= read -r tp_line; do
    tp_line=${tp_line#export }
    tp_line=${tp_line%%=*}
    case $tp_line in
      (*[!A-Za-z0-9_]*) ;;
      (PATTERNS) printf '%s\\n' "$tp_line" ;;
    esac
  done
); do
  unset "$tp_name"
done
"""

_ENTER = """\
[ "$tp_mode" = run ] || exec "$@"
"""

# In the foreground: as a job in the background the command would have SIGINT ignored for good.
_RUN = """\
# Told to end, this process outlives the command until the rest of its session has ended: else whatever still
# saves would lose the image. The agent bounds that.
tp_told=
trap tp_told=1 TERM
trap : INT HUP QUIT USR1 USR2
"$@"
tp_code=$?
[ -n "$tp_told" ] || exit "$tp_code"
unset IFS
tp_read() {
  { IFS= read -r tp_line <"/proc/$1/stat"; } 2>/dev/null || return 1
  tp_name=${tp_line#*(}
  tp_name=${tp_name%%)*}
  set -- ${tp_line##*) }
  tp_state=$1
  tp_parent=$2
  tp_session=$4
}
tp_left() {
  for tp_file in /proc/[0-9]*; do
    tp_pid=${tp_file#/proc/}
    case $tp_above in (*" $tp_pid "*) continue ;; esac
    tp_read "$tp_pid" || continue
    case $tp_state$tp_name in ([ZTX]*|?squashfuse*|?fuse*) continue ;; esac
    [ "$tp_session" != "$tp_own" ] || return 0
  done
  return 1
}
tp_read $$ || exit "$tp_code"
tp_own=$tp_session
tp_above=" $$ "
while [ "$tp_parent" -gt 0 ]; do
  tp_above="$tp_above$tp_parent "
  tp_read "$tp_parent" || break
done
while tp_left; do
  sleep 0.1 2>/dev/null || sleep 1 || break
done
exit "$tp_code"
"""


def script_path(container: Container) -> str:
    """Where the script lies, on the host and in the container."""
    return f"{container.state_dir}/{_NAME}"


def start_script(
    container: Container, env: Mapping[str, str], forget: tuple[str, ...] = (), log: str = ""
) -> str:
    """The text of the script. `PATH` of `env` is left out, `HOME` and `TMPDIR` are the container's own, and
    `BEFORE_THE_IMAGES` are put before what the image has.

    forget: shell patterns of names that are taken out of the environment first. log: file to which all that
    the command prints is appended; empty: its output goes where this script's goes.
    """
    values = {name: value for name, value in env.items() if name not in _FROM_IMAGE}
    if container.home_dir:
        values["HOME"] = container.home_dir
    if container.tmp_dir:
        values["TMPDIR"] = "/tmp"
    parts = [_HEAD]
    if log:
        parts.append(f'[ "$tp_mode" = enter ] || exec >>{shlex.quote(log)} 2>&1\n')
    if forget:
        parts.append(_FORGET.replace("PATTERNS", "|".join(forget)))
    parts += [_PATH, f"cd -- {shlex.quote(container.workdir)} || exit 125\n", "unset OLDPWD\n"]
    parts += [_export(name, value) for name, value in values.items()]
    return "".join([*parts, _ENTER, _RUN])


def _export(name: str, value: str) -> str:
    behind = f'"${{{name}:+:${name}}}"' if name in BEFORE_THE_IMAGES else ""
    return f"export {name}={shlex.quote(value)}{behind}\n"


def script_faults(env: Mapping[str, str]) -> Iterator[Fault]:
    """Variables that would not arrive as given."""
    for name in env:
        if name in _KEPT_BY_SHELLS:
            yield Fault(
                f"the variable {name} is a shell's own and cannot be set in a container",
                remedy="give it another name",
            )
