"""A shell beside a running trainer: its environment and folder, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fixture import Run, runs_below, wait_until

from tuneplane.containers import Launch
from tuneplane.node.scratch import write_launch


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with runs_below(tmp_path) as make:
        made = make(
            'env -0 >"$TUNEPLANE_OUT_DIR/env"; echo training; sleep 1000',
            secrets={"HF_TOKEN": "hf_planted\nline"},
        )
        agent = made.start_node(made.claimed())
        made.wait_for_line("training")
        yield made
        agent.send_signal(signal.SIGTERM)
        made.finish(agent)


def environment(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split("\0") if word)


@pytest.mark.contract("C46")
def test_a_shell_has_the_trainers_environment_and_folder(run: Run) -> None:
    done = run.call(
        "shell", str(run.path), "0", "0", "env", "-0", environment={"HF_TOKEN": "another", "TERM": "xterm"}
    )
    shell, trainer = environment(done.stdout), environment((run.folder.out / "env").read_text())
    for name in ("PWD", "SHLVL", "_"):  # bash's own
        trainer.pop(name)
    assert shell == {**trainer, "TERM": "xterm"}
    where = run.call("shell", str(run.path), "0", "0", "pwd")
    assert where.stdout == f"{run.scratch().work}\n"


def test_its_command_is_taken_word_by_word_and_its_code_is_kept(run: Run) -> None:
    words = ["a b", "", "$HOME", "-x", "c\nd", "'"]
    done = run.call("shell", str(run.path), "0", "0", "bash", "-c", 'printf "<%s>" "$@"; exit 7', "x", *words)
    assert (done.returncode, done.stdout) == (7, "".join(f"<{w}>" for w in words))


@pytest.mark.slow
def test_without_a_command_it_is_an_interactive_bash(run: Run) -> None:
    done = run.call("shell", str(run.path), "0", "0")  # whose input is at its end
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_a_program_that_is_not_there_is_one_sentence(run: Run) -> None:
    done = run.call("shell", str(run.path), "0", "0", "no-such-program")
    assert (done.returncode, done.stderr) == (
        1,
        "tuneplane: tp job shell: no-such-program cannot be started: No such file or directory\n",
    )


@pytest.mark.slow
def test_a_node_that_does_not_run_it_says_so(run: Run) -> None:
    done = run.call("shell", str(run.path), "0", "1", "true")
    assert done.returncode == 1
    assert " ".join(done.stderr.split()) == (
        f"tuneplane: node {os.uname().nodename}: attempt 0 of {run.job.metadata.run_id} does not run on this node"
        f" (rank 1) → tp job status {run.job.metadata.run_id}"
    )


def test_a_note_that_another_user_left_in_its_place_is_not_obeyed(run: Run, tmp_path: Path) -> None:
    planted = run.scratch(0, 5)
    planted.path.mkdir()
    write_launch(planted.launch, Launch(["touch", str(tmp_path / "owned")], {}, "/"))
    if os.geteuid() == 0:
        os.chown(planted.launch, 65_534, 65_534)
    else:
        planted.launch.chmod(0o666)
    assert "does not run on this node" in run.call("shell", str(run.path), "0", "5", "x").stderr
    assert not (tmp_path / "owned").exists()


def test_the_containers_own_start_is_kept_before_the_shells_command(tmp_path: Path) -> None:
    """What a runtime says of commands beside the trainer, and then the command."""
    with runs_below(tmp_path) as make:
        run = make("true")
        scratch = run.scratch()
        scratch.path.mkdir(parents=True)
        start = ["printf", "<%s>", "exec", "image.sif", "start.sh"]
        write_launch(
            scratch.launch,
            Launch([*start, "run", "bash", "x.sh"], {"PATH": "/usr/bin"}, "/", enter=[*start, "enter"]),
        )
        done = run.call("shell", str(run.path), "0", "0", "ls", "-l")
        assert done.stdout == "<exec><image.sif><start.sh><enter><ls><-l>"


def test_it_is_over_with_its_trainer(run: Run) -> None:
    os.kill(run.record()["pid"], signal.SIGTERM)
    wait_until(lambda: run.record().get("state") == "ended", "the node has ended")
    assert "does not run on this node" in run.call("shell", str(run.path), "0", "0", "true").stderr


def test_a_shell_on_a_terminal_asks_the_runtime_for_one(tmp_path: Path) -> None:
    """As srun must be asked, by which pyxis starts a container."""
    with runs_below(tmp_path) as make:
        run = make("true")
        scratch = run.scratch()
        scratch.path.mkdir(parents=True)
        start = Launch([], {"PATH": "/usr/bin"}, "/", enter=["echo", "--overlap"], terminal="--pty")
        write_launch(scratch.launch, start)
        here, there = os.openpty()
        done = subprocess.run(
            run.kernel("shell", str(run.path), "0", "0", "ls"),
            env=run.environment(),
            stdin=there,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        os.close(here)
        os.close(there)
        assert done.stdout == "--pty --overlap ls\n"
        assert run.call("shell", str(run.path), "0", "0", "ls").stdout == "--overlap ls\n"
