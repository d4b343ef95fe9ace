"""`tp image …`, and what submit, render, validate and --dry-run do with an image of a registry, as processes."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from registry_stub import Image, Stub, digest_of, fake_apptainer, index_of, layer_of, program, stub_registry
from warm_tp import run_tp

ROOT = Path(__file__).resolve().parents[1]
URL = "https://tracker.example.org/x"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SITE = """\
name: here
contact: help@example.org
allowed_registries: ["{host}", "registry.example.com"]
{more}
"""

PROFILE = """\
scheduler: local
device: cpu
gpus_per_node: 2
storage_root: {storage}
architecture: {architecture}
container: {{runtime: apptainer, binary: {apptainer}}}
"""


@dataclass
class Desk:
    """A user with a lab, a site with one profile, and a registry."""

    base: Path
    stub: Stub

    def __post_init__(self) -> None:
        self.home, self.site, self.programs = self.base / "home", self.base / "site", self.base / "bin"
        self.storage, self.lab = self.base / "storage", self.base / "lab"
        for folder in (self.home, self.site / "site", self.site / "cluster", self.storage):
            folder.mkdir(parents=True)
        fake_apptainer(self.programs)
        self.configure()
        self.tp("init", self.lab, cwd=self.base)
        for words in (("config", "user.name", "a"), ("config", "user.email", "a@example.org")):
            self.git(*words)
        self.tp("new", "mlp", "--method", "custom/custom")
        self.git("add", "-A")
        self.git("commit", "-qm", "first")

    def configure(self, more: str = "", architecture: str = "amd64") -> None:
        (self.site / "site/default.yaml").write_text(SITE.format(host=self.stub.host, more=more))
        (self.site / "cluster/box.yaml").write_text(
            PROFILE.format(
                storage=self.storage, apptainer=self.programs / "apptainer", architecture=architecture
            )
        )

    @property
    def environ(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "USER": "root",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "TUNEPLANE_CONFIG_DIR": str(self.site),
            "TMPDIR": str(self.base),
        }

    def git(self, *words: str) -> None:
        subprocess.run(
            ["git", *words], cwd=self.lab, env=self.environ, check=True, capture_output=True, timeout=30
        )

    def tp(
        self, *words: str | Path, cwd: Path | None = None, code: int = 0, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        done = run_tp(words, cwd=cwd or self.lab, env={**self.environ, **environ})
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def run(self, command: str, image: str, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        words = [command, "mlp", "--profile", "box:1", "--image", image, "--observability-url", URL, *more]
        return self.tp(*words, code=code)

    def images(self) -> list[Path]:
        return sorted((self.storage / "images").glob("*.sif"))

    def layers_served(self, image: Image) -> int:
        return sum(digest_of(image.layers[0]) in path for path in self.stub.paths())


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with stub_registry() as stub:
        yield Desk(tmp_path, stub)


@pytest.fixture
def image(desk: Desk) -> Image:
    made = Image([layer_of({"bin/bash": b"#!" + os.urandom(5000)})])
    desk.stub.add(made, "v1")
    return made


@pytest.mark.contract("C27")
def test_submit_freezes_a_tag_to_its_digest_in_the_jobspec(desk: Desk, image: Image) -> None:
    said = json.loads(desk.run("render", f"{desk.stub.host}/trainer:v1", "--json").stdout)
    job = json.loads((Path(said["folder"]) / "job.json").read_text())
    found = job["spec"]["container"]["image"]
    assert found["reference"] == f"{desk.stub.host}/trainer:v1"
    assert (found["source"], found["digest"]) == ("--image", image.digest)
    (file,) = desk.images()
    assert (found["path"], found["size_bytes"]) == (str(file), file.stat().st_size)
    assert found["sha256"] == digest_of(file.read_bytes()).removeprefix("sha256:")
    script = Path(said["script"]).read_text()
    assert f"# image       {desk.stub.host}/trainer:v1  {image.digest}  (apptainer)\n" in script
    assert f"# image file  {file}\n" in script
    assert "image" in desk.tp("job", "verify", said["run_id"]).stdout


def test_the_submit_before_and_after_the_tag_moved_are_two_images(desk: Desk, image: Image) -> None:
    name = f"{desk.stub.host}/trainer:v1"
    first = json.loads(desk.run("render", name, "--json").stdout)
    desk.stub.add(Image([layer_of({"bin/bash": b"newer"})]), "v1")
    second = json.loads(desk.run("render", name, "--json").stdout)
    read = [json.loads((Path(s["folder"]) / "job.json").read_text()) for s in (first, second)]
    digests = [job["spec"]["container"]["image"]["digest"] for job in read]
    assert digests[0] == image.digest != digests[1]
    assert len(desk.images()) == 2


@pytest.mark.contract("C30")
def test_validate_asks_the_registry_and_fetches_nothing(desk: Desk, image: Image) -> None:
    assert "nothing to fault" in desk.run("validate", f"{desk.stub.host}/trainer:v1").stdout
    done = desk.run("validate", f"{desk.stub.host}/trainer:v2", code=1)
    assert f"{desk.stub.host} has no tag v2 of trainer" in done.stderr
    assert desk.layers_served(image) == 0 and not (desk.storage / "images").exists()


def test_an_unknown_tag_is_told_together_with_all_other_faults(desk: Desk, image: Image) -> None:
    words = ["mlp", "--profile", "box:99", "--image", f"{desk.stub.host}/trainer:v2"]
    done = desk.tp("validate", *words, "--json", code=2)
    told = " ".join(fault["what"] for fault in json.loads(done.stdout)["faults"])
    assert "observability_url" in told and "99" in told and "has no tag v2 of trainer" in told


def test_a_dry_run_resolves_and_leaves_nothing_behind(desk: Desk, image: Image) -> None:
    before = {p for p in desk.base.rglob("*") if "lab" not in p.parts}
    printed = desk.run("submit", f"{desk.stub.host}/trainer:v1", "--dry-run").stdout
    assert image.digest in printed and desk.layers_served(image) == 0
    assert {p for p in desk.base.rglob("*") if "lab" not in p.parts} == before
    said = json.loads(desk.run("render", f"{desk.stub.host}/trainer:v1", "--json").stdout)
    script, run_id = Path(said["script"]).read_text(), said["run_id"]
    old_id = re.search(r"# run +(\S+)", printed)
    assert old_id is not None
    assert script == printed.replace(old_id[1], run_id), "and a later submit differs in the run id alone"


@pytest.mark.contract("C28")
def test_a_registry_that_is_not_allowed_is_never_asked(desk: Desk, image: Image) -> None:
    with stub_registry() as other:
        other.add(image, "v1")
        for command in ("validate", "render"):
            done = desk.run(command, f"{other.host}/trainer:v1", code=2)
            assert f"image registry {other.host} is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES" in done.stderr
        done = desk.tp("image", "pull", f"{other.host}/trainer:v1", "--profile", "box", code=2)
        assert (
            "is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES" in done.stderr
            and "help@example.org" in done.stderr
        )
        assert other.requests == []


def test_a_tag_that_cannot_be_asked_is_taken_as_last_seen_and_submit_says_that_it_may_have_moved(
    desk: Desk, image: Image
) -> None:
    name = f"{desk.stub.host}/trainer:v1"
    desk.tp("image", "pull", name, "--profile", "box")
    desk.stub.close()
    said = json.loads(desk.run("render", name, "--json").stdout)
    (notice,) = [n for n in said["notices"] if "may have moved" in n]
    assert image.digest in notice
    done = desk.run("render", f"{desk.stub.host}/other:v1", code=1)
    assert "cannot be asked: Connection refused" in done.stderr
    assert f"apptainer build NAME.sif docker://{desk.stub.host}/other:v1" in done.stderr


@pytest.mark.contract("C27")
def test_a_digest_runs_as_that_digest_or_not_at_all(desk: Desk, image: Image) -> None:
    pinned = f"{desk.stub.host}/trainer@{image.digest}"
    desk.stub.manifests[image.digest] = (image.kind, image.manifest.replace(b"amd64", b"amd65") + b" ")
    assert "gave bytes unlike their digest" in desk.run("render", pinned, code=1).stderr
    desk.stub.add(image, "v1")
    said = json.loads(desk.run("render", pinned, "--json").stdout)
    found = json.loads((Path(said["folder"]) / "job.json").read_text())["spec"]["container"]["image"]
    assert found["digest"] == image.digest and image.digest.replace(":", "-") in found["path"]
    Path(found["path"]).chmod(0o644)
    with Path(found["path"]).open("ab") as file:
        file.write(b"changed")
    done = subprocess.run(
        ["bash", said["script"]], env=desk.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0 and "is not the one that was submitted" in done.stdout + done.stderr


def test_the_password_is_nowhere_but_where_it_was(desk: Desk, image: Image) -> None:
    """By files and output; arguments and Slurm's own records are looked at on the testbed."""
    secret = "correct-horse-battery"
    desk.stub.login = ("alice", secret)
    coded = base64.b64encode(f"alice:{secret}".encode()).decode()
    login = desk.home / ".docker/config.json"
    login.parent.mkdir()
    login.write_text(json.dumps({"auths": {desk.stub.host: {"auth": coded}}}))
    said = [desk.run(command, f"{desk.stub.host}/trainer:v1") for command in ("validate", "render")]
    said.append(
        desk.tp("--debug", "image", "pull", f"{desk.stub.host}/trainer:v9", "--profile", "box", code=1)
    )
    written = [p for p in desk.base.rglob("*") if p.is_file() and p != login]
    assert len(written) > 20
    for needle in (secret, coded, *desk.stub.tokens):
        assert [p for p in written if needle.encode() in p.read_bytes()] == []
        assert not any(needle in done.stdout + done.stderr for done in said)


def test_pull_says_what_it_made_and_the_second_time_that_it_was_there(desk: Desk, image: Image) -> None:
    name = f"{desk.stub.host}/trainer:v1"
    first = desk.tp("image", "pull", name, "--profile", "box").stdout
    (file,) = desk.images()
    assert f"digest  {image.digest}" in first and f"file    {file}" in first and "made    now" in first
    second = json.loads(desk.tp("image", "pull", name, "--profile", "box", "--json").stdout)
    assert second["was_there"] is True and second["digest"] == image.digest and second["path"] == str(file)


def test_pull_for_a_profile_without_containers_or_of_a_file_is_refused(desk: Desk, image: Image) -> None:
    done = desk.tp("image", "pull", f"{desk.stub.host}/trainer:v1", "--profile", "local", code=2)
    assert "profile local runs without containers" in done.stderr
    done = desk.tp("image", "pull", "./x.sif", "--profile", "box", code=2)
    assert "is the name of a file" in done.stderr


def test_pull_takes_the_image_of_the_profiles_nodes(desk: Desk, image: Image) -> None:
    arm = Image([layer_of({"bin/bash": b"arm"})], "arm64")
    desk.stub.add(arm)
    desk.stub.add_index(index_of(image, arm), "multi")
    desk.configure(architecture="arm64")
    said = json.loads(
        desk.tp("image", "pull", f"{desk.stub.host}/trainer:multi", "--profile", "box", "--json").stdout
    )
    assert arm.digest.replace(":", "-") in said["path"]
    done = desk.tp("image", "pull", f"{desk.stub.host}/trainer:v1", "--profile", "box", code=2)
    assert "is not there for arm64" in done.stderr


def test_images_are_listed_by_name_and_removed_by_name_digest_or_file(desk: Desk, image: Image) -> None:
    other = Image([layer_of({"bin/bash": b"other"})])
    desk.stub.add(other, "v2")
    for tag in ("v1", "v2"):
        desk.tp("image", "pull", f"{desk.stub.host}/trainer:{tag}", "--profile", "box")
    listed = json.loads(desk.tp("image", "ls", "--json").stdout)
    assert {entry["manifest"] for entry in listed} == {image.digest, other.digest}
    table = desk.tp("image", "ls", "--profile", "box").stdout
    assert f"{desk.stub.host}/trainer:v1" in table and image.digest[:19] in table
    assert "no prepared image 'v1'" in desk.tp("image", "rm", "v1", code=2).stderr
    desk.tp("image", "rm", f"{desk.stub.host}/trainer:v1")
    desk.tp("image", "rm", other.digest[:20])
    assert desk.images() == [] and json.loads(desk.tp("image", "ls", "--json").stdout) == []


def test_an_image_that_a_run_will_start_is_not_removed_unless_forced(desk: Desk, image: Image) -> None:
    said = json.loads(desk.run("render", f"{desk.stub.host}/trainer:v1", "--json").stdout)
    done = desk.tp("image", "rm", f"{desk.stub.host}/trainer:v1", code=2)
    assert f"is started by {said['run_id']}" in done.stderr
    assert "nothing to remove" in desk.tp("image", "gc", "--days", "0", "--yes").stdout
    desk.tp("image", "rm", f"{desk.stub.host}/trainer:v1", "--force")
    assert desk.images() == []


@pytest.mark.parametrize(
    ("image_name", "said"),
    [
        ("alice/x:v1", "is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"),
        ("x y", "has no place in it"),
        ("", "it is empty"),
    ],
)
def test_a_name_that_pull_refuses_is_told_as_its_argument(desk: Desk, image_name: str, said: str) -> None:
    done = desk.tp("image", "pull", image_name, "--profile", "box", code=2)
    assert done.stderr.startswith("tp: IMAGE: image") and said in done.stderr


def test_an_image_that_a_run_starts_is_held_whichever_way_its_folder_is_reached(
    desk: Desk, image: Image
) -> None:
    name = f"{desk.stub.host}/trainer:v1"
    desk.run("render", name)
    link = desk.base / "link"
    link.symlink_to(desk.storage)
    profile = desk.site / "cluster/box.yaml"
    profile.write_text(profile.read_text().replace(str(desk.storage), str(link)))
    assert "is started by mlp-" in desk.tp("image", "rm", name, "--profile", "box", code=2).stderr
    assert "nothing to remove" in desk.tp("image", "gc", "--days", "0", "--profile", "box").stdout
    desk.tp("image", "pull", name, "--profile", "box")
    assert len(json.loads(desk.tp("image", "ls", "--json").stdout)) == 1, "one folder under two names"
    desk.tp("image", "rm", name, "--force")
    assert desk.images() == []


@pytest.mark.parametrize("way", ["docker://", "without the tag", "relative path", "tail of the name"])
def test_an_image_is_removed_by_whatever_pull_took_for_it(desk: Desk, image: Image, way: str) -> None:
    desk.stub.add(image, "latest")
    name = f"{desk.stub.host}/trainer"
    desk.tp("image", "pull", name, "--profile", "box")
    (file,) = desk.images()
    said = {
        "docker://": f"docker://{name}:latest",
        "without the tag": name,
        "relative path": os.path.relpath(file, desk.lab),
        "tail of the name": "trainer:latest",
    }[way]
    if way == "tail of the name":
        assert "no prepared image" in desk.tp("image", "rm", said, code=2).stderr
        return
    assert f"removed {file}" in desk.tp("image", "rm", said).stdout
    assert desk.images() == []


def test_an_image_of_the_sites_folder_that_others_used_is_not_removed_unless_forced(
    desk: Desk, image: Image, tmp_path: Path
) -> None:
    """Their runs cannot be looked at: the marks of their uses tell."""
    shared = tmp_path / "shared"
    shared.mkdir()
    desk.configure(more=f"image_cache: {shared}")
    name = f"{desk.stub.host}/trainer:v1"
    desk.tp("image", "pull", name, "--profile", "box")
    (file,) = shared.glob("*.sif")
    mark = shared / f".{file.name}.used.64999"
    for user, days_ago in ((64999, 2), (64998, 40)):
        path = shared / f".{file.name}.used.{user}"
        path.touch()
        os.chown(path, user, user)
        os.utime(path, (time.time() - days_ago * 86_400,) * 2)
    said = desk.tp("image", "rm", name, "--profile", "box", code=2).stderr
    assert f"{name} was used by user 64999 2 d ago" in said and file.exists()
    assert "64998" not in said
    mark.unlink()
    desk.tp("image", "rm", name, "--profile", "box")
    assert not file.exists()


def test_an_image_that_belongs_to_another_user_is_not_removed(
    desk: Desk, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuneplane.cli import image as command
    from tuneplane.images.folder import ImageFolder

    desk.tp("image", "pull", f"{desk.stub.host}/trainer:v1", "--profile", "box")
    folder = ImageFolder(desk.storage / "images")
    (prepared,) = folder.images()
    monkeypatch.setattr(os, "geteuid", lambda: 64999)
    for force in (False, True):
        (fault,) = command._removal_faults(folder, prepared, {}, force)
        assert fault.what.endswith(f"{prepared.path} belongs to root")


def test_gc_lists_first_and_removes_when_told(desk: Desk, image: Image) -> None:
    desk.tp("image", "pull", f"{desk.stub.host}/trainer:v1", "--profile", "box")
    (file,) = desk.images()
    assert "nothing to remove" in desk.tp("image", "gc").stdout, "it was used a moment ago"
    listed = desk.tp("image", "gc", "--days", "0").stdout
    assert str(file) in listed and "to be freed: say the same with --yes" in listed and file.exists()
    assert "freed" in desk.tp("image", "gc", "--days", "0", "--yes").stdout
    assert [p for p in (desk.storage / "images").iterdir() if not p.name.endswith("used.0")] == []


def test_gc_clears_what_interrupted_pulls_left_and_spares_what_is_being_fetched(
    desk: Desk, image: Image
) -> None:
    fake_apptainer(desk.programs, fail="no such luck")
    desk.tp("image", "pull", f"{desk.stub.host}/trainer:v1", "--profile", "box", code=1)
    (work,) = (desk.storage / "images").glob(".*.work.*")
    assert "nothing to remove" in desk.tp("image", "gc", "--yes").stdout, "it may be taken up again today"
    long_ago = time.time() - 3 * 86_400
    for path in (work, *work.rglob("*")):
        os.utime(path, (long_ago, long_ago))
    assert str(work) in desk.tp("image", "gc", "--yes").stdout
    assert not work.exists()


def test_a_long_step_is_told_by_lines_where_there_is_no_terminal(desk: Desk, image: Image) -> None:
    fake_apptainer(desk.programs, sleep=2.5)
    done = desk.tp("image", "pull", f"{desk.stub.host}/trainer:v1", "--profile", "box")
    assert done.stderr == "converting with apptainer\n"


def test_a_terminal_gets_a_bar_and_a_clean_screen_afterwards(desk: Desk, image: Image) -> None:
    fake_apptainer(desk.programs, sleep=2.5)
    words = [sys.executable, "-m", "tuneplane.cli.main", "image", "pull", f"{desk.stub.host}/trainer:v1"]
    master, slave = os.openpty()
    process = subprocess.Popen(
        [*words, "--profile", "box"],
        cwd=desk.lab,
        env={**desk.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:
            break
        if not block:
            break
        shown += block
    out, _ = process.communicate(timeout=30)
    os.close(master)
    assert process.returncode == 0 and "made    now" in out
    assert b"converting with apptainer" in shown
    assert b"\x1b[?25h" in shown, "the cursor is back"


def test_a_site_folder_that_nodes_do_not_see_is_refused(desk: Desk, image: Image) -> None:
    desk.configure(more=f"image_cache: {desk.base}/elsewhere")
    slurm = (desk.site / "cluster/box.yaml").read_text().replace("local", "slurm")
    slurm = slurm.replace(
        "gpus_per_node", f"shared: [{desk.storage}]\npython: /usr/bin/python3\ngpus_per_node"
    )
    (desk.site / "cluster/box.yaml").write_text(slurm)
    done = desk.run("validate", f"{desk.stub.host}/trainer:v1", code=2)
    assert "site.image_cache" in done.stderr and "is outside what the site calls shared" in done.stderr


def test_the_sites_folder_is_used_where_there_is_one(desk: Desk, image: Image) -> None:
    (desk.base / "shared").mkdir()
    desk.configure(more=f"image_cache: {desk.base}/shared")
    desk.tp("image", "pull", f"{desk.stub.host}/trainer:v1", "--profile", "box")
    assert len(list((desk.base / "shared").glob("*.sif"))) == 1 and desk.images() == []
    assert json.loads(desk.tp("image", "ls", "--json").stdout)[0]["shared"] is True


SRUN = """#!/usr/bin/env python3
import json, os, sys
words = sys.argv[1:]
with open({log!r}, "a") as file:
    file.write(json.dumps([words, sorted(os.environ)]) + "\\n")
while words[0].startswith("-"):
    words.pop(0)
{before}
os.execvp(words[0], words)
"""


def site_with_jobs(desk: Desk, before: str = "") -> Path:
    """A Slurm profile whose images are prepared by a job; srun runs its command right here."""
    desk.configure(more='image_job: ["--partition=online", "--cpus-per-task=2"]')
    text = (desk.site / "cluster/box.yaml").read_text().replace("scheduler: local", "scheduler: slurm")
    (desk.site / "cluster/box.yaml").write_text(text)
    log = desk.base / "srun-calls"
    program(desk.base / "slurm", "srun", SRUN.format(log=str(log), before=before))
    return log


def by_job(
    desk: Desk, command: str, image: str, *more: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    words = [command, "mlp", "--profile", "box:1", "--image", image, "--observability-url", URL, *more]
    path = f"{desk.base}/slurm:/usr/local/bin:/usr/bin:/bin"
    return desk.tp(*words, code=code, PATH=path, HF_TOKEN="hf_secret", SLURM_JOB_ID="7", SBATCH_QOS="x")


def test_a_site_may_have_images_prepared_by_a_job(desk: Desk, image: Image) -> None:
    log = site_with_jobs(desk)
    name = f"{desk.stub.host}/trainer:v1"
    said = json.loads(by_job(desk, "render", name, "--json").stdout)
    found = json.loads((Path(said["folder"]) / "job.json").read_text())["spec"]["container"]["image"]
    (file,) = desk.images()
    assert (found["path"], found["digest"], found["reference"]) == (str(file), image.digest, name)
    assert found["sha256"] == digest_of(file.read_bytes()).removeprefix("sha256:")
    assert (found["size_bytes"], found["modified_s"]) == (file.stat().st_size, int(file.stat().st_mtime))
    ((words, names),) = [json.loads(line) for line in log.read_text().splitlines()]
    assert words[:6] == [
        *("--quiet", "--nodes=1", "--ntasks=1", "--job-name=tp-image"),
        *("--partition=online", "--cpus-per-task=2"),
    ]
    assert words[8:] == [
        *("tuneplane.cli.main", "image", "pull", f"{name}@{image.digest}"),
        *("--profile", "box", "--here", "--json"),
    ]
    assert {"HOME", "TUNEPLANE_CONFIG_DIR"} <= set(names)
    assert not {"HF_TOKEN", "SLURM_JOB_ID", "SBATCH_QOS"} & set(names)
    by_job(desk, "render", name)
    assert len(log.read_text().splitlines()) == 1, "the second time it is there"
    assert name in desk.tp("image", "ls", "--profile", "box").stdout


def test_a_job_that_fails_is_told_by_its_own_words(desk: Desk, image: Image) -> None:
    site_with_jobs(desk, before='sys.exit("srun: error: invalid partition specified: online")')
    done = by_job(desk, "render", f"{desk.stub.host}/trainer:v1", code=1)
    assert "the job that prepares the image failed: srun: error: invalid partition" in done.stderr
    site_with_jobs(desk, before='print("nonsense"); sys.exit(0)')
    assert "said 'nonsense" in by_job(desk, "render", f"{desk.stub.host}/trainer:v1", code=1).stderr
    failing = (
        'sys.exit("tp: r.example: has no tag v1\\n  → is it spelt so there?\\n'
        'srun: error: n1: task 0: Exited with exit code 1\\n")'
    )
    site_with_jobs(desk, before=failing)
    done = by_job(desk, "render", f"{desk.stub.host}/trainer:v1", code=1)
    assert done.stderr.endswith(
        "tp: srun: the job that prepares the image failed: r.example: has no tag v1\n"
        "  → is it spelt so there?\n"
    )
    assert not (desk.storage / "runs").exists()


def test_where_only_the_job_reaches_the_registry_it_freezes_the_tag_too(desk: Desk, image: Image) -> None:
    """The registry's name is known inside the job alone."""
    host = f"registry.test:{desk.stub.port}"
    log = site_with_jobs(desk, before="os.environ['PYTHONPATH'] = os.environ['REACHING']")
    site = desk.site / "site/default.yaml"
    site.write_text(site.read_text().replace(desk.stub.host, host) + f'insecure_registries: ["{host}"]\n')
    reaching = desk.base / "reaching"
    reaching.mkdir()
    (reaching / "sitecustomize.py").write_text(
        "import socket\nreal = socket.getaddrinfo\n"
        "known = lambda host: '127.0.0.1' if host == 'registry.test' else host\n"
        "socket.getaddrinfo = lambda host, *rest, **more: real(known(host), *rest, **more)\n"
    )
    program(desk.base / "slurm", "sbatch", "#!/bin/sh\nexit 1\n")
    path = f"{desk.base}/slurm:/usr/local/bin:/usr/bin:/bin"
    more = {"PATH": path, "REACHING": f"{reaching}:{ROOT}"}
    words = ["mlp", "--profile", "box:1", "--image", f"{host}/trainer:v1", "--observability-url", URL]
    done = desk.tp("validate", *words, **more)
    assert f"https://{host} cannot be asked" in done.stderr and "a job freezes the name" in done.stderr
    printed = desk.tp("submit", *words, "--dry-run", **more).stdout
    assert f"# image       {host}/trainer:v1  frozen and prepared by a job at submit  (apptainer)" in printed
    assert not log.exists() and not (desk.storage / "images").exists()
    said = json.loads(desk.tp("render", *words, "--json", **more).stdout)
    found = json.loads((Path(said["folder"]) / "job.json").read_text())["spec"]["container"]["image"]
    assert found["digest"] == image.digest and Path(found["path"]).is_file()


@pytest.mark.parametrize("words", [["--help"], ["job", "ls"], ["image", "--help"]])
def test_commands_that_need_no_registry_load_none_of_it(desk: Desk, words: list[str]) -> None:
    code = f"import sys; sys.argv = ['tp', *{words!r}]\nfrom tuneplane.cli.main import main\ntry: main()\n"
    code += "except SystemExit: print(sorted({'urllib.request', 'ssl', 'rich', 'http.client'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=desk.environ,
        cwd=desk.lab,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"
