"""What `tp submit` refuses on a cluster: by which words, with which exit code, and leaving nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_lab import URL, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def committed(testbed: Testbed) -> SlurmLab:
    """A lab with a committed experiment. Tests leave it as it is; `lab` is a copy to change."""
    lab = SlurmLab(testbed, experiment=unique("refused"))
    lab.train_sh("echo trained")
    lab.commit()
    return lab


@pytest.fixture
def lab(committed: SlurmLab) -> SlurmLab:
    return committed.copied()


def submit(lab: SlurmLab, profile: str = "h200:1", *more: str | Path) -> list[str | Path]:
    return ["submit", lab.experiment, *lab.flags(profile), *more]


ENTRYPOINTS = {
    "renamed": "mv train.sh start.sh",
    "missing": "rm train.sh",
    "a link that leads out": "mv train.sh ../../common/ && ln -s ../../common/train.sh train.sh",
}


@pytest.mark.contract("C4")
@pytest.mark.parametrize("how", ENTRYPOINTS)
def test_an_entrypoint_that_is_not_there_by_name_stops_the_submit(lab: SlurmLab, how: str) -> None:
    lab.sh(["sh", "-c", ENTRYPOINTS[how]], cwd=f"{lab.root}/experiments/{lab.experiment}")
    lab.commit()
    said = lab.refused(*submit(lab))
    assert "custom entrypoint is missing or escapes the experiment directory" in said


@pytest.mark.contract("C7")
@pytest.mark.parametrize("operation", ["export", "eval"])
def test_a_custom_experiment_is_neither_exported_nor_evaluated(committed: SlurmLab, operation: str) -> None:
    said = committed.refused(operation, committed.experiment)
    assert "custom adapter" in said
    assert operation in said


@pytest.mark.contract("C23")
@pytest.mark.parametrize("flags", [[], ["--observability-url", ""]], ids=["not given", "empty"])
def test_an_external_recipe_needs_the_address_of_a_tracker(committed: SlurmLab, flags: list[str]) -> None:
    words = ["submit", committed.experiment, "--profile", "h200:1", "--image", str(committed.bed.image)]
    said = committed.refused(*words, *flags)
    assert "custom external observability requires spec.framework.observability_url" in said


NOT_ALLOWED = {
    "registry.example.com.evil.example/x:v1": "registry.example.com.evil.example",
    "registry.example.com:5000/x:v1": "registry.example.com:5000",
    "REGISTRY.example.com/x:v1": "REGISTRY.example.com",
    "docker://evil.example/registry.example.com/x": "evil.example",
    "x@sha256:" + "0" * 64: "docker.io",
}


@pytest.mark.contract("C28")
@pytest.mark.parametrize("image", NOT_ALLOWED)
def test_an_image_of_a_registry_that_is_not_listed_is_refused(committed: SlurmLab, image: str) -> None:
    words = ["submit", committed.experiment, "--profile", "h200:1", "--observability-url", URL]
    said = committed.refused(*words, "--image", image)
    assert f"image registry {NOT_ALLOWED[image]} is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES" in said
    assert "ask whoever started this testbed" in said


def test_a_name_that_hides_its_registry_is_no_image(committed: SlurmLab) -> None:
    image = "registry.example.com@evil.example/x"
    words = ["submit", committed.experiment, "--profile", "h200:1", "--observability-url", URL]
    said = committed.refused(*words, "--image", image)
    assert "image '…@evil.example/x': user names and passwords have no place in it" in said


@pytest.mark.contract("C28")
def test_a_users_environment_narrows_the_sites_registries_and_never_widens_them(committed: SlurmLab) -> None:
    words = ["submit", committed.experiment, "--profile", "h200:1", "--observability-url", URL]
    listed, other = "registry.example.com/x:v1", "other.example/x:v1"
    said = committed.refused(*words, "--image", listed, code=1)
    assert "registry.example.com cannot be asked" in said, "it is allowed, and not there"
    for value in ("other.example", ""):
        said = committed.refused(*words, "--image", listed, env={"TUNEPLANE_ALLOWED_IMAGE_REGISTRIES": value})
        assert "image registry registry.example.com is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES" in said
    env = {"TUNEPLANE_ALLOWED_IMAGE_REGISTRIES": "registry.example.com,other.example"}
    said = committed.refused(*words, "--image", other, env=env)
    assert "image registry other.example is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES" in said


def test_an_image_file_outside_the_sites_folders_is_refused(committed: SlurmLab) -> None:
    committed.sh(["sh", "-c", 'cp --reflink=auto "$1" /tmp/copied.sif', "sh", str(committed.bed.image)])
    words = ["submit", committed.experiment, "--profile", "h200:1", "--observability-url", URL]
    try:
        said = committed.refused(*words, "--image", "/tmp/copied.sif")
        assert "/tmp" in said
        assert str(committed.bed.shared / "images") in said
        committed.sh(["ln", "-s", "/tmp/copied.sif", str(committed.base / "inside.sif")])
        assert "/tmp" in committed.refused(*words, "--image", committed.base / "inside.sif")
    finally:
        committed.sh(["rm", "-f", "/tmp/copied.sif"])


def test_a_registry_that_cannot_be_asked_is_told_with_the_way_to_a_local_file(committed: SlurmLab) -> None:
    words = ["submit", committed.experiment, "--profile", "h200:1", "--observability-url", URL]
    said = committed.refused(*words, "--image", "registry.example.com/x:v1", code=1)
    assert "apptainer build" in said
    assert "docker://registry.example.com/x:v1" in said


WRONG_FLAGS = {
    "unknown profile": (["--profile", "h100:8"], ["h100", "h200"]),
    "more GPUs than a node has": (["--profile", "h200", "--gpus-per-node", "9"], ["9", "8"]),
    "a total between whole nodes": (["--profile", "h200:12"], ["12 GPUs", "8 and 16"]),
    "a malformed time": (["--profile", "h200:1", "--time", "soon"], ["--time", "soon"]),
    "a malformed mount": (
        ["--profile", "h200:1", "--mount", "relative:/data"],
        ["--mount", "relative:/data"],
    ),
    "a set without a value": (["--profile", "h200:1", "--set", "lr"], ["--set", "lr"]),
    "a line in a job's name": (["--profile", "h200:1", "--job-name", "a\n#SBATCH --uid=0"], ["--job-name"]),
}


@pytest.mark.parametrize("case", WRONG_FLAGS)
def test_a_wrong_flag_is_told_in_one_clear_message(committed: SlurmLab, case: str) -> None:
    flags, words = WRONG_FLAGS[case]
    tail = ["--observability-url", URL, "--image", committed.bed.image]
    said = committed.refused("submit", committed.experiment, *flags, *tail)
    for word in words:
        assert word in said


def test_a_misspelt_experiment_is_told_with_the_nearest(committed: SlurmLab) -> None:
    said = committed.refused("submit", committed.experiment[:-1], *committed.flags("h200:1"))
    assert f"did you mean {committed.experiment}?" in said


def test_an_image_that_does_not_exist_is_told(committed: SlurmLab) -> None:
    missing = committed.base / "no such image.sif"
    said = committed.refused(
        *["submit", committed.experiment, "--profile", "h200:1"],
        "--observability-url",
        URL,
        "--image",
        missing,
    )
    assert str(missing) in said
    assert "does not exist" in said


def test_storage_that_compute_nodes_do_not_share_is_refused(lab: SlurmLab) -> None:
    lab.own_user_config("defaults.yaml", "cluster:\n  storage_root: /tmp/not-shared\n")
    said = lab.refused(*submit(lab))
    assert "/tmp/not-shared is outside what the site calls shared" in said
    assert str(lab.bed.shared) in said
    assert lab.sh(["ls", "/tmp/not-shared"], check=False).returncode != 0


def test_folders_that_compute_nodes_do_not_share_are_refused_all_at_once(committed: SlurmLab) -> None:
    mounts = ["--mount", "/opt:/data", "--mount", "/srv/x:/x:ro"]
    said = committed.refused(*submit(committed), *mounts, faults=2)
    for folder in ("/opt", "/srv/x"):
        assert f"--mount: {folder} is outside what the site calls shared ({committed.bed.shared})" in said


LOCKS = {
    "not JSON": ('{"apiVersion": ', ":1", "is not JSON"),
    "another format": (
        '{"apiVersion": "tuneplane/recipe-lock/v9"}',
        "recipe.lock.json",
        "tuneplane/recipe-lock/v9",
    ),
    "a list": ("[]", "recipe.lock.json", "not an object"),
}


@pytest.mark.parametrize("how", LOCKS)
def test_a_malformed_lock_is_told_with_its_place_and_the_way_out(lab: SlurmLab, how: str) -> None:
    text, place, what = LOCKS[how]
    lab.write(f"experiments/{lab.experiment}/recipe.lock.json", text)
    lab.commit()
    said = lab.tp(*submit(lab), code=2)
    assert place in said
    assert what in said
    assert f"tp recipe upgrade {lab.experiment}" in said


def test_without_git_nothing_can_be_submitted(committed: SlurmLab) -> None:
    path = f"{committed.bed.shared}/venv/bin"
    said = committed.refused(*submit(committed), env={"PATH": path}, faults=2)
    assert "git is not on the PATH" in said and "sbatch is not on this machine's PATH" in said


@pytest.mark.contract("C26")
def test_a_lab_without_a_commit_is_refused_with_its_files(lab: SlurmLab) -> None:
    lab.sh(["sh", "-c", "rm -rf .git && git init -q"])
    said = lab.refused(*submit(lab))
    assert "the lab has no commit yet" in said
    assert "tuneplane.yaml" in said
    assert "git add -A && git commit" in said


def test_a_lab_outside_git_is_refused(lab: SlurmLab) -> None:
    lab.sh(["rm", "-rf", ".git"])
    assert "the lab is not a git repository" in lab.refused(*submit(lab))


def test_a_detached_head_is_refused(lab: SlurmLab) -> None:
    lab.sh(["git", "checkout", "-q", "--detach"])
    said = lab.refused(*submit(lab))
    assert "HEAD is detached" in said
    assert "git switch -c" in said


@pytest.mark.contract("C26")
def test_a_dirty_lab_is_refused_with_its_files_unless_they_are_taken_along(lab: SlurmLab) -> None:
    folder = f"experiments/{lab.experiment}"
    lab.write(f"{folder}/train.sh", "echo changed\n")
    lab.write("common/new file.py", "x = 1\n")
    said = lab.refused(*submit(lab))
    assert f"{folder}/train.sh" in said
    assert "common/new file.py" in said
    assert "git add -A && git commit" in said
    run = lab.render("h200:1", "--allow-dirty")
    job = json.loads(run.read("job.json"))
    assert sorted(job["metadata"]["dirty"]) == ["common/new file.py", f"{folder}/train.sh"]
    listed = lab.sh(["tar", "-xOf", str(run.folder / "capsule.tar"), f"{folder}/train.sh"]).stdout
    assert listed == "echo changed\n"


@pytest.mark.contract("C30")
def test_validate_finds_all_faults_at_once(lab: SlurmLab) -> None:
    lab.write("common/uncommitted.py", "")
    lab.sh(["rm", f"experiments/{lab.experiment}/train.sh"])
    words = ["--profile", "h200:12", "--image", "evil.example/x", "--set", "lr", "--mount", "nowhere"]
    said = lab.tp("validate", lab.experiment, *words, code=2)
    for part in (
        "custom entrypoint is missing or escapes the experiment directory",
        "common/uncommitted.py",
        "12 GPUs are not whole nodes",
        "image registry evil.example is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES",
        "custom external observability requires spec.framework.observability_url",
        "--set",
        "--mount",
    ):
        assert part in said
    assert "--profile was not given" not in said
    assert f"{lab.experiment}: 7 faults" in said


@pytest.mark.contract("C30")
def test_validate_without_flags_lists_what_it_could_not_check(committed: SlurmLab) -> None:
    said = committed.tp("validate", committed.experiment)
    assert "not checked: the cluster, its caps and the image: --profile was not given" in said
    assert "not checked: where your metrics go: --observability-url was not given" in said
    assert f"{committed.experiment}: nothing to fault" in said
    value = json.loads(committed.sh(["tp", "validate", committed.experiment, "--json"]).stdout)
    assert (value["faults"], len(value["unchecked"])) == ([], 2)


def test_validate_with_submits_flags_checks_all_that_submit_does(committed: SlurmLab) -> None:
    before = committed.run_folders()
    said = committed.tp("validate", committed.experiment, *committed.flags("h200:16"))
    assert committed.run_folders() == before
    assert "not checked" not in said
    assert "nothing to fault" in said


def test_storage_without_permission_is_an_error_of_the_machine_and_leaves_nothing(lab: SlurmLab) -> None:
    store = lab.base / "store"
    lab.sh(["mkdir", "-m", "0500", str(store)])
    lab.own_user_config("defaults.yaml", f"cluster:\n  storage_root: {store}\n")
    said = lab.refused(*submit(lab), code=1)
    assert str(store) in said
    assert "Permission denied" in said
    assert lab.sh(["find", str(store)]).stdout == f"{store}\n"


@pytest.mark.parametrize(
    "limits",
    ["size=256k", "size=4k", "size=64m,nr_inodes=7"],
    ids=["full half-way", "full", "no inodes left"],
)
def test_a_full_disk_is_an_error_of_the_machine_and_leaves_nothing(lab: SlurmLab, limits: str) -> None:
    store = lab.base / "full"
    lab.sh(["mkdir", str(store)])
    lab.own_user_config("defaults.yaml", f"cluster:\n  storage_root: {store}\n")
    lab.bed.exec(["mount", "-t", "tmpfs", "-o", f"{limits},mode=1777", "full", str(store)], user="root")
    try:
        said = lab.refused(*submit(lab), code=1)
        assert "No space left on device" in said
        assert str(store) in said
        assert lab.sh(["find", str(store), "-type", "f"]).stdout == ""
        assert lab.experiment not in lab.sh(["find", str(store)]).stdout
        assert lab.sh(["squeue", "-h", "-n", lab.experiment]).stdout == ""
    finally:
        lab.bed.exec(["umount", str(store)], user="root")
