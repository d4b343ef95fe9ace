"""Starting prepared and ended runs: whose they are, whether they are as rendered, and what a failure leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fixture import runs_below

from tuneplane.kernel.errors import OperationError, UsageError
from tuneplane.kernel.submission import record_submission
from tuneplane.runs.secrets import remove_secrets
from tuneplane.runs.state import RunState
from tuneplane.runs.stop import stop_run
from tuneplane.start import hand_over, retry, start_prepared

STRANGER = 12345


@pytest.fixture
def tp_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(home))
    yield home


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
@pytest.mark.parametrize("act", [start_prepared, retry, stop_run])
def test_a_strangers_run_is_not_started_nor_stopped(tp_home: Path, tmp_path: Path, act: object) -> None:
    """What it says would run as the user who starts it, with that user's secrets."""
    with runs_below(tmp_path) as make:
        run = make("true")
        for path in [run.path, *run.path.rglob("*")]:
            os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
        given = (run.folder,) if act is stop_run else (run.folder, {})
        with pytest.raises(UsageError, match=f"user id {STRANGER}"):
            act(*given)  # type: ignore[operator]
        assert not list(run.folder.submissions.iterdir())


def test_a_retry_of_a_changed_script_is_refused(tp_home: Path, tmp_path: Path) -> None:
    with runs_below(tmp_path) as make:
        run = make("true")
        record_submission(run.folder, "local-1", "tp")
        run.folder.script.chmod(0o644)
        with run.folder.script.open("a") as file:
            file.write("\ncurl evil\n")
        with pytest.raises(UsageError, match=r"job\.sbatch"):
            retry(run.folder, {})


@pytest.mark.contract("C11")
@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("TIMEOUT", False),
        ("CANCELLED", True),
        ("OUT_OF_MEMORY", False),
        ("PREEMPTED", True),
        ("RUNNING", True),
    ],
)
def test_secrets_go_once_slurm_has_ended_a_run_for_good(tmp_path: Path, state: str, kept: bool) -> None:
    with runs_below(tmp_path) as make:
        run = make("true")
        run.folder.secrets.write_text("HF_TOKEN=x\n")
        remove_secrets(run.folder, RunState(run.folder.run_id, "ring", state))
        assert run.folder.secrets.exists() == kept


@pytest.mark.slow
def test_an_entry_that_git_ignores_is_refused_before_the_queue(tp_home: Path, tmp_path: Path) -> None:
    """It is on this disk, and would not be in the job."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}

    def call(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", "from tuneplane.cli.main import main; main()", *words]
        return subprocess.run(
            argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    lab = tmp_path / "lab"
    assert call("init", str(lab), cwd=tmp_path).returncode == 0
    assert call("new", "mlp", "--method", "custom/custom", cwd=lab).returncode == 0
    (lab / ".gitignore").write_text("*.sh\n")
    git = ["git", "-C", str(lab), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "add", "-A"], check=True, timeout=30)
    subprocess.run([*git, "commit", "-qm", "x"], check=True, timeout=30)
    done = call("submit", "mlp", "--profile", "local:1", "--observability-url", "https://x", cwd=lab)
    assert done.returncode == 2
    assert "custom entrypoint is missing or escapes the experiment directory" in done.stderr
    assert "git check-ignore -v experiments/mlp/train.sh" in done.stderr
    assert not (tp_home / "tuneplane").exists()


def test_slurms_refusal_leaves_no_secrets_behind(
    tp_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry writes them anew; where sbatch then says no, they go again."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "sacct"):
        (programs / name).write_text("#!/bin/sh\necho 'error: Invalid job id specified' >&2; exit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with runs_below(tmp_path) as make:
        run = make("true")
        run.folder.secrets.unlink(missing_ok=True)
        monkeypatch.setattr("tuneplane.start.check_prepared", lambda run: None)
        monkeypatch.setattr("tuneplane.start.known_token", lambda run_id, digest: "a-token")
        with pytest.raises(OperationError, match="Invalid job id"):
            retry(run.folder, dict.fromkeys(run.job.spec.node.secrets, "x" * 9))
        assert not run.folder.secrets.exists()
        assert run.folder.submit_error.exists()


def test_nodes_that_were_once_dead_are_not_avoided_where_the_others_are_too_few(
    tp_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be back by now: else neither `resume` nor `retry` could ever start the run again."""
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n'
        'case "$*" in *--exclude*) echo "Requested node configuration is not available" >&2; exit 1;; esac\n'
        "echo Submitted batch job 77\n"
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    with runs_below(tmp_path) as make:
        run = make("true")
        assert hand_over(run.folder, run.job, ["n2", "n3"]).job_id == "77"
        calls = [line for line in (tmp_path / "calls").read_text().splitlines() if "--test-only" not in line]
        assert ["--exclude=n2,n3" in line for line in calls] == [True, False]
        assert not run.folder.submit_error.exists()
        sbatch.write_text("#!/bin/sh\necho 'Invalid account' >&2; exit 1\n")
        with pytest.raises(OperationError) as refused:
            hand_over(run.folder, run.job, ["n2"], "tp job retry it")
        assert "tp job retry it tries" in refused.value.faults[0].remedy
