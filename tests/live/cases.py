"""What a container runtime must do for a run: cases for fakes, for the testbed and for real sites.

A case is a function of a `Site`, which starts train.sh somewhere. `run.py` beside this has a real site's.
"""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

HOSTILE_IMAGE: Mapping[str, str] = {
    "TUNEPLANE_OUT_DIR": "/image",
    "TUNEPLANE_MACHINE_RANK": "7",
    "HF_HOME": "/image/hf",
    "HOME": "/image/home",
    "TMPDIR": "/image/tmp",
    "USER": "image",
    "LANG": "de_DE.UTF-8",
    "PYTHONUNBUFFERED": "",
    "CUDA_VISIBLE_DEVICES": "7",
    "PYTORCH_VERSION": "2.13.0",
    "PYTHONPATH": "/opt/image/py",
    "OF_THE_IMAGE": "kept",
    "PATH": "/opt/image/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
"""The environment of an image that contradicts what a job is promised; the last three are its own to set."""

IMAGES_OWN = ("PYTORCH_VERSION", "PYTHONPATH", "OF_THE_IMAGE", "PATH")

ADDED_ON_THE_WAY = frozenset(
    (
        *("PWD", "SHLVL", "_", "OLDPWD", "TERM", "LD_LIBRARY_PATH"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
        *("APPTAINER_BIND", "APPTAINER_COMMAND", "APPTAINER_CONTAINER", "APPTAINER_ENVIRONMENT"),
        *("APPTAINER_NAME", "APPTAINER_APPNAME", "SINGULARITY_BIND", "SINGULARITY_COMMAND"),
        *("SINGULARITY_CONTAINER", "SINGULARITY_ENVIRONMENT", "SINGULARITY_NAME", "PROMPT_COMMAND", "PS1"),
        *("USER_PATH", "SINGULARITY_APPNAME"),
    )
)
"""Variables that bash and runtimes add and docs/environment.md names."""

PRINT_ENVIRONMENT = """\
python3 -I - <<'END'
import json, os
values = {os.fsdecode(k): os.fsdecode(v) for k, v in os.environb.items()}
print("ENVIRONMENT " + json.dumps(values), flush=True)
END
"""

SAVES_WHEN_TOLD = """\
cat >/tmp/save.py <<'END'
import os, signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # runtimes pass it on once more, into an import
    time.sleep(1.5)
    import wsgiref.handlers, xml.dom.minidom  # read from the image only now
    with open(os.environ["TUNEPLANE_OUT_DIR"] + "/saved", "w") as file:
        file.write("all of it")
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(120)
END
python3 /tmp/save.py
"""


class Started(Protocol):
    """One started run."""

    def logs(self) -> Sequence[str]:
        """What each node printed so far, by rank."""

    def wait_for(self, text: str) -> None:
        """Wait until node 0 printed it; fail after a while."""

    def stop(self) -> None:
        """Have the run end, as Slurm or its user would."""

    def shell(self, *command: str) -> str:
        """What a command beside the trainer prints."""

    def wait(self) -> int:
        """Wait for the end; node 0's exit code."""

    def output(self, name: str) -> str | None:
        """A file of the output folder; None where it is not there."""

    def arguments(self) -> Sequence[str]:
        """The command lines of this user's processes on node 0's host, while it runs."""


class Site(Protocol):
    """Where runs can be started: with an image of `HOSTILE_IMAGE`'s environment, HF_TOKEN and HF_HOME set."""

    token: str

    def start(self, train: str, *, nodes: int = 1, mounts: Sequence[tuple[str, str, bool]] = ()) -> Started:
        """Start a train.sh of this text. mounts: source, target, whether it is read-only."""

    def folder(self) -> str:
        """A fresh folder that nodes see, with a file `in` that says `here`."""


def printed_environment(log: str) -> dict[str, str]:
    """What PRINT_ENVIRONMENT left in a log."""
    line = next(line for line in log.splitlines() if line.startswith("ENVIRONMENT {"))
    values: dict[str, str] = json.loads(line.split(" ", 1)[1])
    return values


def environment_wins(site: Site) -> None:
    """The job's variables arrive, whatever the image says; the image keeps its own; nothing else is there."""
    run = site.start(PRINT_ENVIRONMENT)
    assert run.wait() == 0, run.logs()
    found = printed_environment(run.logs()[0])
    for name in IMAGES_OWN:
        assert found[name] == HOSTILE_IMAGE[name]
    for name in set(HOSTILE_IMAGE) - set(IMAGES_OWN) - {"CUDA_VISIBLE_DEVICES"}:
        assert found[name] != HOSTILE_IMAGE[name], name
    assert found["TMPDIR"] == "/tmp"
    assert found["HOME"].startswith("/") and found["HF_TOKEN"] == site.token
    unknown = {n for n in found if n.startswith(("SLURM", "PMI", "ENROOT", "PYXIS", "RANK", "LOCAL_RANK"))}
    assert unknown <= {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CPUS_ON_NODE"}


def folders_are_the_runs(site: Site) -> None:
    """Work read-only, output, home and /tmp writable and empty, nothing of the host's home."""
    run = site.start(
        """\
[ "$PWD" = "$TUNEPLANE_WORK_DIR" ] && echo "in the work folder"
{ : >"$TUNEPLANE_WORK_DIR/x"; } 2>/dev/null || echo "work is read-only"
ls -A "$HOME" | wc -l
for d in "$TUNEPLANE_OUT_DIR" "$HOME" /tmp /var/tmp /dev/shm; do
  f=$(mktemp "$d/x.XXXX") && rm "$f" && echo "writes $d"
done
{ : >/opt/x || : >/usr/x; } 2>/dev/null || echo "the image is read-only"
python3 -I -c 'import os; print("home", os.path.expanduser("~") == os.environ["HOME"])'
"""
    )
    assert run.wait() == 0, run.logs()
    said = run.logs()[0].splitlines()
    assert {"in the work folder", "work is read-only", "the image is read-only", "home True"} <= set(said)
    assert len([line for line in said if line.startswith("writes ")]) == 5
    assert "0" in said


def exit_code_is_the_trainers(site: Site) -> None:
    run = site.start("echo so far\nexit 37")
    assert run.wait() == 37
    assert "so far" in run.logs()[0]


def mounts_are_what_they_say(site: Site) -> None:
    writable, fixed = site.folder(), site.folder()
    run = site.start(
        f"""\
cat {writable}/in /mnt/fixed/in
echo back >{writable}/out && echo "wrote"
{{ : >/mnt/fixed/x; }} 2>/dev/null || echo "refused"
""",
        mounts=[(writable, writable, False), (fixed, "/mnt/fixed", True)],
    )
    assert run.wait() == 0, run.logs()
    words = ("here", "wrote", "refused")
    said = [line for line in run.logs()[0].splitlines() if line in words]
    assert said == ["here", "here", "wrote", "refused"], run.logs()


def trainer_saves_when_told_to_end(site: Site) -> None:
    """bash dies of the signal at once; what it started has the grace, and its image, until it has saved."""
    run = site.start(SAVES_WHEN_TOLD)
    run.wait_for("ready")
    run.stop()
    assert run.wait() == 128 + signal.SIGTERM, run.logs()
    assert run.output("saved") == "all of it", run.logs()


def half_a_line_is_seen_at_once(site: Site) -> None:
    run = site.start("printf 'step 1 '\nsleep 60")
    run.wait_for("step 1 ")
    run.stop()
    run.wait()


def shell_is_in_the_same_surroundings(site: Site) -> None:
    run = site.start('echo mine >/tmp/mine\necho "ready"\nsleep 60')
    run.wait_for("ready")
    said = run.shell("bash", "-c", 'cat /tmp/mine; echo "$TUNEPLANE_OUT_DIR $HOME $PATH"; exit 0').split()
    assert said[0] == "mine"
    assert said[1].endswith("/out") and said[3] == HOSTILE_IMAGE["PATH"]
    run.stop()
    run.wait()


def secret_stands_in_no_argument(site: Site) -> None:
    run = site.start('[ -n "$HF_TOKEN" ] && echo "ready"\nsleep 60')
    run.wait_for("ready")
    seen = "\n".join(run.arguments())
    run.stop()
    run.wait()
    assert "train.sh" in seen
    assert site.token not in seen


def two_nodes_know_each_other(site: Site) -> None:
    run = site.start(PRINT_ENVIRONMENT, nodes=2)
    assert run.wait() == 0, run.logs()
    found = [printed_environment(log) for log in run.logs()]
    assert [values["TUNEPLANE_MACHINE_RANK"] for values in found] == ["0", "1"]
    assert {values["TUNEPLANE_MACHINE_COUNT"] for values in found} == {"2"}
    assert {len(values["TUNEPLANE_MAIN_PROCESS_IP"]) > 0 for values in found} == {True}
    assert not [name for values in found for name in values if name in ("SLURM_PROCID", "RANK")]


def nothing_is_left_behind(site: Site) -> None:
    """What the trainer leaves running ends with the attempt."""
    seconds = 10_000 + secrets.randbelow(900_000)
    run = site.start(f"setsid sleep {seconds} &\nsleep {seconds} &\necho started")
    assert run.wait() == 0, run.logs()
    each = "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f 2>/dev/null; echo; done"
    again = site.start(f"echo left $({each} | grep -c '^sleep {seconds}')")
    assert again.wait() == 0
    assert "left 0" in again.logs()[0].splitlines()


CASES: dict[str, Callable[[Site], None]] = {
    case.__name__: case
    for case in (
        environment_wins,
        folders_are_the_runs,
        exit_code_is_the_trainers,
        mounts_are_what_they_say,
        trainer_saves_when_told_to_end,
        half_a_line_is_seen_at_once,
        shell_is_in_the_same_surroundings,
        secret_stands_in_no_argument,
        two_nodes_know_each_other,
        nothing_is_left_behind,
    )
}
