"""What starts the steps of the fake `srun`: a process of its own, so that a step is no child of who asked for it.

`slurmd.py SOCKET CONF` serves until it is ended. As Slurm does, it kills what is left of a step when its task
has ended; as pyxis does, it lets the image's environment win but where a name is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import box

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36  # linux/prctl.h
LOCALE = ("LANG", "LANGUAGE", "LC_ALL")


def serve(address: str, conf: dict[str, str]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        number = 0
        while True:
            link, _ = server.accept()
            number += 1
            if os.fork() == 0:
                server.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(run_step(link, conf, number))
            link.close()


def run_step(link: socket.socket, conf: dict[str, str], number: int) -> int:
    """One slurmstepd: the task, srun's wish to kill it, the end of whatever it left."""
    os.setsid()
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_NAME, b"slurmstepd", 0, 0, 0)
    data, files, _, _ = socket.recv_fds(link, 1 << 20, 3)
    request = json.loads(data[4:])
    ready, told = os.pipe()
    task = os.fork()
    if task == 0:
        os.close(ready)
        for to, file in enumerate(files):
            os.dup2(file, to)
        os.set_inheritable(told, False)
        become_task(request, conf, number)
    os.close(told)
    code = wait(link, task)
    kill_below()
    with contextlib.suppress(OSError):
        link.sendall(str(code).encode())
    return 0


def become_task(request: dict[str, Any], conf: dict[str, str], number: int) -> NoReturn:
    try:
        environment = box.read_image(request["image"])
        if environment is None:
            fail(f"No such file or directory: {request['image']}")
        binds = [read_mount(entry) for entry in request["mounts"].split(",") if entry]
        if request["home"]:
            binds.insert(0, box.Bind(request["env"]["HOME"], request["env"]["HOME"]))
        root = tempfile.mkdtemp(dir=conf["folder"])
        values = environment_of(request, conf, number, environment)
        box.become(root, binds, request["writable"], request["folder"], request["argv"], values)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")


def environment_of(
    request: dict[str, Any], conf: dict[str, str], number: int, image: dict[str, str]
) -> dict[str, str]:
    """A step of one task, as Slurm and pyxis say it; what the image says wins."""
    node = request["node"]
    values = dict(request["env"])
    values |= {
        "SLURM_JOB_ID": conf["job"],
        "SLURM_STEP_ID": str(number),
        "SLURM_PROCID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NODELIST": node,
        "SLURMD_NODENAME": node,
        "SLURM_MULTILINE": "a\nexport SLURM_x'; rm -rf /\nb=c",
        "CUDA_VISIBLE_DEVICES": "0",
        "TMPDIR": "/tmp",
    }
    values = {name: value for name, value in values.items() if name not in LOCALE or name in request["keep"]}
    values |= {name: value for name, value in image.items() if name not in request["keep"]}
    if "PYTORCH_VERSION" in values:
        values |= {"RANK": "0", "LOCAL_RANK": "0"}
    return values


def read_mount(entry: str) -> box.Bind:
    source, target, flags, *rest = [*entry.split(":"), "", ""][:4]
    if not source.startswith("/") or not target.startswith("/") or any(rest):
        fail(f"--container-mounts: invalid format: {entry}")
    if flags not in ("", "ro"):
        fail(f"unknown mount flags {flags}")
    if any(character in entry for character in " \t\n\"'\\$`"):
        fail(f"bash: syntax error in the configuration of {entry!r}")
    if not os.path.exists(source):  # noqa: PTH110
        fail(f"--container-mounts: source path does not exist: {source}")
    return box.Bind(source, target, flags == "ro")


def wait(link: socket.socket, task: int) -> int:
    """The task's exit code; killed before where srun asks for it."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == task:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code
        if ended:
            continue
        if link.fileno() >= 0 and select.select([link], [], [], 0.01)[0]:
            if link.recv(1) == b"K":
                kill_below()
            else:  # srun is gone; the step goes on
                link.close()
        elif link.fileno() < 0:
            select.select([], [], [], 0.01)


def kill_below() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in children.read_text().split()]:
        living = [pid for pid in pids if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()]
        if not living:
            return
        for pid in living:
            os.kill(pid, signal.SIGKILL)


def fail(text: str) -> NoReturn:
    print(f"slurmstepd: error: pyxis: {text}", file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
