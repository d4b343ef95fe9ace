"""Where secrets are while a job runs, looked for with other means than TunePlane's own (C11).

The user is carol, whose login profile is this module's and test_slurm_isolation's alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import secrets
import stat
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import hold
from slurm_lab import WAIT_FOR_GO, Run, SlurmLab, login_profile, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]

USER = "carol"

WATCH_ARGUMENTS = """
import json, os, sys, time
seen = set()
while not os.path.exists(sys.argv[1]):
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    seen.add(file.read())
            except OSError:
                pass
    time.sleep(0.002)
print(json.dumps([line.decode("utf-8", "replace").replace("\\0", " ") for line in seen]))
"""
"""Every argument list of every process on every host, until a file appears. The controller's /proc has all."""

HASHES = """
python3 - <<'END'
import hashlib, os
for name in ("HF_TOKEN", "TUNEPLANE_JOB_TOKEN"):
    print(name, hashlib.sha256(os.environ[name].encode()).hexdigest())
print("OTHER_API_KEY" in os.environ, "PROFILE_TOKEN" in os.environ)
END
"""


@dataclass
class Planted:
    """Secrets, the run that was made with them around, and what was looked at while it ran."""

    run: Run
    shell: str  # HF_TOKEN of the submitting shell, which the site lists
    unlisted: str  # OTHER_API_KEY of that shell
    profile: str  # HF_TOKEN and PROFILE_TOKEN of the login profile
    token: str  # the run's own
    printed: str  # by tp submit, status and logs
    slurm: str  # what Slurm tells anybody who asks
    arguments: list[str]
    holders: dict[Path, int]  # files that held one of them while it ran → mode
    holders_after: dict[Path, int]
    secrets_mode: int

    def below(self, path: Path) -> str:
        """A path on this machine without the testbed's own folder."""
        return str(path).removeprefix(str(self.run.lab.bed.state))

    def all(self) -> list[str]:
        return [self.shell, self.unlisted, self.profile, self.token]


def files_with(values: list[str], state: Path, patterns: Path) -> dict[Path, int]:
    """Files below the testbed's folder that hold one of the values: homes, scratch, Slurm's own state, database.

    Left out: images and programs, which are older than the values, and the login profile they were put into.
    """
    patterns.write_text("".join(f"{value}\n" for value in values))
    search = ["grep", "-r", "-a", "-l", "-Z", "-F", "-f", str(patterns), "--devices=skip"]
    search += ["--exclude-dir=venv", "--exclude-dir=images", "--exclude=.profile", str(state)]
    done = subprocess.run(search, capture_output=True, timeout=60, check=False)
    found = {}
    for name in done.stdout.decode("utf-8", "surrogateescape").split("\0"):
        if name and Path(name).exists():
            found[Path(name)] = stat.S_IMODE(Path(name).stat().st_mode)
    return found


@pytest.fixture(scope="module")
def planted(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    shell, unlisted, profile = (f"hf_{secrets.token_hex(16)}" for _ in range(3))
    patterns = tmp_path_factory.mktemp("planted") / "patterns"
    lines = f"export HF_TOKEN={profile} PROFILE_TOKEN={profile}\n"
    lab = SlurmLab(testbed, user=USER, experiment=unique("secret"))
    lab.train_sh(f"{HASHES}{WAIT_FOR_GO}")
    lab.commit()
    ended = str(lab.base / "ended")
    with (
        hold(fcntl.LOCK_SH),
        login_profile(testbed, USER, lines),
        ThreadPoolExecutor() as pool,
    ):
        watch = ["/usr/bin/python3", "-I", "-c", WATCH_ARGUMENTS, ended]
        watched = pool.submit(testbed.exec, watch, user="root", timeout=120)
        try:
            env = {"HF_TOKEN": shell, "OTHER_API_KEY": unlisted}
            words = ["tp", "submit", lab.experiment, *lab.flags("h200:2", testbed.env_image), "--nodes", "2"]
            said = lab.sh([*words, "--gpus-per-node", "1", "--json"], env=env)
            value = json.loads(said.stdout)
            run = Run(lab, value["run_id"], Path(value["folder"]), value["job_id"], value["notices"])
            secrets_file = run.folder / "secrets.env"
            words = secrets_file.read_text().split()
            token = next(w for w in words if w.startswith("TUNEPLANE_JOB_TOKEN=")).partition("=")[2]
            values = [shell, unlisted, profile, token]
            run.wait_for(lambda: run.log().count("HF_TOKEN") == 2, "the trainers did not start")
            holders = files_with(values, testbed.state, patterns)
            mode = stat.S_IMODE(secrets_file.stat().st_mode)
            slurm = lab.sh(["scontrol", "show", "job", "-dd", run.job_id]).stdout
            slurm += lab.sh(["scontrol", "write", "batch_script", run.job_id, "-"]).stdout
            slurm += lab.sh(["squeue", "-o", "%all", "-j", run.job_id]).stdout
            slurm += lab.sh(["sacct", "-P", "-o", "ALL", "-j", run.job_id]).stdout
            printed = said.stderr + said.stdout + run.log() + run.slurm_output() + json.dumps(run.status())
            run.release()
            run.wait("COMPLETED")
        finally:
            lab.sh(["touch", ended])
        arguments = json.loads(watched.result().stdout)
    yield Planted(
        *(run, shell, unlisted, profile, token, printed, slurm, arguments, holders),
        holders_after=files_with(values, testbed.state, patterns),
        secrets_mode=mode,
    )
    patterns.unlink()


@pytest.mark.contract("C11")
def test_no_argument_list_of_any_process_holds_a_secret(planted: Planted) -> None:
    of_run = [line for line in planted.arguments if planted.run.run_id in line]
    assert [line for line in of_run if "kernel.pyz" in line], "the watch saw nothing of the job"
    assert [line for line in of_run if "train.sh" in line and "apptainer" in line], planted.arguments
    assert [line for line in planted.arguments if any(secret in line for secret in planted.all())] == []


@pytest.mark.contract("C11")
def test_slurm_shows_no_secret(planted: Planted) -> None:
    assert planted.run.run_id in planted.slurm
    assert [secret for secret in planted.all() if secret in planted.slurm] == []


@pytest.mark.contract("C11")
def test_files_with_secrets_are_their_owners_alone(planted: Planted) -> None:
    """On all hosts, below storage and scratch and in Slurm's own state: two kinds of file, both 0600."""
    own = planted.run.folder / "secrets.env"
    assert planted.secrets_mode == 0o600
    assert planted.holders.pop(own) == 0o600
    for path, mode in planted.holders.items():  # how each node started the container, for `tp job shell`
        assert path.name == "launch.json", path
        assert re.fullmatch(r"/hosts/n\d/tmp/tuneplane-\d+/[^/]+", planted.below(path.parent)), path
        assert mode == 0o600, path


@pytest.mark.contract("C11")
def test_secrets_are_gone_when_the_run_has_ended_for_good(planted: Planted) -> None:
    assert planted.holders_after == {}
    assert not (planted.run.folder / "secrets.env").exists()


@pytest.mark.contract("C11")
def test_tuneplane_prints_no_secret(planted: Planted) -> None:
    assert planted.run.run_id in planted.printed
    assert [secret for secret in planted.all() if secret in planted.printed] == []


@pytest.mark.contract("C10")
def test_the_trainer_has_the_submitting_shells_token_and_the_runs_own(planted: Planted) -> None:
    """Not the login profile's, not the image's; and nothing that the site does not list."""
    lines = planted.run.log("--node", "0").splitlines()

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    assert f"HF_TOKEN {digest(planted.shell)}" in lines
    assert f"TUNEPLANE_JOB_TOKEN {digest(planted.token)}" in lines
    assert "False False" in lines


def test_a_secret_that_the_trainer_prints_is_masked_in_what_is_shown(testbed: Testbed) -> None:
    lab = SlurmLab(testbed, user=USER, experiment=unique("printed"))
    lab.train_sh(f'echo "mine: $HF_TOKEN, the run\'s: $TUNEPLANE_JOB_TOKEN."\n{WAIT_FOR_GO}')
    lab.commit()
    env = {"HF_TOKEN": "hf_printed_by_the_trainer"}
    run = lab.submit("h200-bare:1", env=env)
    run.wait_for(lambda: "mine" in run.log(), "nothing was printed")
    assert "mine: •••, the run's: •••." in run.log()
    run.release()
    run.wait("COMPLETED")
    after = lab.sh(["tp", "job", "logs", run.run_id], env=env).stdout
    assert "mine: •••, the run's: •••." in after


@pytest.mark.contract("C11")
def test_a_configuration_that_asks_for_a_secret_is_refused(secret_lab: SlurmLab) -> None:
    asking = "${oc.env:MY_SECRET_TOKEN}"
    secret_lab.write("configs/cluster/h200.yaml", f'environment: {{GREETING: "Bearer {asking}"}}\n')
    secret_lab.commit()
    env = {"MY_SECRET_TOKEN": "value-of-my-secret"}
    for command in ("submit", "validate"):
        said = secret_lab.tp(command, secret_lab.experiment, *secret_lab.flags("h200:1"), code=2, env=env)
        assert said.count("MY_SECRET_TOKEN") == 1
        assert "configs/cluster/h200.yaml:1" in said
        assert "value-of-my-secret" not in said
    assert "value-of-my-secret" not in secret_lab.tp("config", "h200", code=2, env=env)
    assert secret_lab.run_folders() == []


@pytest.mark.contract("C11")
def test_a_secret_given_as_a_parameter_is_refused(secret_lab: SlurmLab) -> None:
    env = {"HF_TOKEN": "hf_given_as_a_parameter"}
    words = [secret_lab.experiment, *secret_lab.flags("h200:1"), "--set", "token=hf_given_as_a_parameter"]
    for command in ("submit", "validate"):
        said = secret_lab.tp(command, *words, code=2, env=env)
        assert "the value of HF_TOKEN stands in the run's configuration or parameters" in said
        assert "hf_given_as_a_parameter" not in said
    assert secret_lab.run_folders() == []


@pytest.fixture
def secret_lab(testbed: Testbed) -> SlurmLab:
    lab = SlurmLab(testbed, experiment=unique("secret"))
    lab.commit()
    return lab


@pytest.mark.contract("C11")
def test_keys_and_secret_files_never_enter_a_capsule_and_are_listed(secret_lab: SlurmLab) -> None:
    for path in (
        "id.key",
        "common/deep er/tls.key",
        "secrets.env",
        f"experiments/{secret_lab.experiment}/secrets.env",
    ):
        secret_lab.write(path, "a planted secret\n")
    secret_lab.sh(["git", "add", "--force", "."])
    secret_lab.commit()
    run = secret_lab.render("h200:1")
    members = secret_lab.sh(["tar", "-tf", str(run.folder / "capsule.tar")]).stdout.splitlines()
    assert "tuneplane.yaml" in members
    assert [m for m in members if m.endswith((".key", "secrets.env")) or ".git/" in m] == []
    assert "a planted secret" not in secret_lab.sh(["cat", str(run.folder / "capsule.tar")]).stdout
    (notice,) = [n for n in run.notices if "left out" in n]
    for path in ("id.key", "common/deep er/tls.key", "secrets.env", f"{secret_lab.experiment}/secrets.env"):
        assert path in notice
