"""`tp job verify`: a run that is still what was submitted, and everything that makes it another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_fixture import Run, runs_below

from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.errors import UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.spec import Container, Image, dump
from tuneplane.verify import check_prepared, verify

MakeRun = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:
        yield make_one


def faults_of(run: RunFolder) -> list[str]:
    _, faults = verify(run)
    return [f"{Path(fault.where).name}: {fault.what}" for fault in faults]


def rewrite(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_run_as_it_was_made_is_as_it_was_submitted(make: MakeRun, scheduler: str) -> None:
    run = make("true", scheduler=scheduler)
    checked, faults = verify(run.folder)
    assert faults == []
    assert checked == [
        "job.json against SHA256SUMS",
        "job.sbatch against what job.json renders to",
        "capsule.tar and kernel.pyz against job.json",
    ]
    check_prepared(run.folder)


def test_a_run_that_has_run_is_still_the_same(make: MakeRun) -> None:
    run = make("echo x >$TUNEPLANE_OUT_DIR/logs; exit 3")
    run.run_once()
    run.end(0, 3)
    assert faults_of(run.folder) == []


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("job.json", "job.json: job.json: sha256 is "),
        ("kernel.pyz", "kernel.pyz: kernel.pyz: sha256 is "),
        ("job.sbatch", "job.sbatch: is not what job.json renders to"),
        ("capsule.tar", "capsule.tar: "),
        ("SHA256SUMS", "SHA256SUMS: does not hold the sums of job.json and kernel.pyz alone"),
    ],
)
def test_a_byte_more_in_any_file_is_found(make: MakeRun, name: str, where: str) -> None:
    run = make("true")
    path = run.path / name
    rewrite(path, path.read_bytes() + (b"\n" if name != "SHA256SUMS" else b"x"))
    found = faults_of(run.folder)
    assert any(fault.startswith(where) for fault in found), found


@pytest.mark.parametrize("name", ["job.json", "kernel.pyz", "job.sbatch", "capsule.tar", "SHA256SUMS"])
def test_a_missing_file_is_told(make: MakeRun, name: str) -> None:
    run = make("true")
    (run.path / name).unlink()
    if name == "job.json":
        with pytest.raises(FileNotFoundError):
            verify(run.folder)
        return
    told = [fault for fault in faults_of(run.folder) if fault.startswith(f"{name}: ")]
    assert any("No such file or directory" in fault for fault in told), faults_of(run.folder)


@pytest.mark.parametrize(
    "sums",
    [
        b"",
        b"\xff\n",
        b"{job}  job.json\n",
        b"{job}  job.json\n{job}  job.json\n",
        b"{job}  job.json\n{kernel}  kernel.pyz\n{kernel}  ../other\n",
        b"{job} job.json\n{kernel} kernel.pyz\n",
    ],
)
def test_sums_that_leave_something_out_are_no_proof(make: MakeRun, sums: bytes) -> None:
    run = make("true")
    job, kernel = (sha256_bytes(path.read_bytes()).encode() for path in (run.folder.job, run.folder.kernel))
    rewrite(run.folder.sums, sums.replace(b"{job}", job).replace(b"{kernel}", kernel))
    found = faults_of(run.folder)
    assert found in (
        ["SHA256SUMS: does not hold the sums of job.json and kernel.pyz alone"],
        ["SHA256SUMS: is not what submit wrote"],
    )
    with pytest.raises(UsageError):
        check_prepared(run.folder)


def resum(run: Run) -> None:
    """As somebody would who changes job.json and its sum."""
    job, kernel = (sha256_bytes(path.read_bytes()) for path in (run.folder.job, run.folder.kernel))
    rewrite(run.folder.sums, f"{job}  job.json\n{kernel}  kernel.pyz\n".encode())


def test_a_changed_jobspec_with_its_sum_changed_too_is_found_by_the_script(make: MakeRun) -> None:
    run = make("true")
    spec = dataclasses.replace(run.job.spec, hyperparams={"lr": 1})
    resources = dataclasses.replace(spec.resources, nodes=4)
    changed = dataclasses.replace(run.job, spec=dataclasses.replace(spec, resources=resources))
    rewrite(run.folder.job, dump(changed).encode())
    resum(run)
    assert faults_of(run.folder) == ["job.sbatch: is not what job.json renders to"]


def test_another_runs_jobspec_is_not_this_runs(make: MakeRun) -> None:
    run, other = make("true"), make("true")
    for name in ("job.json", "kernel.pyz", "capsule.tar", "job.sbatch"):
        rewrite(run.path / name, (other.path / name).read_bytes())
    resum(run)
    assert faults_of(run.folder) == [f"job.json: is of run {other.folder.run_id}, not of {run.folder.run_id}"]


def test_a_jobspec_that_is_none_is_told_beside_its_sum(make: MakeRun) -> None:
    run = make("true")
    rewrite(run.folder.job, b"{}")
    found = faults_of(run.folder)
    assert found[0].startswith("job.json: job.json: sha256 is ")
    assert found[1].startswith("job.json: apiVersion None is not ")
    resum(run)
    with pytest.raises(UsageError, match="apiVersion None is not"):
        verify(run.folder)


def test_a_script_that_cannot_be_rendered_any_more_is_told(make: MakeRun) -> None:
    run = make("true")
    assert run.job.spec.slurm is not None
    slurm = dataclasses.replace(run.job.spec.slurm, job_name="a\nb")
    changed = dataclasses.replace(run.job, spec=dataclasses.replace(run.job.spec, slurm=slurm))
    rewrite(run.folder.job, dump(changed).encode())
    resum(run)
    assert faults_of(run.folder) == ["spec.slurm.job_name: 'a\\nb' holds a line break or control character"]


def test_the_image_is_looked_at_again(make: MakeRun, tmp_path: Path) -> None:
    image = tmp_path / "trainer.sif"
    image.write_bytes(b"image")
    asked = Image(str(image), "--image", str(image), sha256_bytes(b"image"))
    run = make("true", container=Container("apptainer", image=asked))
    checked, faults = verify(run.folder)
    assert (checked[-1], faults) == (f"image {image}", [])
    image.write_bytes(b"another")
    assert faults_of(run.folder) == [
        f"trainer.sif: the image: sha256 is {sha256_bytes(b'another')}, not {sha256_bytes(b'image')} as recorded"
    ]
    check_prepared(run.folder)  # a large image takes minutes: tp job verify looks at it
    image.unlink()
    assert faults_of(run.folder) == ["trainer.sif: cannot be read: No such file or directory"]
