"""Images of a real registry on the real Slurm: pulled once by two users at once, run as what was submitted.

The registry runs on the testbed's login host, by plain HTTP that the site allows; nodes never ask it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from registry_server import Registry, run_registry, write_push
from registry_stub import Image, digest_of, layer_of
from slurm_lab import URL, Run, SlurmLab, unique
from test_slurm_secrets import files_with
from testbed_client import PROGRAM, Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(240), pytest.mark.xdist_group("images")]

SMALL_SYSTEM = """
set -eu
programs="/usr/bin/bash /usr/bin/sh /usr/bin/env /usr/bin/cat /usr/bin/sleep /usr/bin/ls /bin/sh"
libraries=$(ldd $programs | grep -o '/[^ )]*' | grep -v : | sort -u)
tar -C / -h -czf "$1" $(printf '%s\\n' $programs $libraries etc/passwd etc/group | sed 's,^/,,' | sort -u)
"""
"""Run in the testbed's minimal image: a layer of a few MB with what a container needs to start bash."""


WATCH_PROCESSES = """
import json, os, sys, time
seen = {"cmdline": set(), "environ": set()}
while not os.path.exists(sys.argv[1]):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name, found in seen.items():
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    found.add(file.read())
            except OSError:
                pass
    time.sleep(0.005)
text = {name: [s.decode("utf-8", "replace").replace("\\0", " ") for s in found] for name, found in seen.items()}
print(json.dumps(text))
"""
"""Arguments and environment of every process on every host, until a file appears."""


@dataclass
class Shop:
    """A registry on the login host, with and without a login, and images to put into it."""

    bed: Testbed
    registry: Registry
    guarded: Registry
    base_layer: bytes

    def image(self, word: str, *more: bytes) -> Image:
        """An image whose /etc/trainer holds `word`."""
        layers = [self.base_layer, layer_of({"etc/trainer": f"{word}\n".encode()}), *more]
        return Image(layers, environment=["PATH=/usr/local/bin:/usr/bin:/bin"])

    def push(self, registry: Registry, name: str, tag: str, image: Image) -> str:
        """Put an image there; returns `host/name`."""
        folder = registry.folder / f"push-{secrets.token_hex(4)}"
        described = write_push(folder, name, tag, image.kind, image.manifest, image.blobs)
        assert registry.push(described) == image.digest
        return f"{registry.address}/{name}"


@pytest.fixture(scope="module")
def shop(testbed: Testbed) -> Iterator[Shop]:
    folder = testbed.state / f"registry-{secrets.token_hex(4)}"
    port = 20_000 + int(secrets.token_hex(2), 16) % 10_000
    enter = ["env", f"TUNEPLANE_TESTBED_DIR={testbed.state}", str(PROGRAM), "exec", "--user", "root", "--"]
    login = ("alice", f"pw-{secrets.token_hex(12)}")
    layer = testbed.home("alice") / f"layer-{secrets.token_hex(4)}.tgz"
    build = ["apptainer", "--quiet", "exec", "-B", str(testbed.home("alice")), str(testbed.image)]
    testbed.exec([*build, "bash", "-c", SMALL_SYSTEM, "bash", str(layer)])
    with (
        run_registry(folder / "open", f"10.77.0.1:{port}", enter=enter) as registry,
        run_registry(folder / "guarded", f"10.77.0.1:{port + 1}", login, enter) as guarded,
    ):
        yield Shop(testbed, registry, guarded, layer.read_bytes())
    layer.unlink()
    shutil.rmtree(folder)


def at_site(shop: Shop, user: str, cache: Path | None = None) -> SlurmLab:
    """A lab of a user at a site that lists the registries, with an experiment that shows what is in the image."""
    lab = SlurmLab(shop.bed, user=user, experiment=unique("image"))
    site = lab.own_site()
    names = f'["{shop.registry.address}", "{shop.guarded.address}"]'
    text = (site / "site/default.yaml").read_text()
    text = re.sub(
        r"allowed_registries: .*", f"allowed_registries: {names}\ninsecure_registries: {names}", text
    )
    lab.write(str(site / "site/default.yaml"), text + (f"image_cache: {cache}\n" if cache else ""))
    lab.train_sh('echo "in the image: $(cat /etc/trainer)"')
    lab.commit()
    return lab


def words(image: str) -> list[str]:
    return ["--profile", "h200:1", "--observability-url", URL, "--image", image]


def shared_folder(shop: Shop, mode: int = 0o1777, user: str = "root") -> Path:
    folder = shop.bed.shared / f"images-{secrets.token_hex(4)}"
    folder.mkdir()
    folder.chmod(mode)
    if user != "root":
        shop.bed.give(folder, user)
    return folder


def image_of(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.folder / "job.json").read_text())["spec"]["container"]["image"]
    return found


def test_two_users_at_once_by_tag_and_by_digest_make_one_conversion_and_both_runs_start(shop: Shop) -> None:
    image = shop.image("first")
    name = shop.push(shop.registry, "team/once", "v1", image)
    folder = shared_folder(shop)
    labs = [at_site(shop, user, folder) for user in ("alice", "bob")]
    asked = [f"{name}:v1", f"{name}@{image.digest}"]
    with ThreadPoolExecutor() as pool:
        runs = list(
            pool.map(lambda pair: pair[0].submit_words(*words(pair[1])), zip(labs, asked, strict=True))
        )
    for run in runs:
        run.wait("COMPLETED")
        assert "in the image: first" in run.log()
    (file,) = folder.glob("*.sif")
    assert {image_of(run)["path"] for run in runs} == {str(file)}
    assert {image_of(run)["digest"] for run in runs} == {image.digest}
    assert file.stat().st_mode & 0o777 == 0o444
    assert [len(shop.registry.fetched(digest_of(layer))) for layer in image.layers] == [1, 1]
    assert sorted(p.name for p in folder.iterdir() if "turn" in p.name or "work" in p.name) == []


@pytest.mark.contract("C27")
def test_a_tag_that_moves_between_submit_and_start_changes_nothing(shop: Shop) -> None:
    old, new = shop.image("before"), shop.image("after")
    name = shop.push(shop.registry, "team/moving", "v1", old)
    lab = at_site(shop, "alice")
    said = json.loads(lab.sh(["tp", "render", lab.experiment, *words(f"{name}:v1"), "--json"]).stdout)
    shop.push(shop.registry, "team/moving", "v1", new)
    lab.tp("submit", "--run", said["run_id"])
    run = Run(lab, said["run_id"], Path(said["folder"]), "", [])
    run.wait("COMPLETED")
    assert "in the image: before" in run.log() and image_of(run)["digest"] == old.digest
    again = lab.submit_words(*words(f"{name}:v1"))
    again.wait("COMPLETED")
    assert "in the image: after" in again.log() and image_of(again)["digest"] == new.digest


@pytest.mark.contract("C27")
def test_bytes_unlike_their_digest_are_refused_and_no_run_is_left(shop: Shop) -> None:
    image = shop.image("rotten", layer_of({"opt/x": os.urandom(200_000)}))
    name = shop.push(shop.registry, "team/rotten", "v1", image)
    stored = shop.registry.stored(digest_of(image.layers[-1]))
    data = bytearray(stored.read_bytes())
    data[5000] ^= 1
    stored.write_bytes(data)
    lab = at_site(shop, "alice")
    for asked in (f"{name}:v1", f"{name}@{image.digest}"):
        said = lab.refused("submit", lab.experiment, *words(asked), code=1)
        assert f"gave bytes unlike their digest for {digest_of(image.layers[-1])}" in said
    assert lab.sh(["tp", "image", "ls", "--json"]).stdout.count(image.digest) == 0


def processes_of(shop: Shop, needle: str) -> list[str]:
    """Argument lists of all processes of the testbed that hold `needle`."""
    done = shop.bed.exec(["ps", "-eww", "-o", "args="], user="root")
    return [line for line in done.stdout.splitlines() if needle in line and "ps -eww" not in line]


def test_a_pull_killed_while_it_converts_leaves_no_file_and_fetches_nothing_twice(shop: Shop) -> None:
    image = shop.image("killed", layer_of({"opt/x": os.urandom(40_000_000)}))
    name = shop.push(shop.registry, "team/killed", "v1", image)
    lab = at_site(shop, "alice")
    key = image.digest.replace(":", "-")
    pull = ["tp", "image", "pull", f"{name}:v1", "--profile", "h200"]
    script = 'echo $$ >"$1"; shift; exec "$@"'
    pid_file = lab.base / "pid"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(
            lab.sh, ["sh", "-c", script, "sh", str(pid_file), *pull], check=False, timeout=120
        )
        deadline = time.monotonic() + 60
        while not processes_of(shop, f"{key}.sif.work"):
            assert time.monotonic() < deadline and not first.done(), first
            time.sleep(0.05)
        lab.sh(["kill", "-KILL", pid_file.read_text().strip()])
        assert first.result().returncode == -signal.SIGKILL or first.result().returncode == 137
    folder = shop.bed.home("alice") / "tuneplane/images"
    assert list(folder.glob(f"{key}.sif")) == []
    deadline = time.monotonic() + 20
    while processes_of(shop, key):
        assert time.monotonic() < deadline, processes_of(shop, key)
        time.sleep(0.1)
    lab.tp(*pull[1:])
    assert (folder / f"{key}.sif").is_file()
    own = image.layers[1:]  # the first is in every image of this module
    assert [shop.registry.fetched(digest_of(layer)) for layer in own] == [[len(layer)] for layer in own]
    run = lab.submit_words(*words(f"{name}:v1"))
    run.wait("COMPLETED")
    assert "in the image: killed" in run.log()


@pytest.mark.contract("C11")
def test_the_password_of_a_registry_is_nowhere_but_in_the_users_own_file(shop: Shop, tmp_path: Path) -> None:
    assert shop.guarded.login is not None
    user, password = shop.guarded.login
    coded = base64.b64encode(f"{user}:{password}".encode()).decode()
    image = shop.image("private", layer_of({"opt/x": os.urandom(20_000_000)}))
    name = shop.push(shop.guarded, "team/private", "v1", image)
    for path in shop.guarded.folder.glob("push-*/login"):
        path.unlink()
    lab = at_site(shop, "alice", shared_folder(shop))
    lab.env["DOCKER_CONFIG"] = str(lab.base / "docker")
    said = lab.refused("submit", lab.experiment, *words(f"{name}:v1"), code=1)
    assert "denies access to" in said and "(without a login)" in said
    login = lab.base / "docker/config.json"
    lab.write(str(login), json.dumps({"auths": {shop.guarded.address: {"auth": coded}}}))
    ended = str(lab.base / "ended")
    with ThreadPoolExecutor() as pool:
        watch = ["/usr/bin/python3", "-I", "-c", WATCH_PROCESSES, ended]
        watched = pool.submit(shop.bed.exec, watch, user="root", timeout=120)
        try:
            done = lab.sh(
                ["tp", "--debug", "submit", lab.experiment, *words(f"{name}:v1"), "--json"], timeout=120
            )
            value = json.loads(done.stdout)
            run = Run(lab, value["run_id"], Path(value["folder"]), value["job_id"], value["notices"])
            slurm = lab.sh(["scontrol", "show", "job", "-dd", run.job_id]).stdout
            run.wait("COMPLETED")
        finally:
            lab.sh(["touch", ended])
        seen = json.loads(watched.result().stdout)
    assert "in the image: private" in run.log()
    assert [line for line in seen["cmdline"] if "apptainer build" in line], (
        "the watch saw nothing of the build"
    )
    assert [text for text in seen["environ"] if "APPTAINER_TMPDIR=" in text]
    printed = done.stdout + done.stderr + run.log() + run.slurm_output() + slurm + said
    for secret in (password, coded):
        assert secret not in printed
        assert [text for text in (*seen["cmdline"], *seen["environ"]) if secret in text] == []
    patterns = tmp_path / "patterns"
    assert set(files_with([password, coded], shop.bed.state, patterns)) == {login}
    assert Path(image_of(run)["path"]).parent == shop.bed.home("alice") / "tuneplane/images", (
        "what only her login can read does not lie in the site's folder"
    )


def test_a_folder_that_only_its_administrator_writes_is_read_by_all(shop: Shop) -> None:
    image, other = shop.image("from the site"), shop.image("bob's own")
    name = shop.push(shop.registry, "team/site", "v1", image)
    shop.push(shop.registry, "team/site", "v2", other)
    folder = shared_folder(shop, 0o755, "carol")
    admin, bob = at_site(shop, "carol", folder), at_site(shop, "bob", folder)
    admin.tp("image", "pull", f"{name}:v1", "--profile", "h200")
    run = bob.submit_words(*words(f"{name}:v1"))
    run.wait("COMPLETED")
    assert "in the image: from the site" in run.log() and Path(image_of(run)["path"]).parent == folder
    run = bob.submit_words(*words(f"{name}:v2"))
    run.wait("COMPLETED")
    assert Path(image_of(run)["path"]).parent == shop.bed.home("bob") / "tuneplane/images"
    assert "nothing to remove" in bob.tp("image", "gc", "--days", "3650")


def test_an_image_that_was_exchanged_after_submit_is_not_started(shop: Shop) -> None:
    name = shop.push(shop.registry, "team/exchanged", "v1", shop.image("exchanged"))
    lab = at_site(shop, "alice")
    said = json.loads(lab.sh(["tp", "render", lab.experiment, *words(f"{name}:v1"), "--json"]).stdout)
    run = Run(lab, said["run_id"], Path(said["folder"]), "", [])
    path = image_of(run)["path"]
    lab.sh(["sh", "-c", 'chmod u+w "$1" && cat "$2" >"$1"', "sh", path, str(shop.bed.image)])
    lab.tp("submit", "--run", run.run_id, code=0)
    run.wait("FAILED")
    assert f"the image {path} is not the one that was submitted" in run.log() + run.slurm_output()
    lab.sh(["rm", "-f", path])


def test_a_layer_that_would_leave_its_folder_does_not(shop: Shop) -> None:
    """Whether the runtime refuses it or keeps it inside is its own affair; that nothing gets out is not."""
    mark = f"evil-{secrets.token_hex(4)}"
    climbing = layer_of({f"{'../' * 12}tmp/{mark}": b"x", f"/tmp/{mark}-absolute": b"x"})
    name = shop.push(shop.registry, "team/climbing", "v1", shop.image("climbing", climbing))
    lab = at_site(shop, "alice")
    lab.sh(["tp", "image", "pull", f"{name}:v1", "--profile", "h200"], check=False)
    found = lab.sh(["sh", "-c", 'ls -d /tmp/"$1"* /"$1"* ~/"$1"* 2>/dev/null', "sh", mark], check=False)
    assert found.stdout == ""
    assert lab.sh(["sh", "-c", "ls -d /tmp/tuneplane-image-*"], check=False).stdout == ""


def test_a_run_needs_no_registry_once_its_image_is_there(shop: Shop) -> None:
    """The registry is gone when the run is submitted: a digest needs it not, a tag is told to be as last seen."""
    image = shop.image("offline")
    folder = shop.registry.folder.parent / "short-lived"
    port = int(shop.registry.address.rpartition(":")[2]) + 2
    with contextlib.ExitStack() as stack:
        registry = stack.enter_context(run_registry(folder, f"10.77.0.1:{port}", enter=shop.registry.enter))
        name = shop.push(registry, "team/offline", "v1", image)
        lab = at_site(shop, "alice")
        site = lab.base / "site-config/site/default.yaml"
        lab.write(str(site), site.read_text().replace(shop.guarded.address, registry.address))
        lab.tp("image", "pull", f"{name}:v1", "--profile", "h200")
    for asked, notices in ((f"{name}@{image.digest}", 0), (f"{name}:v1", 1)):
        run = lab.submit_words(*words(asked))
        assert len([n for n in run.notices if "The tag may have moved since" in n]) == notices, run.notices
        run.wait("COMPLETED")
        assert "in the image: offline" in run.log()


@pytest.fixture
def inner(shop: Shop) -> Iterator[Registry]:
    """A registry that nodes reach and the login host does not: it has no route there."""
    folder = shop.registry.folder.parent / "inner"
    port = int(shop.registry.address.rpartition(":")[2]) + 3
    bed = shop.bed
    bed.node_exec("n1", ["ip", "addr", "replace", "10.78.0.1/32", "dev", "lo"])
    for node in bed.nodes[1:]:
        bed.node_exec(node, ["ip", "route", "replace", "10.78.0.1/32", "via", "10.77.0.11"])
    enter = [
        "env",
        f"TUNEPLANE_TESTBED_DIR={bed.state}",
        str(PROGRAM),
        "node-exec",
        "n1",
        "--user",
        "root",
        "--",
    ]
    with run_registry(folder, f"10.78.0.1:{port}", enter=enter) as registry:
        yield registry
    bed.node_exec("n1", ["ip", "addr", "del", "10.78.0.1/32", "dev", "lo"])
    for node in bed.nodes[1:]:
        bed.node_exec(node, ["ip", "route", "del", "10.78.0.1/32"])


def at_offline_site(shop: Shop, inner: Registry) -> SlurmLab:
    lab = at_site(shop, "alice")
    site = lab.base / "site-config/site/default.yaml"
    text = site.read_text().replace(shop.guarded.address, inner.address)
    lab.write(str(site), text + 'image_job: ["--partition=gpu", "--cpus-per-task=2"]\n')
    return lab


def test_where_login_hosts_reach_no_registry_a_job_prepares_the_image(shop: Shop, inner: Registry) -> None:
    image = shop.image("by a job")
    name = shop.push(inner, "team/inner", "v1", image)
    lab = at_offline_site(shop, inner)
    said = lab.tp("validate", lab.experiment, *words(f"{name}:v1"))
    assert "cannot be asked: Network is unreachable" in said and "a job freezes the name" in said
    run = lab.submit_words(*words(f"{name}:v1"))
    run.wait("COMPLETED")
    assert "in the image: by a job" in run.log()
    assert image_of(run)["digest"] == image.digest and image_of(run)["reference"] == f"{name}:v1"
    said = lab.refused("submit", lab.experiment, *words(f"{name}:v9"), code=1)
    assert f"the job that prepares the image failed: {name}:v9: {inner.address} has no tag v9" in said


def test_a_job_that_prepares_an_image_ends_with_the_command_that_waits_for_it(
    shop: Shop, inner: Registry
) -> None:
    image = shop.image("given up", layer_of({"opt/x": os.urandom(40_000_000)}))
    name = shop.push(inner, "team/given-up", "v1", image)
    lab = at_offline_site(shop, inner)
    pid_file = lab.base / "pid"
    pull = ["tp", "image", "pull", f"{name}:v1", "--profile", "h200"]
    # A shell that starts others in the background has them ignore SIGINT; Python puts it back.
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"
    queue = ["squeue", "-h", "--name=tp-image", "--user=alice", "-o", "%T"]
    with ThreadPoolExecutor() as pool:
        argv = ["/usr/bin/python3", "-c", start, str(pid_file), *pull]
        waiting = pool.submit(lab.sh, argv, check=False, timeout=120)
        deadline = time.monotonic() + 60
        while not processes_of(shop, f"{image.digest.replace(':', '-')}.sif.work"):
            assert time.monotonic() < deadline and not waiting.done(), waiting
            time.sleep(0.05)
        assert lab.sh(queue).stdout.split() == ["RUNNING"]
        lab.sh(["kill", "-INT", pid_file.read_text().strip()])
        assert waiting.result().returncode == 130, waiting.result()
    deadline = time.monotonic() + 30
    while lab.sh(queue).stdout.strip() or processes_of(shop, image.digest.replace(":", "-")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not (shop.bed.home("alice") / f"tuneplane/images/{image.digest.replace(':', '-')}.sif").exists()
    lab.tp(*pull[1:])
