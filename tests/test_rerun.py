"""`tp job rerun`: a new run of what an earlier one froze, checked against what the site says today."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hand_made import slurm_run
from warm_tp import run_tp

from tuneplane.kernel.errors import UsageError
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import load_catalog
from tuneplane.rerun import plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

URL = ("--observability-url", "https://tracker.example.org")
TRAIN = '#!/bin/bash\ncat "$TUNEPLANE_PARAMS_FILE"; ls\n'


class Newcomer:
    """A user of this machine with a lab of one experiment, and the site's configuration in their hands."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lab, self.site = folder, folder / "lab", folder / "site"
        self.site.mkdir()
        (folder / ".gitconfig").write_text("[user]\nname = A\nemail = a@example.org\n")
        self.tp("init", str(self.lab), cwd=folder)
        self.tp("new", "mlp", "--method", "custom/custom")
        (self.lab / "experiments/mlp/train.sh").write_text(TRAIN)
        (self.lab / "configs/cluster").mkdir(parents=True, exist_ok=True)
        (self.lab / "configs/cluster/bench.yaml").write_text(
            "scheduler: local\ndevice: cpu\ngpus_per_node: 2\n"
        )
        self.git("add", "-A")
        self.git("commit", "-qm", "x")

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "TUNEPLANE_CONFIG_DIR": str(self.site),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            **more,
        }

    def git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.lab, env=self.environment({}), check=True, timeout=30)

    def tp(self, *words: str, code: int = 0, cwd: Path | None = None, **more: str) -> str:
        done = run_tp(words, cwd=cwd or self.lab, env=self.environment(more))
        assert done.returncode == code, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, *words: str, **more: str) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(
            self.tp("submit", "mlp", "--profile", "bench:1", *URL, "--json", "--follow", *words, **more)
        )
        return said

    def rerun(self, *words: str, **more: str) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(
            self.tp("job", "rerun", "mlp", "--json", "--follow", *words, **more)
        )
        return said

    def runs(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "tuneplane/runs").glob("*/mlp/*"))


@pytest.fixture
def user(tmp_path: Path) -> Newcomer:
    return Newcomer(tmp_path)


def read_job(said: Mapping[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((Path(said["folder"]) / "job.json").read_text())
    return value


@pytest.mark.contract("C46")
def test_a_rerun_is_the_frozen_run_with_other_parameters(user: Newcomer) -> None:
    """The lab has gone on, and then is gone; nobody looks there."""
    first = user.submit("--set", "lr=0.1", "--set", "note='a b 实验'")
    (user.lab / "experiments/mlp/train.sh").write_text("exit 1\n")
    user.lab.rename(user.folder / "gone")
    user.lab.mkdir()
    second = user.rerun("--set", "lr=3e-4", "--set", "steps=5")
    assert second["rerun_of"] == first["run_id"] != second["run_id"]
    one, two = read_job(first), read_job(second)
    assert two["spec"]["hyperparams"] == {"lr": 3e-4, "note": "a b 实验", "steps": 5}
    assert two["metadata"]["rerun_of"] == first["run_id"]
    for job in (one, two):
        for name in ("run_id", "folder", "created_at", "rerun_of"):
            del job["metadata"][name]
        del job["spec"]["hyperparams"], job["spec"]["reporting"]
    assert one == two
    assert (Path(first["folder"]) / "capsule.tar").read_bytes() == (
        Path(second["folder"]) / "capsule.tar"
    ).read_bytes()
    assert "as submitted" in user.tp("job", "verify", second["run_id"])
    status = user.tp("job", "status", second["run_id"])
    assert f"rerun of   {first['run_id']}" in status and "COMPLETED" in status
    third = user.rerun()  # of the latest, which is a rerun itself
    assert third["rerun_of"] == second["run_id"]


def test_a_dry_run_leaves_nothing_behind(user: Newcomer) -> None:
    first = user.submit()
    script = user.tp("job", "rerun", "mlp", "--set", "lr=1", "--dry-run")
    assert script.startswith("#!/bin/bash\n") and first["run_id"] not in script
    said = json.loads(user.tp("job", "rerun", "mlp", "--set", "lr=1", "--dry-run", "--json"))
    assert said["hyperparams"] == {"lr": 1}
    assert user.runs() == [first["run_id"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--set", "lr"], "has no ="),
        (["--set", "=1"], "has no key"),
        (["--set", "lr=1", "--set", "lr=2"], "lr was given by"),
        (["--set", "opt=1"], "opt cannot have a value and be the group of opt.lr"),
        (["--set", "lr=inf"], "not a finite number"),
        (["--set", "k=a-secret-of-mine"], "the value of MY_TOKEN stands in"),
    ],
)
def test_a_wrong_set_is_refused_as_at_submit(user: Newcomer, words: list[str], told: str) -> None:
    first = user.submit("--set", "opt.lr=1")
    said = user.tp("job", "rerun", "mlp", *words, code=2, MY_TOKEN="a-secret-of-mine")
    assert told in said
    assert user.runs() == [first["run_id"]]


def test_what_the_site_locks_by_now_holds_for_a_rerun(user: Newcomer) -> None:
    user.submit()
    (user.site / "site").mkdir()
    (user.site / "cluster").mkdir()
    (user.site / "site/default.yaml").write_text("locked: [cluster.scratch, cluster.environment]\n")
    user.rerun()
    (user.site / "cluster/bench.yaml").write_text("scheduler: local\nscratch: /var/tmp\n")
    said = user.tp("job", "rerun", "mlp", code=2)
    assert "cluster.scratch is locked by the site: it is '/var/tmp' today, and the run has '/tmp'" in said


def test_the_profile_of_the_lab_is_the_frozen_one(user: Newcomer) -> None:
    user.submit()
    (user.lab / "configs/cluster/bench.yaml").unlink()
    assert user.rerun()["rerun_of"]


SLURM_PROFILE = """
scheduler: slurm
device: gpu
gpus_per_node: 8
slurm: {partition: gpu, time: "02:00:00"}
"""


@pytest.fixture
def rendered(user: Newcomer) -> Newcomer:
    """A run for a cluster, prepared and not submitted: what is checked needs no Slurm."""
    (user.site / "cluster").mkdir()
    (user.site / "site").mkdir()
    (user.site / "cluster/h200.yaml").write_text(SLURM_PROFILE)
    user.tp("render", "mlp", "--profile", "h200:8", *URL, "--dependency", "afterok:1")
    return user


def test_directives_are_the_runs_own_but_for_flags_and_the_dependency(rendered: Newcomer) -> None:
    (rendered.site / "cluster/h200.yaml").write_text(SLURM_PROFILE.replace("02:00", "09:00"))
    words = ("job", "rerun", "mlp", "--dry-run", "--partition", "big", "--json")
    said = json.loads(rendered.tp(*words, SBATCH_QOS="of-this-shell"))
    lines = said["script"].splitlines()
    assert "#SBATCH --partition=big" in lines and "#SBATCH --time=02:00:00" in lines
    assert not [line for line in lines if "--qos" in line or "--dependency" in line]
    assert [notice for notice in said["notices"] if "without the run's --dependency afterok:1" in notice]


@pytest.mark.parametrize(
    ("site", "words", "told"),
    [
        ("caps: {walltime: '01:00:00'}", [], "01:00:00"),
        ("caps: {walltime: '01:00:00'}", ["--time", "30"], ""),
        ("caps: {gpus: 4}", [], "the site allows 4 a run"),
        ("caps: {gpus: 8}", ["--time", "eternal"], "must be a time"),
        ("locked: [cluster.slurm.partition]", ["--partition", "big"], "cluster.slurm.partition is locked"),
        ("locked: [cluster.slurm.partition]", [], ""),
        ("locked: [cluster.slurm]", ["--time", "01:00:00"], "cluster.slurm.time is locked"),
        ("locked: [cluster.slurm.qos]", ["--nodelist", "n1"], ""),
        ("capsule_limit_mb: 1", [], ""),
    ],
)
def test_the_sites_caps_and_locks_of_today_judge_it(
    rendered: Newcomer, site: str, words: list[str], told: str
) -> None:
    (rendered.site / "site/default.yaml").write_text(f"{site}\n")
    said = rendered.tp("job", "rerun", "mlp", "--dry-run", *words, code=2 if told else 0)
    assert told in said


def test_a_directive_that_the_site_fixed_since_is_not_kept_as_it_was(rendered: Newcomer) -> None:
    (rendered.site / "cluster/h200.yaml").write_text(
        SLURM_PROFILE.replace("partition: gpu", "partition: new")
    )
    (rendered.site / "site/default.yaml").write_text("locked: [cluster.slurm.partition]\n")
    assert "cluster.slurm.partition is locked" in rendered.tp("job", "rerun", "mlp", "--dry-run", code=2)
    assert "#SBATCH --partition=new" in rendered.tp("job", "rerun", "mlp", "--dry-run", "--partition", "new")


def test_a_profile_that_is_gone_is_told(rendered: Newcomer) -> None:
    (rendered.site / "cluster/h200.yaml").unlink()
    assert "no cluster profile 'h200'" in rendered.tp("job", "rerun", "mlp", code=2)


IMAGE = {
    "reference": "registry.example.org/team/mlp:1", "source": "--image", "path": "/nowhere/x.sif",
    "sha256": "0" * 64, "digest": "sha256:" + "1" * 64, "size_bytes": 1, "modified_s": 1,
}  # fmt: skip


def test_the_image_must_be_allowed_and_the_very_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, image = tmp_path / "site-config", tmp_path / "x.sif"
    for name in ("site", "cluster"):
        (site / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    (site / "cluster/h200.yaml").write_text(f"{SLURM_PROFILE}container: {{runtime: apptainer}}\n")
    image.write_bytes(b"s")
    described = {**IMAGE, "path": str(image), "modified_s": int(image.stat().st_mtime)}
    changes = {"spec.container.runtime": "apptainer", "spec.container.image": described}
    run = slurm_run(tmp_path / "tuneplane", changes=changes)
    with tarfile.open(run.capsule, "w"):
        pass
    environ = {"HOME": str(tmp_path), "TUNEPLANE_CONFIG_DIR": str(site)}

    def faults() -> str:
        try:
            plan(run, (), {}, load_catalog([packaged_configs()]), environ)
        except UsageError as error:
            return str(error)
        return ""

    (site / "site/default.yaml").write_text("allowed_registries: [registry.example.org]\n")
    assert faults() == ""
    (site / "site/default.yaml").write_text("allowed_registries: [other.example.org]\n")
    assert "registry.example.org" in faults()
    (site / "site/default.yaml").write_text("allowed_registries: [registry.example.org]\n")
    image.write_bytes(b"other")
    assert "not the one that the run was submitted with" in faults()
    image.unlink()
    assert "not there any more" in faults()


def test_a_changed_capsule_is_not_started(user: Newcomer) -> None:
    first = user.submit()
    capsule = Path(first["folder"]) / "capsule.tar"
    data = capsule.read_bytes()
    assert b"TUNEPLANE_PARAMS_FILE" in data
    capsule.chmod(0o644)
    capsule.write_bytes(data.replace(b"; ls\n", b"; id\n"))
    user.tp("job", "rerun", "mlp", code=1)
    assert user.runs() == [first["run_id"]]
    job = Path(first["folder"]) / "job.json"
    job.chmod(0o644)
    job.write_text(job.read_text().replace("bench", "local"))
    assert "SHA" in user.tp("job", "rerun", "mlp", code=2) or "sha256" in user.tp(
        "job", "rerun", "mlp", code=2
    )


def test_a_secret_that_this_shell_lacks_is_told(user: Newcomer) -> None:
    (user.site / "site").mkdir()
    (user.site / "site/default.yaml").write_text("secrets: [HF_TOKEN]\n")
    user.submit(HF_TOKEN="hf_of_the_user")
    assert "HF_TOKEN not set in this shell" in user.tp("job", "rerun", "mlp", code=2)
    user.rerun(HF_TOKEN="hf_of_the_user")
    (user.site / "site/default.yaml").write_text("secrets: []\n")
    assert "does not give it to jobs any more" in user.tp("job", "rerun", "mlp", code=2, HF_TOKEN="hf_x_of")


def test_slurms_flags_are_not_used_on_this_machine(user: Newcomer) -> None:
    user.submit()
    assert any("--time not used" in notice for notice in user.rerun("--time", "10")["notices"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_a_strangers_run_is_not_run_again(user: Newcomer) -> None:
    """Its code would run as the user, with the user's secrets."""
    first = user.submit()
    os.chown(first["folder"], 12345, 12345)
    assert "belongs to user id 12345" in user.tp("job", "rerun", first["folder"], code=2)
