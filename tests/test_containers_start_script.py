"""The first process of a container, read by the shells that images have as their `sh`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tuneplane.containers import Container
from tuneplane.containers.pyxis import FORGOTTEN
from tuneplane.containers.start_script import start_script

SHELLS = [name for name in ("dash", "bash", "busybox", "ksh", "mksh") if shutil.which(name)]

PATH = "/usr/bin:/bin"

SAVES = """\
import signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(params=SHELLS)
def sh(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A shell under the name by which an image has it."""
    link = tmp_path / "bin" / "sh"
    link.parent.mkdir()
    link.symlink_to(shutil.which(request.param) or "")
    return str(link)


@pytest.fixture
def start(sh: str, tmp_path: Path) -> Start:
    """Starts a command by the script, as a runtime does in a session of its own."""

    def run(
        *argv: str,
        mode: str = "run",
        env: dict[str, str] | None = None,
        forget: tuple[str, ...] = (),
        **more: str,
    ) -> subprocess.Popen[str]:
        container = Container(runtime="enroot", workdir=more.pop("workdir", "/"))
        file = tmp_path / "start.sh"
        text = start_script(container, env or {}, forget, more.pop("log", ""))
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        return subprocess.Popen(
            [sh, str(file), mode, *argv],
            env={"PATH": PATH, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    return run


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_the_command_gets_its_arguments_as_they_are(start: Start) -> None:
    given = ["", " a  b ", "$HOME", "`id`", "'", '"', "a\nb", "-x", "*", "实验"]
    code, out, err = finish(start("printf", "<%s>", *given))
    assert (code, out, err) == (0, "".join(f"<{word}>" for word in given), "")


def test_values_arrive_byte_for_byte_and_win(start: Start) -> None:
    env = {"A": "a'b\"c\\\n$x `y`\n", "EMPTY": "", "OURS": "new", "U": os.fsdecode(b"\xc3\xa9\xff")}
    code, out, _ = finish(start("sh", "-c", 'printf "<%s>" "$A" "$EMPTY" "$OURS"', env=env, OURS="old"))
    assert (code, out) == (0, "<a'b\"c\\\n$x `y`\n><><new>")


@pytest.mark.contract("C24")
@pytest.mark.parametrize("mode", ["run", "enter"])
@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (None, "/w k/.tuneplane/kernel"),
        ("", "/w k/.tuneplane/kernel"),
        ("/opt/a b:/opt/'c' *", "/w k/.tuneplane/kernel:/opt/a b:/opt/'c' *"),
    ],
)
def test_the_kernels_folder_is_first_on_pythonpath_and_the_images_own_stays_behind_it(
    start: Start, mode: str, images: str | None, expected: str
) -> None:
    """No colon at its end: Python would take that for the working directory."""
    more = {} if images is None else {"PYTHONPATH": images}
    env = {"PYTHONPATH": "/w k/.tuneplane/kernel"}
    assert finish(start("printenv", "PYTHONPATH", mode=mode, env=env, **more)) == (0, f"{expected}\n", "")


@pytest.mark.contract("C23")
def test_where_the_job_has_no_pythonpath_the_images_is_left_alone(start: Start) -> None:
    assert finish(start("printenv", "PYTHONPATH", PYTHONPATH="/opt/image"))[1] == "/opt/image\n"


@pytest.mark.parametrize("mode", ["run", "enter"])
@pytest.mark.parametrize(("program", "code"), [("exit 37", 37), ("exit 0", 0), ("kill -9 $$", 137)])
def test_the_exit_code_is_the_commands(start: Start, mode: str, program: str, code: int) -> None:
    assert finish(start("sh", "-c", program, mode=mode))[0] in (code, 128 - code)


def test_a_command_that_is_not_there_is_127(start: Start) -> None:
    code, _, err = finish(start("no-such-program"))
    assert code == 127 and "no-such-program" in err


def test_a_folder_that_is_not_there_ends_it_before_the_command(start: Start, tmp_path: Path) -> None:
    code, out, err = finish(start("echo", "started", workdir=str(tmp_path / "not there")))
    assert (code, out) == (125, "") and "not there" in err


def test_it_starts_in_a_folder_of_any_name(start: Start, weird_dir: Path) -> None:
    assert finish(start("pwd", workdir=str(weird_dir)))[1] == f"{weird_dir}\n"


def test_what_slurm_left_is_forgotten_whatever_its_values_hold(start: Start) -> None:
    nasty = {
        "SLURM_PROCID": "0",
        "SLURM_MULTI": "a\nexport PATH=/evil\nexport SLURM_x'; touch /tmp/evil #\nexport SLURM_Y=z",
        "RANK": "0",
        "CUDA_VISIBLE_DEVICES": "3",
        "PMIX_RANK": "0",
    }
    kept = {"MINE": "SLURM_ is only a value", "OF_IMAGE": "x\nexport SLURM_Z=1"}
    code, out, err = finish(start("env", "-0", forget=FORGOTTEN, env={"SLURM_JOB_ID": "7"}, **nasty, **kept))
    found = dict(entry.split("=", 1) for entry in out.split("\0") if entry)
    assert (code, err) == (0, "")
    assert {name for name in found if name.startswith(("SLURM", "PMI", "RANK", "CUDA"))} == {"SLURM_JOB_ID"}
    assert found["SLURM_JOB_ID"] == "7" and found["PATH"] == PATH
    assert {name: found[name] for name in kept} == kept
    assert "OLDPWD" not in found


def test_output_goes_to_the_log_at_once_but_not_that_of_a_shell_beside_it(
    start: Start, tmp_path: Path
) -> None:
    log = tmp_path / "node's log"
    log.write_text("before\n")
    assert finish(start("sh", "-c", "echo out; echo err >&2", log=str(log)))[:2] == (0, "")
    assert log.read_text() == "before\nout\nerr\n"
    assert finish(start("echo", "seen", mode="enter", log=str(log)))[1] == "seen\n"
    assert "seen" not in log.read_text()


def told(process: subprocess.Popen[str]) -> tuple[int, str]:
    """TERM to every process of its session, as the agent does; its exit code and the rest of what it printed."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = (
                (entry / "stat").read_text().rpartition(")")[2].split() if (entry / "stat").exists() else []
            )
            if fields[3:4] == [str(process.pid)]:
                os.kill(int(entry.name), signal.SIGTERM)
    code, out, _ = finish(process)
    return code, out


def test_it_outlives_a_shell_until_what_that_started_has_saved(start: Start) -> None:
    """bash in between dies at once: this process stays for the trainer."""
    code, out = told(start("bash", "-c", 'python3 -c "$0"; exit 9', SAVES))
    assert (code, out) == (128 + signal.SIGTERM, "saved\n")


def test_a_trainer_without_a_shell_in_between_gives_its_own_code(start: Start) -> None:
    assert told(start("python3", "-c", SAVES)) == (0, "saved\n")


def test_what_runs_on_after_a_command_that_was_not_told_does_not_hold_it(start: Start) -> None:
    process = start("sh", "-c", "sleep 20 >/dev/null 2>&1 & echo done")
    began = time.monotonic()
    assert finish(process)[:2] == (0, "done\n")
    assert time.monotonic() - began < 10
    os.killpg(process.pid, signal.SIGKILL)
