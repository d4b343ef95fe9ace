"""The train.py of pytorch/image-classification on this machine, on real images: it learns, and resumes exactly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from digits import write_digits
from run_fixture import wait_until
from training_lab import missing_because

from tuneplane.packaged import packaged_configs
from tuneplane.recipes.adapters.pytorch import arguments
from tuneplane.recipes.catalog import load_catalog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

METHOD = "pytorch/image-classification"
SCAFFOLD = packaged_configs() / f"recipe/{METHOD}.scaffold"
STEPS, EVERY = 88, 30
SMALL = (
    *("--architecture=small-cnn", "--image-size=16", "--no-color", "--augmentation=crop", "--dropout=0.1"),
    *("--num-workers=0", "--batch-size=32", "--epochs=4", "--warmup-steps=10", "--log-every-steps=1"),
)
"""Two ranks of this make 22 steps an epoch of the digits."""


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    reason = missing_because()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
        pytest.skip(reason)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def some(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images of each digit to train on, two held out."""
    folder = tmp_path_factory.mktemp("some")
    for part, count in (("train", 8), ("validation", 2)):
        for label in "0123456789":
            (folder / part / label).mkdir(parents=True)
            for image in sorted((data / part / label).iterdir())[:count]:
                (folder / part / label / image.name).symlink_to(image)
    return folder


class Ranks:
    """Trainings of two gloo ranks under plain torchrun, which report into a folder."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.out, self.ingest, self.stop = folder / "out", folder / "ingest", folder / "stop"
        self.ingest.mkdir(parents=True)
        self.log, self.data, self.attempt = folder / "log", data, -1
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        """The next attempt."""
        self.attempt += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
        words += [
            str(SCAFFOLD / "train.py"),
            f"--train-data={self.data}",
            f"--checkpoint-every-steps={EVERY}",
        ]
        environ = {
            **{"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            **{
                "TUNEPLANE_JOB_TOKEN": "t",
                "TUNEPLANE_JOB_RUN_ID": "r",
                "TUNEPLANE_STOP_FILE": str(self.stop),
            },
            **{"TUNEPLANE_JOB_ENDPOINT": self.ingest.as_uri(), "TUNEPLANE_JOB_ATTEMPT": str(self.attempt)},
            "TUNEPLANE_OUT_DIR": str(self.out),
        }
        command = [sys.executable, "-m", "torch.distributed.run", *words, *SMALL]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        return self.process

    def said(self) -> str:
        return self.log.read_text()

    def run(self) -> None:
        assert self.start().wait(timeout=90) == 0, self.said()

    def kill(self) -> None:
        """SIGKILL to torchrun and to its ranks, which would go on without it."""
        if self.process is None or self.process.poll() is not None:
            return
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, children)):
            os.kill(one, signal.SIGKILL)
        self.process.wait(timeout=20)

    def points(self, attempt: int) -> dict[str, dict[int, float]]:
        """Whatever one attempt reported: by name, value by step. No step of an attempt is reported twice."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for path in self.ingest.glob(f"{attempt}-*.jsonl"):
            for text in path.read_text().splitlines()[1:]:
                line = json.loads(text)
                for name, value in line.get("m", {}).items():
                    assert line["s"] not in found[name]
                    found[name][line["s"]] = value
        return {name: values for name, values in found.items() if not name.startswith("system/")}

    def resumed_at(self, attempt: int) -> list[int]:
        texts = [path.read_text() for path in self.ingest.glob(f"{attempt}-*.jsonl")]
        lines = [json.loads(line) for text in texts for line in text.splitlines()[1:]]
        return [line["r"] for line in lines if "r" in line]

    def checkpoints(self) -> list[str]:
        return sorted(os.listdir(self.out / "checkpoints"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("unbroken"), data)
    try:
        ranks.run()
        yield ranks
    finally:
        ranks.kill()


def test_two_ranks_learn_digits_that_they_have_not_seen(unbroken: Ranks) -> None:
    points = unbroken.points(0)
    assert set(points) == set(load_catalog([packaged_configs()]).get(METHOD).metrics)
    assert list(points["validation/accuracy"]) == [22, 44, 66, 88]
    assert points["validation/accuracy"][STEPS] > 0.95
    rates = points["train/learning_rate"]
    assert list(rates) == list(points["train/loss"]) == list(range(1, STEPS + 1))
    assert rates[1] == pytest.approx(0.01) and rates[10] == pytest.approx(0.1) and rates[STEPS] < 1e-4
    assert min(points["train/images_per_second"].values()) > 0
    assert unbroken.checkpoints() == ["step-60", "step-88"], "the last two, and no draft"


def test_a_run_cut_twice_goes_on_as_if_it_had_not_been(tmp_path: Path, data: Path, unbroken: Ranks) -> None:
    """SIGKILL between two checkpoints, then the stop marker; to the last digit, dropout and all."""
    ranks, whole = Ranks(tmp_path, data), unbroken.points(0)
    try:
        ranks.start()
        wait_until(lambda: f"step {EVERY + 5} " in ranks.said(), "five steps after the checkpoint", 60)
        ranks.kill()
        assert ranks.checkpoints() == [f"step-{EVERY}"]
        ranks.stop.touch()
        ranks.run()
        stopped = int(ranks.checkpoints()[-1].removeprefix("step-"))
        assert f"step {stopped}  ends, as it was asked to" in ranks.said()
        assert EVERY < stopped < 2 * EVERY
        ranks.stop.unlink()
        ranks.run()
    finally:
        ranks.kill()
    losses = [ranks.points(attempt)["train/loss"] for attempt in range(3)]
    assert losses[0] and max(losses[0]) > EVERY
    assert list(losses[1]) == list(range(EVERY + 1, stopped + 1)), "what lies before is not computed again"
    assert list(losses[2]) == list(range(stopped + 1, STEPS + 1))
    assert [ranks.resumed_at(attempt) for attempt in range(3)] == [[], [EVERY + 1], [stopped + 1]]
    for attempt in range(3):
        for name, values in ranks.points(attempt).items():
            if name != "train/images_per_second":
                assert values == {step: whole[name][step] for step in values}, name


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The scaffold's train.py in this process, one rank."""
    monkeypatch.syspath_prepend(str(SCAFFOLD))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    import train  # type: ignore[import-not-found]

    train.torch.set_num_threads(1)  # two wait for each other where other tests compute beside this one
    yield train
    for name in ("train", "data", "models"):
        del sys.modules[name]


def run_here(train: ModuleType, monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, *words: str) -> None:
    argv = ["train.py", f"--train-data={data}", f"--output-dir={out}", "--num-workers=0", *words]
    monkeypatch.setattr(sys, "argv", argv)
    train.main()


def test_validation_of_two_ranks_counts_every_image_once(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, data: Path, unbroken: Ranks
) -> None:
    """One rank finds of the saved weights, over 359 images, what two ranks said."""
    monkeypatch.setattr(
        sys, "argv", ["train.py", f"--train-data={data}", f"--output-dir={unbroken.out}", *SMALL]
    )
    alone = train.Training(train.parse_arguments(), train.torch.device("cpu"))
    weights = train.torch.load(unbroken.out / f"checkpoints/step-{STEPS}/model.pt", weights_only=True)
    alone.model.load_state_dict(weights["model"])
    found, said = alone.evaluate(), unbroken.points(0)
    assert found["validation/accuracy"] == pytest.approx(said["validation/accuracy"][STEPS], abs=1e-9)
    assert found["validation/loss"] == pytest.approx(said["validation/loss"][STEPS], rel=1e-5)
    assert weights["classes"] == list("0123456789")


@pytest.mark.parametrize(("count", "ranks"), [(359, 4), (3, 4), (0, 2), (64, 2), (65, 3)])
def test_shares_of_ranks_hold_every_image_once(train: ModuleType, count: int, ranks: int) -> None:
    args = train.argparse.Namespace(batch_size=32, seed=3)
    shares = [train.share_keys(count, rank, ranks, args) for rank in range(ranks)]
    flat = [index for share in shares for batch in share for _, index in batch]
    assert sorted(flat) == list(range(count))


@pytest.mark.parametrize("begun", [0, 1, 3, 4])
def test_an_epoch_taken_up_in_its_middle_goes_on_in_the_same_order(train: ModuleType, begun: int) -> None:
    args = train.argparse.Namespace(batch_size=8, seed=3)
    whole = [train.epoch_keys(70, 2, 0, rank, 2, args) for rank in range(2)]
    assert [len(batches) for batches in whole] == [4, 4]
    flat = [key for batches in whole for batch in batches for key in batch]
    assert len(set(flat)) == 64 and {epoch for epoch, _ in flat} == {2}
    assert [train.epoch_keys(70, 2, begun, rank, 2, args) for rank in range(2)] == [w[begun:] for w in whole]
    assert train.epoch_keys(70, 3, 0, 0, 2, args) != whole[0]


KINDS = [
    ("--architecture=resnet18", "--image-size=8", "--no-color", "--deterministic"),
    ("--architecture=small-cnn", "--image-size=8", "--precision=bf16", "--optimizer=adamw"),
    (
        "--architecture=small-cnn",
        "--image-size=24",
        "--precision=fp16",
        "--gradient-clip=1",
        "--num-workers=2",
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_other_choices_resume_exactly_too(
    train: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    some: Path,
    tmp_path: Path,
    kind: tuple[str, ...],
) -> None:
    words = (*kind, "--batch-size=8", "--schedule=step", "--log-every-steps=1", "--dropout=0.5")
    words += ("--label-smoothing=0.1", "--learning-rate=0.01")
    lines = []
    for out, steps in (("a", 3), ("b", 1), ("b", 3)):
        run_here(train, monkeypatch, some, tmp_path / out, *words, f"--max-steps={steps}")
        said = capsys.readouterr().out.splitlines()
        lines.append([line.split("  train/images")[0] for line in said if "train/loss" in line])
    assert len(lines[0]) == 3
    assert lines[1] + lines[2] == lines[0]


def test_arguments_are_what_the_manifest_declares(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same names, defaults and choices; and every default, said as the adapter says it, is read as itself."""
    recipe = load_catalog([packaged_configs()]).get(METHOD)
    declared = {p.name: p.default for p in recipe.parameters}
    monkeypatch.setattr(sys, "argv", ["train.py", "--train-data=/d"])
    own = vars(train.parse_arguments())
    assert {name: own[name] for name in own if name not in ("train_data", "output_dir")} == declared
    words = [word for name, value in declared.items() for word in arguments(name, value)]
    monkeypatch.setattr(sys, "argv", ["train.py", "--train-data=/d", *words])
    assert vars(train.parse_arguments()) == own
    for parameter in recipe.parameters:
        for choice in parameter.choices:
            monkeypatch.setattr(
                sys, "argv", ["train.py", "--train-data=/d", *arguments(parameter.name, choice)]
            )
            assert getattr(train.parse_arguments(), parameter.name) == choice


def make(folder: Path, *paths: str) -> Path:
    from PIL import Image

    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(folder / path)
    return folder


GOOD = ("train/a/1.png", "train/b/1.png", "validation/a/1.png", "validation/b/1.png")


def refusal(train: ModuleType, monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        run_here(train, monkeypatch, data, out, "--architecture=small-cnn", "--image-size=8", *words)
    assert isinstance(caught.value.code, str), "a sentence, and exit code 1"
    return caught.value.code


def test_data_that_is_not_there_is_told_in_a_line(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def told(folder: Path, *words: str) -> str:
        return refusal(train, monkeypatch, folder, out, *words)

    assert f"{tmp_path}/none/train is no folder" in told(tmp_path / "none")
    assert "validation is no folder" in told(make(tmp_path / "half", "train/a/1.png"))
    (tmp_path / "flat/train").mkdir(parents=True)
    assert "train has no folder: each class is one" in told(tmp_path / "flat")
    other = make(tmp_path / "other", *GOOD, "train/c d/1.PNG", "validation/ü/1.jpeg")
    assert (
        told(other) == "the classes of train and validation differ: c d in train alone, ü in validation alone"
    )
    (make(tmp_path / "empty", *GOOD) / "train/c").mkdir()
    assert "train/c has no image (.bmp .gif" in told(tmp_path / "empty")
    assert told(make(tmp_path / "few", *GOOD)) == (
        "the 2 images to train on are less than one step of 1 ranks of batch size 64"
    )


def test_images_that_cannot_be_read_are_named_and_counted(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data, out = make(tmp_path / "data", *GOOD), tmp_path / "out"
    for name in ("train/a/2.png", "validation/b/2.png"):
        (data / name).write_text("no image\n")
    said = refusal(train, monkeypatch, data, out)
    assert said.startswith("2 of 6 images cannot be read: ")
    assert f"{data}/train/a/2.png: cannot identify" in said and f"{data}/validation/b/2.png" in said
    for name in ("train/a/2.png", "validation/b/2.png"):
        (data / name).unlink()
    whole = (data / "train/a/1.png").read_bytes()
    (data / "train/a/1.png").write_bytes(whole[:45])  # its header is well
    for workers in ("0", "1"):
        said = refusal(train, monkeypatch, data, out, "--batch-size=2", f"--num-workers={workers}")
        assert said.startswith(f"1 image cannot be read: {data}/train/a/1.png: ") and "\n" not in said


def test_another_course_is_not_taken_for_a_resume(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = make(tmp_path / "data", *GOOD)
    words = ("--architecture=small-cnn", "--image-size=8", "--max-steps=1")
    run_here(train, monkeypatch, data, tmp_path / "out", *words, "--batch-size=2")
    make(data, "train/a/2.png")
    said = refusal(train, monkeypatch, data, tmp_path / "out", "--batch-size=1")
    assert "checkpoints/step-1 is of another course: batch_size was 2, is 1; images was 2, is 3" in said


def test_a_loss_that_is_no_number_ends_the_run(
    train: ModuleType, monkeypatch: pytest.MonkeyPatch, some: Path, tmp_path: Path
) -> None:
    words = ("--learning-rate=1e30", "--log-every-steps=1", "--no-color")
    said = refusal(train, monkeypatch, some, tmp_path / "out", *words)
    assert said == "the loss is nan: try a lower --learning-rate or a --gradient-clip"
    assert not (tmp_path / "out/checkpoints").exists()


def test_a_learning_rate_falls_as_its_schedule_says(train: ModuleType) -> None:
    def rate(done: int, **more: Any) -> float:
        says = {"learning_rate": 1.0, "warmup_steps": 0, "decay_epochs": 2, "decay_factor": 0.5, **more}
        return float(train.learning_rate(done, 100, done // 10, train.argparse.Namespace(**says)))

    assert [rate(done, schedule="constant") for done in (0, 99)] == [1, 1]
    assert [rate(done, schedule="step") for done in (0, 19, 20, 39, 40)] == [1, 1, 0.5, 0.5, 0.25]
    assert rate(0, schedule="cosine") == 1 and rate(50, schedule="cosine") == pytest.approx(0.5)
    warm = [rate(done, schedule="cosine", warmup_steps=4) for done in range(5)]
    assert warm == [0.25, 0.5, 0.75, 1, 1]
