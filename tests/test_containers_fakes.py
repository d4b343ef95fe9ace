"""Whole jobs through the node agent in enroot and pyxis, where strict fakes of both stand for the real ones.

The cases are those of tests/live, which a site that has enroot or pyxis runs on them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from container_environment import table
from run_fixture import Run, make_run, wait_until

from tuneplane.spec import Container, Image, Mount

sys.path += [str(Path(__file__).parent / name) for name in ("fakes", "live")]

import box
from cases import CASES, HOSTILE_IMAGE, PRINT_ENVIRONMENT, printed_environment

FAKES = Path(__file__).parent / "fakes"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("boxes")]


class FakeRun:
    """A run that was started: `cases.Started`."""

    def __init__(self, run: Run, nodes: int, more: dict[str, str]) -> None:
        self.run, self.more = run, more
        self.number = run.claimed(**more)
        self.agents = [run.start_node(self.number, rank=rank, nodes=nodes, **more) for rank in range(nodes)]

    def logs(self) -> list[str]:
        return [self.run.log(rank) for rank in range(len(self.agents))]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in "".join(self.run.log().splitlines(True)[1:]), f"{text!r} in {self.logs()}")

    def stop(self) -> None:
        """TERM to what slurmstepd is the parent of: the agent, and under pyxis the first process inside."""
        self.agents[0].send_signal(signal.SIGTERM)
        for pid in self.leaders():
            os.kill(pid, signal.SIGTERM)

    def leaders(self) -> list[int]:
        start = f"/bin/sh\0{self.run.scratch().runtime}/start.sh\0run\0"
        return [pid for pid, words in command_lines() if words.startswith(start)]

    def shell(self, *command: str) -> str:
        done = self.run.call(
            "shell", str(self.run.path), "0", "0", *command, environment=self.run.environment(**self.more)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait(self) -> int:
        codes = [self.run.finish(agent).returncode for agent in self.agents]
        return codes[0]

    def output(self, name: str) -> str | None:
        with suppress(FileNotFoundError):
            return (self.run.folder.out / name).read_text()
        return None

    def arguments(self) -> list[str]:
        return [words for _, words in command_lines()]


class FakeSite:
    """Starts runs below a folder: `cases.Site`."""

    token = "hf_secret-of-this-run"

    def __init__(self, runtime: str, where: Path) -> None:
        self.runtime, self.where = runtime, where
        self.image = box.write_image(where / "image.sqsh", HOSTILE_IMAGE)
        self.runs: list[Run] = []
        self.environment: dict[str, str] = {"HF_HOME": self.folder()}
        self.more: dict[str, str] = {}

    def folder(self) -> str:
        path = self.where / f"shared-{len(list(self.where.iterdir()))}"
        path.mkdir()
        (path / "in").write_text("here\n")
        return str(path)

    def make(
        self, train: str, nodes: int = 1, mounts: Sequence[tuple[str, str, bool]] = (), **spec: Any
    ) -> Run:
        image = Image(str(self.image), "--image", str(self.image), "0" * 64)
        container = Container(self.runtime, image=image, mounts=[Mount(*mount) for mount in mounts])
        run = make_run(
            self.where,
            train,
            number=len(self.runs),
            nodes=nodes,
            container=container,
            secrets={"HF_TOKEN": self.token},
            environment=self.environment,
            **spec,
        )
        self.runs.append(run)
        run.bin.mkdir(exist_ok=True)
        for name in ("enroot", "srun"):
            with suppress(FileExistsError):
                (run.bin / name).symlink_to(FAKES / name)
        return run

    def start(self, train: str, *, nodes: int = 1, mounts: Sequence[tuple[str, str, bool]] = ()) -> FakeRun:
        return FakeRun(self.make(train, nodes, mounts), nodes, self.more)


def command_lines() -> list[tuple[int, str]]:
    """Every process with its argv, NUL after each word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found.append((int(entry.name), (entry / "cmdline").read_text(errors="replace")))
    return found


@contextmanager
def slurmd(where: Path) -> Iterator[str]:
    """The fake's own slurmd; the path of its slurm.conf."""
    conf = where / "slurm.conf"
    address = where / "slurmd.socket"
    known = {"socket": str(address), "job": "4242", "nodes": "n1,n2", "cpus": "2", "folder": str(where)}
    conf.write_text(json.dumps(known))
    with subprocess.Popen([sys.executable, str(FAKES / "slurmd.py"), str(address), str(conf)]) as process:
        wait_until(address.exists, "slurmd listens")
        yield str(conf)
        process.kill()


@pytest.fixture(params=["enroot", "pyxis"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeSite]:
    found = FakeSite(request.param, tmp_path)
    with slurmd(tmp_path) if request.param == "pyxis" else nullcontext("") as conf:
        found.more |= {"SLURM_CONF": conf} if conf else {}
        yield found
        for run in found.runs:
            run.kill_all()


@pytest.mark.contract("C43")
@pytest.mark.parametrize("case", CASES)
def test_a_job_behaves_as_on_a_real_site(site: FakeSite, case: str) -> None:
    CASES[case](site)


def test_a_command_that_fails_at_once_is_told_what_its_image_has(site: FakeSite) -> None:
    run = site.start("no-such-trainer")
    assert run.wait() == 127
    said = run.logs()[0].splitlines()
    at = said.index("tuneplane: the command failed at once; what its image has:")
    assert any("no-such-trainer: command not found" in line for line in said[:at])
    assert [line.split()[:3] for line in said[at + 1 : at + 4]] == [
        ["tuneplane:", "ok", "bash"],
        ["tuneplane:", "ok", "python3"],
        ["tuneplane:", "warn", "no"],
    ]


def test_a_command_that_reported_or_was_told_to_end_is_not_explained(site: FakeSite) -> None:
    reported = site.start(': >"${TUNEPLANE_JOB_ENDPOINT#file://}/0-n1-0-1.jsonl"\nexit 3')
    assert reported.wait() == 3
    told = site.start("echo ready\nsleep 60")
    told.wait_for("ready")
    told.stop()
    assert told.wait() == 128 + signal.SIGTERM
    for run in (reported, told):
        assert "what its image has" not in run.logs()[0]


AWKWARD = {
    "EMPTY": "",
    "LINES": "a\nHOME=/evil\n\n",
    "QUOTED": "'both' \"kinds\"",
    "OUTER": '"outer"',
    "SPACES": "  a  b ",
    "COMMAND": "$(touch /tmp/evaluated) `id` $HOME ${HOME} $$",
    "BACKSLASH": "a\\b\\\\\\\n\\",
    "UNICODE": "实验 🎉",
    "BYTES": os.fsdecode(b"\xff\xfe"),
    "GLOB": "* ? [a] ~ !x #y",
    "LONG": "x" * 100_000,
    "NVIDIA_VISIBLE_DEVICES": "void",
}


def test_every_value_arrives_byte_for_byte(site: FakeSite) -> None:
    """Whatever the lines are in which enroot and pyxis write an environment."""
    site.environment |= AWKWARD
    run = site.start(PRINT_ENVIRONMENT)
    assert run.wait() == 0, run.logs()
    found = printed_environment(run.logs()[0])
    assert {name: found.get(name) for name in AWKWARD} == AWKWARD
    assert found["HOME"] == str(run.run.scratch().home)


@pytest.mark.contract("C24")
def test_the_kernels_folder_is_first_on_pythonpath_and_the_images_own_stays_behind_it(site: FakeSite) -> None:
    made = site.make(PRINT_ENVIRONMENT, observability="platform", url=None)
    run = FakeRun(made, 1, site.more)
    assert run.wait() == 0, run.logs()
    found = printed_environment(run.logs()[0])
    expected = f"{found['TUNEPLANE_WORK_DIR']}/.tuneplane/kernel:{HOSTILE_IMAGE['PYTHONPATH']}"
    assert found["PYTHONPATH"] == expected


def test_an_image_without_a_path_gets_the_usual_one(site: FakeSite) -> None:
    box.write_image(site.image)
    run = site.start(PRINT_ENVIRONMENT)
    assert run.wait() == 0, run.logs()
    assert printed_environment(run.logs()[0])["PATH"].startswith("/usr/local/sbin:/usr/local/bin:")


def test_a_node_without_what_gpus_need_says_so(tmp_path: Path) -> None:
    """enroot's hook asks for libnvidia-container; its message is in the run's log."""
    made = FakeSite("enroot", tmp_path).make("true", device="gpu")
    run = FakeRun(made, 1, {"CUDA_VISIBLE_DEVICES": "0"})
    assert run.wait() == 1
    assert "Command not found: nvidia-container-cli" in run.logs()[0]


def test_a_file_that_is_no_squashfs_is_refused_by_the_runtime(site: FakeSite) -> None:
    site.image.write_text("no image")
    run = site.start("true")
    assert run.wait() == 1
    assert str(site.image) in run.logs()[0]


def test_the_grace_ends_what_does_not_end_itself(site: FakeSite) -> None:
    run = site.start("trap '' TERM\necho ready\nwhile :; do sleep 1; done")
    run.wait_for("ready")
    run.stop()
    assert run.wait() == 128 + signal.SIGKILL
    assert run.run.processes() == []


REAL_START = ["enroot", "start", "--rc", "RC", "IMAGE", "run", "true"]
REAL_STEP = [
    *["srun", "--jobid=4242", "--nodes=1", "--ntasks=1", "--nodelist=n1", "--cpus-per-task=2", "--overlap"],
    *["--mem=0", "--mpi=none", "--export=TERM", "--no-container-mount-home", "--container-readonly"],
    *["--container-image=IMAGE", "true"],
]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (REAL_START, None),
        ([*REAL_START[:2], "--bind", "/a:/a", *REAL_START[2:]], "Usage: enroot start"),
        ([*REAL_START[:2], "--mount", "/a b:/c", *REAL_START[2:]], "Invalid argument"),
        ([*REAL_START[:2], "--mount", "/not/there:/c:none:rbind", *REAL_START[2:]], "No such file"),
        ([*REAL_START[:2], "--mount", "/tmp:/c:none:rbind,read-only", *REAL_START[2:]], "failed to mount"),
        ([*REAL_START[:4], "docker://registry/x:v1", "run", "true"], "Invalid argument: docker://"),
        ([*REAL_START[:4], "trainer", "run", "true"], "No such file or directory"),
        (REAL_STEP, None),
        ([*REAL_STEP[:-1], "--container-mount=/a:/b", "true"], "unrecognized option '--container-mount'"),
        ([*REAL_STEP[:-1], "--container-mounts=/not/there:/b", "true"], "source path does not exist"),
        ([*REAL_STEP[:-1], "--container-mounts=/tmp:/b:read-only", "true"], "unknown mount flags"),
        ([w.replace("IMAGE", "registry#x:v1") for w in REAL_STEP], "failed to import docker image"),
        ([w for w in REAL_STEP if w != "--overlap"], "Requested nodes are busy"),
        ([w for w in REAL_STEP if w != "--mem=0"], "Requested nodes are busy"),
        ([w.replace("n1", "n9") for w in REAL_STEP], "not available"),
        ([w.replace("TERM", "TERM=x") for w in REAL_STEP], "a value in --export"),
    ],
)
def test_the_fakes_refuse_what_the_real_ones_refuse(
    tmp_path: Path, argv: list[str], words: str | None
) -> None:
    image, script = box.write_image(tmp_path / "image.sqsh"), tmp_path / "rc"
    script.write_text('shift\n"$@"\n')
    environ = {f"ENROOT_{name}_PATH": str(tmp_path / name) for name in ("CACHE", "DATA", "RUNTIME")}
    environ |= {"PATH": f"{FAKES}:{os.environ['PATH']}", "ENROOT_LOGIN_SHELL": "no"}
    with slurmd(tmp_path) as conf:
        done = subprocess.run(
            [word.replace("IMAGE", str(image)).replace("RC", str(script)) for word in argv],
            env={**environ, "SLURM_CONF": conf},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert (done.returncode == 0) == (words is None), done.stderr
    assert (words or "") in done.stdout + done.stderr


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_table_of_the_contract_is_the_same_as_without_a_container(
    site: FakeSite, tmp_path: Path, device: str
) -> None:
    more = {**site.more, **({"CUDA_VISIBLE_DEVICES": "0,1"} if device == "gpu" else {})}
    site.environment["NVIDIA_VISIBLE_DEVICES"] = "void"
    bare = FakeSite("none", tmp_path)
    bare.environment = site.environment
    found = []
    for one in (site, bare):
        run = FakeRun(one.make(PRINT_ENVIRONMENT, device=device, per_node=2), 1, more)
        assert run.wait() == 0, run.logs()
        found.append(table(printed_environment(run.logs()[0])))
    if device == "cpu":  # no GPU was given: what the image says of them is its own
        found[0].pop("CUDA_VISIBLE_DEVICES", None)
    assert found[0] == found[1]
    assert len(found[0]) > 30
