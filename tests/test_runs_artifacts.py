"""What a run left below its output folder (C13): found by its declaration, and nothing outside ever followed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from launch_jobs import bare_slurm_job, changed, write_run

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.recipes.outputs import STANDARD_OUTPUTS
from tuneplane.runs.artifacts import Artifact, list_artifacts
from tuneplane.spec import JobSpec, read

ROOT = Path(__file__).resolve().parents[1]
RUN_ID = "ring-20260114-093012-x3k9"
STANDARD = [asdict(output) for output in STANDARD_OUTPUTS]


@pytest.fixture
def run(weird_dir: Path) -> RunFolder:
    """A run with the outputs that every recipe has, in a folder of an awkward name."""
    folder = weird_dir / RUN_ID
    job = changed(bare_slurm_job(), {"metadata.folder": str(folder), "spec.outputs": STANDARD})
    return write_run(job)


def with_outputs(run: RunFolder, *paths: str) -> JobSpec:
    outputs = [{"name": "x", "path": path, "kind": "artifact", "step_key": ""} for path in paths]
    return changed(read(run.job), {"spec.outputs": outputs})


def put(run: RunFolder, name: str, size_bytes: int = 3) -> Path:
    path = run.out / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size_bytes)
    return path


def found_in(run: RunFolder, job: JobSpec | None = None) -> tuple[dict[str, Artifact], list[str]]:
    found, skipped = list_artifacts(run, job or read(run.job))
    paths = [artifact.path for artifact in found]
    assert len(set(paths)) == len(paths)
    return {artifact.path: artifact for artifact in found}, skipped


def brief(found: dict[str, Artifact]) -> dict[str, tuple[str, str, int, int]]:
    return {path: (a.name, a.kind, a.size_bytes, a.files) for path, a in found.items()}


@pytest.mark.contract("C13")
def test_checkpoints_logs_an_export_and_a_report_are_found(run: RunFolder) -> None:
    put(run, "checkpoints/step-10/model.bin", 100)
    put(run, "checkpoints/step-10/shards/0/x", 10)
    put(run, "checkpoints/last.pt", 7)
    put(run, "logs/train.log", 5)
    put(run, "hf_export/config.json", 2)
    put(run, "eval/report.json", 4)
    put(run, "eval/other.json", 4)
    put(run, "scratch/ignored", 4)
    found, skipped = found_in(run)
    assert brief(found) == {
        "checkpoints/last.pt": ("checkpoints", "file", 7, 1),
        "checkpoints/step-10": ("checkpoints", "folder", 110, 2),
        "logs": ("logs", "folder", 5, 1),
        "hf_export": ("hf_export", "folder", 2, 1),
        "eval/report.json": ("eval", "file", 4, 1),
    }
    assert skipped == []


@pytest.mark.contract("C13")
def test_each_of_them_is_optional_and_logs_may_be_one_file(run: RunFolder) -> None:
    assert found_in(run) == ({}, [])
    put(run, "logs", 9)
    assert brief(found_in(run)[0]) == {"logs": ("logs", "file", 9, 1)}
    run.out.joinpath("logs").unlink()
    run.out.rmdir()
    assert found_in(run) == ({}, [])


def test_a_folder_is_as_new_as_the_newest_file_in_it(run: RunFolder) -> None:
    old, new = put(run, "checkpoints/s/old"), put(run, "checkpoints/s/new")
    os.utime(old, (10, 10))
    os.utime(new, (2_000_000_000, 2_000_000_000))
    assert found_in(run)[0]["checkpoints/s"].modified_at == 2_000_000_000


def test_names_of_any_kind(run: RunFolder) -> None:
    names = ["a b", "a\nb", "实验", "$HOME", "-x", "[1]", "*", ".hidden", os.fsdecode(b"caf\xe9")]
    for name in names:
        put(run, f"checkpoints/{name}")
    assert set(found_in(run)[0]) == {f"checkpoints/{name}" for name in names}


# Links that lead out


@pytest.mark.contract("C13")
def test_what_leads_outside_is_reported_and_skipped(run: RunFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    put(run, "checkpoints/good")
    (run.out / "checkpoints" / "absolute").symlink_to(outside)
    (run.out / "checkpoints" / "relative").symlink_to("../../../outside")
    (run.out / "checkpoints" / "etc").symlink_to("/etc/passwd")
    (run.out / "checkpoints" / "up").symlink_to("../..")
    found, skipped = found_in(run)
    assert set(found) == {"checkpoints/good"}
    assert sorted(skipped) == [
        f"checkpoints: checkpoints/absolute leads outside the output folder, to {outside}",
        "checkpoints: checkpoints/etc leads outside the output folder, to /etc/passwd",
        f"checkpoints: checkpoints/relative leads outside the output folder, to {run.path.parent / 'outside'}",
        f"checkpoints: checkpoints/up leads outside the output folder, to {run.path}",
    ]


@pytest.mark.contract("C13")
def test_a_folder_that_leads_outside_is_not_even_listed(run: RunFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for number in range(20):
        (outside / f"step-{number}").mkdir(parents=True)
    (outside / "report.json").write_text("{}")
    for name in ("checkpoints", "eval", "logs", "hf_export"):
        (run.out / name).symlink_to(outside)
    found, skipped = found_in(run)
    assert found == {}
    assert sorted(skipped) == [
        f"{name}: {name} leads outside the output folder, to {outside}"
        for name in ("checkpoints", "eval", "hf_export", "logs")
    ]


def test_an_output_folder_that_was_made_a_link_is_not_followed(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "outside" / "checkpoints").mkdir(parents=True)
    run.out.rmdir()
    run.out.symlink_to(tmp_path / "outside")
    assert found_in(run) == ({}, [f"the output folder is a link, to {tmp_path / 'outside'}"])


def test_a_run_whose_root_is_a_link_has_its_artifacts(run: RunFolder, tmp_path: Path) -> None:
    put(run, "checkpoints/good")
    link = tmp_path / "link"
    link.symlink_to(run.path.parent)
    assert set(found_in(RunFolder(link / RUN_ID))[0]) == {"checkpoints/good"}


def test_links_inside_are_followed_and_counted_as_what_they_name(run: RunFolder) -> None:
    put(run, "checkpoints/step-10/model.bin", 100)
    (run.out / "checkpoints" / "latest").symlink_to("step-10")
    (run.out / "logs").symlink_to("checkpoints/step-10/model.bin")
    found, skipped = found_in(run)
    assert brief(found) == {
        "checkpoints/step-10": ("checkpoints", "folder", 100, 1),
        "checkpoints/latest": ("checkpoints", "folder", 100, 1),
        "logs": ("logs", "file", 100, 1),
    }
    assert skipped == []


def test_a_link_within_an_artifact_is_counted_as_a_link_and_never_followed(
    run: RunFolder, tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    put(run, "checkpoints/s/model", 10)
    (run.out / "checkpoints/s/out").symlink_to(tmp_path / "big")
    (run.out / "checkpoints/s/folder").symlink_to("/etc")
    artifact = found_in(run)[0]["checkpoints/s"]
    assert artifact.files == 2
    assert artifact.size_bytes < 1000


def test_loops_and_links_to_nothing_are_told(run: RunFolder) -> None:
    folder = run.out / "checkpoints"
    folder.mkdir()
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    (folder / "gone").symlink_to("nothing")
    put(run, "checkpoints/self/model", 10)
    (folder / "self" / "again").symlink_to(".")
    (folder / "all").symlink_to("..")
    found, skipped = found_in(run)
    assert set(found) == {"checkpoints/self", "checkpoints/all"}
    assert sorted(skipped) == [
        "checkpoints: checkpoints/a: Too many levels of symbolic links",
        "checkpoints: checkpoints/b: Too many levels of symbolic links",
        "checkpoints: checkpoints/gone: No such file or directory",
    ]


# What is declared


@pytest.mark.parametrize("path", ["../*", "/etc/*", "a/../../x", "..", "/"])
def test_a_declaration_that_is_not_below_the_output_folder_is_told(run: RunFolder, path: str) -> None:
    put(run, "checkpoints/good")
    found, skipped = found_in(run, with_outputs(run, path, "checkpoints/*"))
    assert list(found) == ["checkpoints/good"]
    assert skipped == [f"x: {path} is not below the output folder"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tb", ["tb"]),
        ("tb/*.0", ["tb/e.0"]),
        ("*/e.[01]", ["tb/e.0", "tb/e.1"]),
        ("**/e.1", ["deep/er/e.1", "tb/e.1"]),
        ("./tb//e.0", ["tb/e.0"]),
        ("tb/e.?", ["tb/e.0", "tb/e.1"]),
        ("tb/e.0/x", []),
        ("nothing/*", []),
    ],
)
def test_a_declaration_is_a_glob(run: RunFolder, path: str, expected: list[str]) -> None:
    for name in ("tb/e.0", "tb/e.1", "deep/er/e.1"):
        put(run, name)
    found, skipped = found_in(run, with_outputs(run, path))
    assert (sorted(found), skipped) == (expected, [])


# What cannot be read


def test_folders_that_may_not_be_read_are_told(run: RunFolder, tmp_path: Path) -> None:
    """As an ordinary user, whom modes concern."""
    put(run, "checkpoints/closed/x", 5)
    put(run, "checkpoints/half/open", 5)
    put(run, "checkpoints/half/sub/x", 5)
    put(run, "eval/report.json")
    (run.out / "checkpoints/closed").chmod(0)
    (run.out / "checkpoints/half/sub").chmod(0)
    (run.out / "eval").chmod(0)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from tuneplane.runs.artifacts import list_artifacts; from tuneplane.kernel.runfolder import RunFolder\n"
        "from tuneplane.spec import read\n"
        "found, skipped = list_artifacts(RunFolder(Path(sys.argv[2])), read(Path(sys.argv[2]) / 'job.json'))\n"
        "print([(a.path, a.size_bytes) for a in found]); print(*skipped, sep='\\n')\n"
    )
    prefix = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*prefix, sys.executable, "-c", code, str(ROOT), str(run.path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    for path in ("checkpoints/closed", "checkpoints/half/sub", "eval"):
        (run.out / path).chmod(0o700)
    told = done.stdout.splitlines()
    assert told[0] == "[('checkpoints/closed', 0), ('checkpoints/half', 5)]"
    assert sorted(told[1:]) == [
        "checkpoints: 1 folder in checkpoints/closed cannot be read: Permission denied",
        "checkpoints: 1 folder in checkpoints/half cannot be read: Permission denied",
        "eval: eval: Permission denied",
    ]


def test_files_that_vanish_while_they_are_counted_are_no_error(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run, "checkpoints/s/a", 5)
    put(run, "checkpoints/s/b", 5)
    lstat = Path.lstat

    def vanishing(self: Path) -> os.stat_result:
        if self.name == "a":
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return lstat(self)

    monkeypatch.setattr(Path, "lstat", vanishing)
    assert brief(found_in(run)[0]) == {"checkpoints/s": ("checkpoints", "folder", 5, 1)}


def test_a_pipe_or_socket_is_listed_and_not_opened(run: RunFolder) -> None:
    (run.out / "checkpoints").mkdir()
    os.mkfifo(run.out / "checkpoints" / "pipe")
    assert brief(found_in(run)[0]) == {"checkpoints/pipe": ("checkpoints", "file", 0, 1)}
