"""`tp` as a process of its own, forked from one that has imported everything already: a second saved at each call.

For tests of what `tp` does. Tests of how it starts (`test_startup.py`, the wheel) start it afresh.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).resolve().parents[1]
LONGEST_BYTES = 1 << 20


def run_tp(
    words: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str], timeout: float = 60
) -> CompletedProcess[str]:
    """`tp WORDS` with this environment and no other, without a terminal, to its end."""
    argv = [str(word) for word in words]
    ended, say_ended = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, os.fdopen(ended, "rb") as answer:
        order = json.dumps({"argv": argv, "cwd": str(cwd), "env": dict(env)}).encode()
        assert len(order) < LONGEST_BYTES
        socket.send_fds(_warm(), [order], [out.fileno(), err.fileno(), say_ended])
        os.close(say_ended)
        pid = int(answer.readline())
        if not select.select([answer], [], [], timeout)[0]:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(["tp", *argv], timeout)
        code = int(answer.readline())
        out.seek(0)
        err.seek(0)
        said = [file.read().decode("utf-8", "surrogateescape") for file in (out, err)]
    return CompletedProcess(["tp", *argv], code, said[0], said[1])


@functools.cache
def _warm() -> socket.socket:
    """Where orders are sent. The process behind it ends with the tests, when this end is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd="/",
    )
    theirs.close()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_BYTES)
    return ours


def serve(orders: socket.socket) -> None:
    """One child for each order, which tells the order's sender its pid and then its exit code."""
    _import_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, LONGEST_BYTES, 3)
        if not order:
            return
        if os.fork() == 0:
            orders.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            out, err, answer = descriptors
            pid = os.fork()
            if pid == 0:
                os.close(answer)
                _become_tp(json.loads(order), out, err)
            os.write(answer, f"{pid}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(answer, f"{code}\n".encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become_tp(order: dict[str, object], out: int, err: int) -> None:
    """Everything that tells this process from a fresh `tp`, then `tp`. Never returns."""
    code = 1
    try:
        argv, env = order["argv"], order["env"]
        assert isinstance(argv, list) and isinstance(env, dict)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.closerange(3, 256)
        os.chdir(str(order["cwd"]))
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["tp", *argv]
        from tuneplane.cli.main import main

        main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _import_all() -> None:
    import importlib
    import pkgutil

    import hydra._internal.hydra
    import rich.progress
    import submitit
    import yaml

    import tuneplane

    assert hydra and rich and submitit and yaml
    for module in pkgutil.walk_packages(tuneplane.__path__, "tuneplane."):
        if not module.name.startswith("tuneplane.configs"):
            importlib.import_module(module.name)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
