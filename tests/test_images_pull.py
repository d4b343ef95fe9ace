"""From a name in a registry to one file on disk: frozen, resumed, checked, converted once, never half there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_lab import ImageLab
from registry_stub import Handler, Image, Stub, digest_of, fake_apptainer, index_of, layer_of, stub_registry
from small_disk import run_on_small_disk
from test_images_registry import docker_login

from tuneplane.images import download
from tuneplane.images.distribution import Refused
from tuneplane.images.folder import ImageFolder
from tuneplane.images.transport import CannotAsk
from tuneplane.kernel.errors import OperationError, UsageError

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_registry() as found:
        yield found


@pytest.fixture
def lab(tmp_path: Path) -> ImageLab:
    return ImageLab(tmp_path)


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that do not compress, so that a layer is as large as it looks."""
    return random.Random(seed).randbytes(size)


def image_of(*sizes: int, **more: object) -> Image:
    layers = [layer_of({f"opt/{number}": noise(size, number)}) for number, size in enumerate(sizes)]
    return Image(layers, **more)  # type: ignore[arg-type]


def fault(error: pytest.ExceptionInfo[OperationError] | pytest.ExceptionInfo[UsageError]) -> str:
    return str(error.value.faults[0])


def test_a_tag_becomes_a_file_named_by_its_digest(stub: Stub, lab: ImageLab) -> None:
    image = image_of(1000, 2000)
    name = stub.add(image, "v1")
    prepared = lab.pull(f"{name}:v1")
    assert prepared.path == lab.folder / f"{image.digest.replace(':', '-')}.sif"
    assert prepared.record.sha256 == hashlib.sha256(prepared.path.read_bytes()).hexdigest()
    assert image.digest.encode() in prepared.path.read_bytes(), "it was built from this manifest"
    assert all(layer in prepared.path.read_bytes() for layer in image.layers)
    assert stat.S_IMODE(prepared.path.stat().st_mode) == 0o444
    assert [f for f in lab.files() if "work" in f or "turn" in f] == []
    assert list((lab.base / "scratch").iterdir()) == []


def test_freezing_fetches_no_layer_and_leaves_nothing_behind(stub: Stub, lab: ImageLab) -> None:
    image = image_of(1000)
    name = stub.add(image, "v1")
    frozen = lab.freeze(f"{name}:v1")
    assert frozen.digest == frozen.manifest == image.digest and frozen.prepared is None
    assert [r.path.rpartition("/")[2] for r in stub.layers_asked()] == [digest_of(image.config)]
    assert not lab.folder.exists() and lab.builds() == []


def test_the_second_time_nothing_is_fetched_and_nothing_built(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1")
    first = lab.pull(f"{name}:v1")
    del stub.requests[:]
    second = lab.pull(f"{name}:v1")
    assert (second.path, second.record) == (first.path, first.record)
    assert [r.method for r in stub.requests if "token" not in r.path] == ["HEAD"]
    assert len(lab.builds()) == 1


def test_another_tag_of_the_same_image_is_the_same_file(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1", "latest")
    assert lab.pull(f"{name}:v1").path == lab.pull(f"{name}").path
    assert len(lab.builds()) == 1


def test_a_tag_that_moved_is_a_new_file_and_the_old_one_stays(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1")
    before = lab.freeze(f"{name}:v1")
    stub.add(image_of(1500), "v1")
    old, new = lab.pull(f"{name}@{before.digest}"), lab.pull(f"{name}:v1")
    assert old.record.manifest == before.manifest != new.record.manifest
    assert old.path.exists() and new.path.exists()


def test_what_was_frozen_is_fetched_though_the_tag_moves_meanwhile(stub: Stub, lab: ImageLab) -> None:
    from tuneplane.images.pull import fetch

    image = image_of(1000)
    frozen = lab.freeze(f"{stub.add(image, 'v1')}:v1")
    stub.add(image_of(1500), "v1")
    assert fetch(frozen, lab.place).record.manifest == image.digest


def test_a_digest_that_is_on_disk_is_taken_without_asking_anybody(stub: Stub, lab: ImageLab) -> None:
    image = image_of(1000)
    name = stub.add(image, "v1")
    lab.pull(f"{name}:v1")
    stub.close()
    assert lab.pull(f"{name}@{image.digest}").record.manifest == image.digest


def test_of_an_index_the_nodes_image_is_taken_and_its_own_digest_is_known(stub: Stub, lab: ImageLab) -> None:
    amd, arm = image_of(1000), image_of(2000, architecture="arm64")
    for image in (amd, arm):
        stub.add(image)
    digest = stub.add_index(index_of(amd, arm), "v1")
    frozen = lab.freeze(f"{stub.host}/trainer:v1")
    assert (frozen.digest, frozen.manifest) == (digest, amd.digest)
    prepared = lab.pull(f"{stub.host}/trainer:v1")
    assert (prepared.record.index, prepared.record.architecture) == (digest, "amd64")
    lab.architecture = "arm64"
    assert lab.pull(f"{stub.host}/trainer:v1").record.manifest == arm.digest
    stub.close()
    for architecture, image in (("amd64", amd), ("arm64", arm)):
        lab.architecture = architecture
        assert lab.pull(f"{stub.host}/trainer@{digest}").record.manifest == image.digest


def test_an_architecture_that_is_not_there_is_told_with_those_that_are(stub: Stub, lab: ImageLab) -> None:
    arm, ppc = image_of(10, architecture="arm64"), image_of(20, architecture="ppc64le")
    stub.add(arm, "arm")
    stub.add_index(index_of(arm, ppc), "v1")
    with pytest.raises(UsageError) as error:
        lab.freeze(f"{stub.host}/trainer:v1")
    assert "is not there for amd64, which the nodes are: it is there for linux/arm64, linux/ppc64le" in fault(
        error
    )
    assert "cluster.architecture" in fault(error)
    with pytest.raises(UsageError) as error:
        lab.freeze(f"{stub.host}/trainer:arm")
    assert "it is there for arm64 alone" in fault(error)


def test_what_is_no_image_is_refused_as_the_users_mistake(stub: Stub, lab: ImageLab) -> None:
    for key in ("chart", digest_of(b"<html>")):
        stub.manifests[key] = ("application/vnd.oci.image.manifest.v1+json", b"<html>")
    with pytest.raises(UsageError, match="cannot be used: the answer is no manifest"):
        lab.freeze(f"{stub.host}/trainer:chart")


def test_a_configuration_unlike_its_digest_is_refused(stub: Stub, lab: ImageLab) -> None:
    image = image_of(10)
    stub.add(image, "v1")
    stub.blobs[digest_of(image.config)] = image.config + b" "
    with pytest.raises(Refused, match="gave bytes unlike their digest"):
        lab.freeze(f"{stub.host}/trainer:v1")


@pytest.mark.parametrize("change", ["flipped", "longer", "other"])
def test_a_layer_unlike_its_digest_is_refused_and_kept_nowhere(
    stub: Stub, lab: ImageLab, change: str
) -> None:
    image = image_of(300_000)
    name = stub.add(image, "v1")
    (layer,) = image.layers
    digest = digest_of(layer)
    stub.blobs[digest] = {
        "flipped": layer[:-1] + bytes([layer[-1] ^ 1]),
        "longer": layer + b"x",
        "other": noise(len(layer), 99),
    }[change]
    with pytest.raises(Refused) as error:
        lab.pull(f"{name}:v1")
    assert f"gave bytes unlike their digest for {digest}" in fault(error)
    assert not list(lab.folder.glob("*.sif")) and lab.builds() == []
    assert not [p for p in lab.folder.rglob("*") if digest.removeprefix("sha256:") in p.name and p.is_file()]
    stub.blobs[digest] = layer
    assert lab.pull(f"{name}:v1").path.exists(), "and the right bytes are taken afterwards"


def test_a_layer_that_is_damaged_on_disk_is_fetched_anew(stub: Stub, lab: ImageLab) -> None:
    image = image_of(300_000)
    name = stub.add(image, "v1")
    fake_apptainer(lab.programs, fail="no space left on device")
    with pytest.raises(OperationError, match=r"could not make the image .* no space left on device"):
        lab.pull(f"{name}:v1")
    (stored,) = lab.folder.rglob(digest_of(image.layers[0]).removeprefix("sha256:"))
    stored.write_bytes(noise(len(image.layers[0]), 5))
    fake_apptainer(lab.programs)
    assert lab.pull(f"{name}:v1").path.exists()


def test_a_layer_that_is_not_there_is_told_by_its_digest(stub: Stub, lab: ImageLab) -> None:
    image = image_of(1000)
    name = stub.add(image, "v1")
    del stub.blobs[digest_of(image.layers[0])]
    with pytest.raises(Refused, match=f"does not have trainer@{digest_of(image.layers[0])}"):
        lab.pull(f"{name}:v1")


def breaking_off(stub: Stub, image: Image, at: int, times: int) -> None:
    """Let the one layer break off at `at` bytes of each answer, so many times."""
    left = [None] * times

    def cut(handler: Handler) -> bool:
        if digest_of(image.layers[0]) not in handler.path or not left:
            return False
        left.pop()
        handler.blob(image.layers[0], cut=at)
        return True

    stub.answers.append(cut)


def test_a_connection_that_breaks_is_taken_up_where_it_broke(stub: Stub, lab: ImageLab) -> None:
    image = image_of(3_000_000)
    name = stub.add(image, "v1")
    breaking_off(stub, image, 1_000_000, 2)
    lab.pull(f"{name}:v1")
    ranges = [r.headers.get("Range") for r in stub.layers_asked() if digest_of(image.layers[0]) in r.path]
    assert ranges == [None, "bytes=1000000-", "bytes=2000000-"]
    assert stub.served_bytes == len(image.layers[0]) + 2 * len(image.config)


def test_a_registry_without_ranges_is_read_from_the_start(stub: Stub, lab: ImageLab) -> None:
    image = image_of(3_000_000)
    name = stub.add(image, "v1")
    breaking_off(stub, image, 1_000_000, 1)

    def without_ranges(handler: Handler) -> bool:
        if digest_of(image.layers[0]) in handler.path and "Range" in handler.headers:
            del handler.headers["Range"]
        return False

    stub.answers.append(without_ranges)
    assert image.layers[0] in lab.pull(f"{name}:v1").path.read_bytes()


@pytest.mark.parametrize("said", ["bytes 0-10/11", "bytes 5-", "", "nonsense"])
def test_a_range_that_is_not_the_one_asked_for_is_not_taken(stub: Stub, lab: ImageLab, said: str) -> None:
    image = image_of(3_000_000)
    name = stub.add(image, "v1")
    breaking_off(stub, image, 1_000_000, 1)
    layer = image.layers[0]
    stub.answers.append(
        lambda h: (
            digest_of(layer) in h.path
            and "Range" in h.headers
            and h.answer(206, layer[:11], {"Content-Range": said})
        )
    )
    assert layer in lab.pull(f"{name}:v1").path.read_bytes()


def test_a_connection_that_brings_nothing_ever_is_given_up(stub: Stub, lab: ImageLab) -> None:
    image = image_of(3_000_000)
    name = stub.add(image, "v1")
    breaking_off(stub, image, 0, 1000)
    with pytest.raises(CannotAsk, match="ended the connection too early"):
        lab.pull(f"{name}:v1")
    assert len(stub.layers_asked()) < 20


PULL = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from image_lab import ImageLab
    lab = ImageLab.__new__(ImageLab)
    lab.base, lab.architecture, lab.shared, lab.told = Path({base!r}), "amd64", {shared}, []
    lab.home, lab.programs = lab.base / "home", Path({programs!r})
    lab.folder, lab.cache = lab.base / "storage/images", lab.base / "cache"
    print(lab.pull({image!r}).path, flush=True)
"""


def pull_code(lab: ImageLab, image: str, programs: Path | None = None) -> str:
    """`lab.pull` as a program."""
    return textwrap.dedent(PULL).format(
        tests=str(ROOT / "tests"),
        base=str(lab.base),
        shared=f"Path({str(lab.shared)!r})" if lab.shared else None,
        programs=str(programs or lab.programs),
        image=image,
    )


def start_pull(lab: ImageLab, image: str, programs: Path | None = None) -> subprocess.Popen[str]:
    """`lab.pull` in a process of its own."""
    code = pull_code(lab, image, programs)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(what: object, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_pull_killed_half_way_leaves_no_file_and_asks_for_the_rest_alone(stub: Stub, lab: ImageLab) -> None:
    image = image_of(8_000_000)
    name = stub.add(image, "v1")
    layer = image.layers[0]
    held = threading.Event()

    def stall(handler: Handler) -> bool:
        if digest_of(layer) not in handler.path or "Range" in handler.headers:
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(layer)))
        handler.end_headers()
        handler.wfile.write(layer[:5_000_000])
        with stub.lock:
            stub.served_bytes += 5_000_000
        held.wait(30)
        return True

    stub.answers.append(stall)
    process = start_pull(lab, f"{name}:v1")
    partial = lab.folder.rglob(f".{digest_of(layer).removeprefix('sha256:')}.part")
    wait_for(lambda: any(p.stat().st_size >= 4_000_000 for p in lab.folder.rglob("*.part")))
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    held.set()
    assert list(lab.folder.glob("*.sif")) == []
    (left,) = partial
    kept = left.stat().st_size
    assert kept >= 4_000_000
    prepared = lab.pull(f"{name}:v1")
    assert layer in prepared.path.read_bytes()
    (again,) = [r for r in stub.layers_asked() if "Range" in r.headers]
    assert again.headers["Range"] == f"bytes={kept}-"
    asked_twice = 5_000_000 - kept
    configs = sum(1 for r in stub.layers_asked() if digest_of(image.config) in r.path) * len(image.config)
    assert stub.served_bytes == len(layer) + asked_twice + configs
    assert [f for f in lab.files() if "work" in f or "turn" in f] == []


def test_a_conversion_killed_half_way_leaves_no_file_and_fetches_nothing_again(
    stub: Stub, lab: ImageLab
) -> None:
    image = image_of(200_000)
    name = stub.add(image, "v1")
    slow = lab.base / "slow"
    fake_apptainer(slow, sleep=30)
    process = start_pull(lab, f"{name}:v1", slow)
    wait_for(lambda: (slow / "calls").exists() and (slow / "calls").read_text())
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert list(lab.folder.glob("*.sif")) == []
    served = stub.served_bytes
    lab.pull(f"{name}:v1")
    assert stub.served_bytes - served == len(image.config), "the configuration, to see the architecture"
    assert list((lab.base / "scratch").iterdir()) == [], "what the killed build unpacked is gone too"


def test_two_at_once_make_one_conversion(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(200_000), "v1")
    fake_apptainer(lab.programs, sleep=1)
    pulls = [start_pull(lab, f"{name}:v1") for _ in range(3)]
    said = [process.communicate(timeout=60) for process in pulls]
    assert [process.returncode for process in pulls] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1
    assert len(lab.builds()) == 1


def test_who_waits_is_told_for_whom(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1")
    fake_apptainer(lab.programs, sleep=2.5)
    first = start_pull(lab, f"{name}:v1")
    wait_for(lab.builds)
    lab.pull(f"{name}:v1")
    first.communicate(timeout=30)
    assert [
        w
        for w, *_ in lab.told
        if w.startswith(f"waiting: alice on {os.uname().nodename} (process {first.pid})")
    ]


def test_the_builder_sees_no_secret_and_no_registry(
    stub: Stub, lab: ImageLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.login = ("alice", "hunter2hunter2")
    docker_login(lab.home, stub.host, password="hunter2hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter3hunter3")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "hunter4hunter4")
    monkeypatch.setenv("APPTAINER_BIND", "/etc:/mnt")
    lab.pull(f"{stub.add(image_of(1000), 'v1')}:v1")
    (call,) = lab.builds()
    for secret in ("hunter2hunter2", "hunter3hunter3", "hunter4hunter4", "token-"):
        assert secret not in json.dumps(call)
    assert "APPTAINER_BIND" not in call["environ"]
    assert call["environ"]["APPTAINER_TMPDIR"].startswith(str(lab.base / "scratch"))
    written = b"".join(
        p.read_bytes() for p in lab.base.rglob("*") if p.is_file() and ".docker" not in p.parts
    )
    assert b"hunter2hunter2" not in written


def test_the_builders_own_last_words_are_told_and_what_was_fetched_is_kept(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1")
    fake_apptainer(lab.programs, fail="unpacking entry: ../../../etc/passwd: outside of the root filesystem")
    with pytest.raises(OperationError) as error:
        lab.pull(f"{name}:v1")
    assert "apptainer could not make the image (exit code 255 after" in fault(error)
    assert "FATAL:   While performing build: unpacking entry: ../../../etc/passwd" in fault(error)
    assert "\x1b" not in fault(error) and "many lines" not in fault(error)
    assert list(lab.folder.glob("*.sif")) == []


@pytest.mark.parametrize("said", ["write /s/opt/z: no space left on device", "Disk quota exceeded"])
def test_a_builder_that_finds_no_room_is_told_with_where_to_make_some(
    stub: Stub, lab: ImageLab, said: str
) -> None:
    """What layers hold when unpacked is only a guess: one of zeros is a thousandth of that."""
    name = stub.add(image_of(1000), "v1")
    fake_apptainer(lab.programs, fail=said)
    with pytest.raises(OperationError) as error:
        lab.pull(f"{name}:v1")
    for words in (
        said,
        f"free some in {lab.base / 'scratch'} or {lab.folder}",
        "site.image_scratch",
        "is kept",
    ):
        assert words in str(error.value)


def test_a_builder_that_makes_no_image_is_told(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1")
    for text, words in (
        ("#!/bin/sh\nexit 0\n", "ended well and made no image"),
        ('#!/bin/sh\necho junk >"$5"\n', "what was built is no sif file"),
    ):
        (lab.programs / "apptainer").write_text(text)
        with pytest.raises(OperationError, match=words):
            lab.pull(f"{name}:v1")
        assert list(lab.folder.glob("*.sif")) == []


def test_without_a_builder_here_it_is_said_before_anything_is_fetched(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1")
    (lab.programs / "apptainer").unlink()
    with pytest.raises(OperationError, match="is not on this machine's PATH"):
        lab.freeze(f"{name}:v1")


def test_the_disk_is_looked_at_before_anything_is_fetched(
    stub: Stub, lab: ImageLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuneplane.images import convert

    image = image_of(100_000)
    name = stub.add(image, "v1")
    free = len(image.layers[0]) * 6
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    with pytest.raises(OperationError) as error:
        lab.freeze(f"{name}:v1")
    assert "preparing the image needs about" in fault(error) and "are free" in fault(error)
    assert "site.image_scratch" in fault(error)
    assert digest_of(image.layers[0]) not in "".join(stub.paths())


def test_a_full_disk_is_told_with_the_place(stub: Stub, lab: ImageLab) -> None:
    """As with a quota, of which no look beforehand tells."""
    name = stub.add(image_of(3_000_000), "v1")
    blind = "import tuneplane.images.pull as pull\npull.check_room = lambda *_: None\n"
    done = run_on_small_disk(
        lab.folder,
        1 << 20,
        [sys.executable, "-c", blind + pull_code(lab, f"{name}:v1")],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "OperationError" in done.stderr and "cannot be written: No space left on device" in done.stderr
    assert "tp image gc" in done.stderr


def test_a_tag_whose_registry_is_gone_is_what_it_was_and_that_is_said(stub: Stub, lab: ImageLab) -> None:
    image = image_of(1000)
    name = stub.add(image, "v1")
    lab.pull(f"{name}:v1")
    stub.close()
    frozen = lab.freeze(f"{name}:v1")
    assert frozen.digest == image.digest and frozen.prepared is not None
    (notice,) = frozen.notices
    assert f"v1 is taken to be {image.digest}" in notice and "The tag may have moved since" in notice


def test_a_tag_that_was_seen_elsewhere_meanwhile_is_the_one_seen_last(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(image_of(1000), "v1", "v2")
    lab.pull(f"{name}:v1")
    newer = image_of(1500)
    stub.add(newer, "v2")
    lab.pull(f"{name}:v2")
    stub.add(newer, "v1")
    lab.freeze(f"{name}:v1")
    stub.close()
    assert lab.freeze(f"{name}:v1").digest == newer.digest


@pytest.mark.parametrize("status", [429, 503])
def test_a_registry_that_is_too_busy_counts_as_one_that_cannot_be_asked(
    stub: Stub, lab: ImageLab, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneplane.images.distribution.PAUSE_S", 0.01)
    monkeypatch.setattr("tuneplane.images.distribution.TRIES", 1)
    image = image_of(1000)
    name = stub.add(image, "v1")
    lab.pull(f"{name}:v1")
    stub.answers.append(lambda h: h.answer(status))
    assert lab.freeze(f"{name}:v1").digest == image.digest


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_registrys_own_no_is_not_helped_by_what_is_on_disk(stub: Stub, lab: ImageLab, status: int) -> None:
    name = stub.add(image_of(1000), "v1")
    lab.pull(f"{name}:v1")
    stub.answers.append(lambda h: h.answer(status))
    with pytest.raises(Refused):
        lab.freeze(f"{name}:v1")


def test_a_registry_that_cannot_be_reached_names_the_way_round(lab: ImageLab) -> None:
    with pytest.raises(CannotAsk) as error:
        lab.freeze("127.0.0.1:1/trainer:v1")
    assert "apptainer build NAME.sif docker://127.0.0.1:1/trainer:v1, then --image NAME.sif" in fault(error)


def test_an_image_that_only_a_login_may_read_never_lies_in_the_shared_folder(
    stub: Stub, lab: ImageLab
) -> None:
    lab.shared = lab.base / "shared"
    lab.shared.mkdir()
    stub.login = ("alice", "pw")
    docker_login(lab.home, stub.host, password="pw")
    private = lab.pull(f"{stub.add(image_of(1000), 'v1')}:v1")
    assert private.path.parent == lab.folder
    assert lab.freeze(f"{stub.host}/trainer:v1").prepared is not None
    shared = lab.pull(f"{stub.add(image_of(1100), 'v2')}:v2", share=True)
    assert shared.path.parent == lab.shared


def test_what_cannot_come_to_lie_in_the_shared_folder_is_not_shared_in_silence(
    stub: Stub, lab: ImageLab
) -> None:
    name = stub.add(image_of(1000), "v1")
    with pytest.raises(UsageError, match="this site has no folder of images for all"):
        lab.pull(f"{name}:v1", share=True)
    own = lab.pull(f"{name}:v1")
    lab.shared = lab.base / "shared"
    lab.shared.mkdir()
    with pytest.raises(UsageError, match="the image is there already") as error:
        lab.pull(f"{name}:v1", share=True)
    assert f"tp image rm {own.path.name}" in str(error.value)


def test_a_strangers_broken_file_in_the_shared_folder_keeps_nobody_from_the_image(
    stub: Stub, lab: ImageLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sticky bit nobody else can take it away, and the whole work would be for nothing."""
    lab.shared = lab.base / "shared"
    lab.shared.mkdir(mode=0o1777)
    image = image_of(1000)
    name = stub.add(image, "v1")
    broken = lab.shared / f"{image.digest.replace(':', '-')}.sif"
    broken.write_bytes(b"cut short")
    os.chown(broken, 64999, 64999)
    assert lab.pull(f"{name}:v1").path.parent == lab.shared, "root may take it away"
    broken.unlink()
    broken.write_bytes(b"cut short")
    monkeypatch.setattr(os, "geteuid", lambda: 64999)
    folder = ImageFolder(lab.shared, is_shared=True)
    assert folder.is_taken(image.digest, "sif"), "here the stranger is root"
    monkeypatch.setattr(ImageFolder, "is_writable", lambda self: True)
    assert lab.freeze(f"{name}:v1").path.parent == lab.folder


def test_an_image_that_everybody_may_read_lies_in_the_shared_folder_though_a_login_was_used(
    stub: Stub, lab: ImageLab
) -> None:
    lab.shared = lab.base / "shared"
    lab.shared.mkdir()
    name = stub.add(image_of(1000), "v1")
    docker_login(lab.home, stub.host, password="pw")

    def token_for_all(handler: Handler) -> bool:
        if not handler.path.startswith("/token"):
            return False
        stub.tokens.add("anyone")
        return handler.answer(200, b'{"token": "anyone"}')

    stub.login = ("nobody", "-")
    stub.answers.append(token_for_all)
    assert lab.pull(f"{name}:v1").path.parent == lab.shared


def test_a_shared_folder_that_may_not_be_written_is_read_and_ones_own_is_written(
    stub: Stub, lab: ImageLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its rule alone; two real users do it on the testbed."""
    lab.shared = lab.base / "shared"
    lab.shared.mkdir()
    name = stub.add(image_of(1000), "v1")
    site = lab.pull(f"{name}:v1")
    assert site.path.parent == lab.shared
    monkeypatch.setattr(ImageFolder, "is_writable", lambda folder: not folder.is_shared)
    assert lab.pull(f"{name}:v1").path == site.path
    stub.add(image_of(1500), "v2")
    assert lab.pull(f"{name}:v2").path.parent == lab.folder


def test_an_image_in_ones_own_folder_that_belongs_to_a_stranger_is_not_taken(
    stub: Stub, lab: ImageLab
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a file away")
    name = stub.add(image_of(1000), "v1")
    prepared = lab.pull(f"{name}:v1")
    os.chown(prepared.path, 65534, 65534)
    assert lab.freeze(f"{name}:v1").prepared is None


@pytest.mark.parametrize("damage", ["cut", "record", "linked", "folder"])
def test_a_file_that_is_not_as_recorded_is_made_anew(stub: Stub, lab: ImageLab, damage: str) -> None:
    name = stub.add(image_of(1000), "v1")
    prepared = lab.pull(f"{name}:v1")
    record = prepared.path.with_name(f"{prepared.path.name}.json")
    if damage == "cut":
        prepared.path.chmod(0o644)
        prepared.path.write_bytes(prepared.path.read_bytes()[:100])
    elif damage == "record":
        record.write_text('{"manifest": 7}')
    elif damage == "linked":
        other = prepared.path.rename(lab.base / "other.sif")
        prepared.path.symlink_to(other)
    else:
        record.unlink()
    assert lab.pull(f"{name}:v1").path == prepared.path
    assert len(lab.builds()) == 2
    assert prepared.path.is_file() and not prepared.path.is_symlink()


def test_blobs_are_fetched_at_once_and_counted_together(stub: Stub, lab: ImageLab) -> None:
    image = image_of(*[200_000] * 7)
    lab.pull(f"{stub.add(image, 'v1')}:v1")
    layers = [t for t in lab.told if t[0] == "fetching layers"]
    total = sum(map(len, image.layers)) + len(image.config)
    assert {t[2] for t in layers} == {total} and layers[-1][1] == total
    assert [done for _, done, _ in layers] == sorted(done for _, done, _ in layers)
    assert download.CONNECTIONS > 1


def test_a_docker_image_is_taken_like_any(stub: Stub, lab: ImageLab) -> None:
    image = image_of(1000, docker=True)
    assert lab.pull(f"{stub.add(image, 'v1')}:v1").record.manifest == image.digest


def test_a_layer_of_no_bytes_is_a_layer(stub: Stub, lab: ImageLab) -> None:
    image = image_of(1000)
    manifest = json.loads(image.manifest)
    manifest["layers"].append({**manifest["layers"][0], "digest": digest_of(b""), "size": 0})
    raw = json.dumps(manifest).encode()
    stub.add(image)
    stub.blobs[digest_of(b"")] = b""
    for key in ("v1", digest_of(raw)):
        stub.manifests[key] = (image.kind, raw)
    assert lab.pull(f"{stub.host}/trainer:v1").record.manifest == digest_of(raw)


def test_a_folder_with_a_weird_name_is_as_good_as_any(stub: Stub, weird_dir: Path) -> None:
    lab = ImageLab(weird_dir)
    assert lab.pull(f"{stub.add(image_of(1000), 'v1')}:v1").path.exists()
