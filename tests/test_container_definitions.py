"""The images that this project defines: each by Apptainer and by Docker alike, and pinned."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tuneplane.images.choice import USER_MANAGED
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import load_catalog

ROOT = Path(__file__).resolve().parents[1]
CONTAINERS = ROOT / "containers"
DEFINITIONS = ("minimal", "catalog")
REQUIREMENTS = CONTAINERS / "catalog" / "requirements"
IMAGES = ("pytorch", "trl", "evalkit")


def apptainer(name: str) -> str:
    return (CONTAINERS / name / f"{name}.def").read_text()


def docker(name: str) -> str:
    return (CONTAINERS / name / "Dockerfile").read_text()


def section(text: str, name: str) -> list[str]:
    """The lines of a section of a definition, comments apart."""
    found = re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", text)
    lines = [line.strip() for line in (found[1] if found else "").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def steps(text: str) -> list[str]:
    """The commands of all RUN lines of a Dockerfile."""
    text = "".join(line for line in text.splitlines(True) if not line.startswith("#")).replace("\\\n", " ")
    runs = [line[4:] for line in text.splitlines() if line.startswith("RUN ")]
    return [" ".join(command.split()) for run in runs for command in run.split("&&")]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_both_definitions_of_an_image_start_from_the_same(name: str) -> None:
    base = re.search(r"(?m)^From: (\S+)$", apptainer(name))
    assert base is not None
    assert f"\nFROM {base[1]}\n" in docker(name)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_both_definitions_of_an_image_run_the_same_commands(name: str) -> None:
    own = [re.sub(r"\{\{ (\w+) \}\}", r"$\1", line) for line in section(apptainer(name), "post")]
    assert own == steps(docker(name))


def test_both_definitions_of_the_catalog_have_the_same_environment_files_and_arguments() -> None:
    environment = section(apptainer("catalog"), "environment")
    assert [line.replace("export", "ENV") for line in environment] == [
        line for line in docker("catalog").splitlines() if line.startswith("ENV ")
    ]
    copied = [line.split()[1:] for line in docker("catalog").splitlines() if line.startswith("COPY ")]
    assert [shlex.split(line) for line in section(apptainer("catalog"), "files")] == copied
    assert all((ROOT / source).exists() for source, _ in copied if source != "dist")
    arguments = [line.split()[1] for line in docker("catalog").splitlines() if line.startswith("ARG ")]
    assert section(apptainer("catalog"), "arguments") == arguments == ["packages=pytorch", "index="]


def pins(name: str) -> dict[str, str]:
    """Package → version of one list, with those of the lists that it takes in."""
    found: dict[str, str] = {}
    for line in (REQUIREMENTS / f"{name}.txt").read_text().splitlines():
        if line.startswith("--requirement "):
            found |= pins(line.split()[1].removesuffix(".txt"))
        elif line and not line.startswith("#"):
            assert re.fullmatch(r"[a-z-]+==[0-9]+(\.[0-9]+)+", line), line
            package, _, version = line.partition("==")
            assert package not in found, f"{package} is pinned twice"
            found[package] = version
    return found


@pytest.mark.parametrize("name", IMAGES)
def test_what_an_image_of_the_catalog_installs_is_pinned(name: str) -> None:
    own = {"pytorch": ["torch", "pillow"], "trl": ["trl", "peft"], "evalkit": ["lm-eval", "accelerate"]}
    assert {*own[name], "torch"} <= pins(name).keys()


def test_each_pin_has_its_reason() -> None:
    """A comment stands above it."""
    for file in REQUIREMENTS.glob("*.txt"):
        lines = file.read_text().splitlines()
        bare = [line for before, line in itertools.pairwise(lines) if "==" in line and before[:1] != "#"]
        assert bare == [], file.name


def test_a_model_is_evaluated_by_the_libraries_that_wrote_it() -> None:
    both = pins("trl").keys() & pins("evalkit").keys()
    assert {"torch", "transformers", "datasets", "peft"} <= both
    assert {name: pins("trl")[name] for name in both} == {name: pins("evalkit")[name] for name in both}


def test_no_definition_holds_an_address_but_that_of_pytorchs_own_index() -> None:
    """A mirror is the machine's own affair: pip and apt find it in their configuration."""
    for file in CONTAINERS.rglob("*"):
        addresses = re.findall(r"https?://[^\s/]+", file.read_text()) if file.is_file() else []
        assert set(addresses) <= {"https://download.pytorch.org"}, file.name


def test_the_page_names_every_definition() -> None:
    page = (CONTAINERS / "README.md").read_text()
    assert {f"`{path.parent.name}/`" for path in CONTAINERS.glob("*/Dockerfile")} <= set(
        re.findall(r"`\w+/`", page)
    )


def images_of_the_page() -> dict[str, tuple[str, list[str]]]:
    """Runtime id → its list of packages and its methods, as docs/containers.md tells sites."""
    page = (ROOT / "docs" / "containers.md").read_text()
    row = r"(?m)^\| `([\w.-]+)` \| ([^|]+) \| `--build-arg packages=(\w+)` \|"
    row += r" \[`(\w+)\.txt`\]\(\S+/(\w+)\.txt\) \|"
    rows = re.findall(row, page)
    assert all(one[2] == one[3] == one[4] for one in rows)
    return {runtime: (packages, re.findall(r"`([^`]+)`", methods)) for runtime, methods, packages, *_ in rows}


def test_every_method_of_the_catalog_has_an_image_whose_packages_fit_it() -> None:
    """By the runtime id, which a site maps to an image."""
    told = images_of_the_page()
    assert sorted(packages for packages, _ in told.values()) == sorted(IMAGES)
    catalog = load_catalog([packaged_configs()])
    runtimes = {method: catalog.get(method).runtime for method in catalog.methods()}
    with_image = {method: of for method, of in runtimes.items() if of.version != USER_MANAGED}
    assert {method: of.id for method, of in with_image.items()} == {
        method: runtime for runtime, (_, methods) in told.items() for method in methods
    }
    for method, runtime in with_image.items():
        versions = pins(told[runtime.id][0])
        for wanted in map(Requirement, runtime.requirements):
            assert wanted.specifier.contains(versions[wanted.name]), f"{method}: {wanted}"


def test_commands_of_the_catalogs_images_are_started_by_its_own_python(tmp_path: Path) -> None:
    """pip gives them the Python that pip itself runs under, which the image does not have."""
    source, target = tmp_path / "site/bin", tmp_path / "bin"
    for folder in (source, target):
        folder.mkdir(parents=True)
    (source / "torchrun").write_text("#!/elsewhere/.venv/bin/python3\nimport sys\nprint(sys.argv)\n")
    (source / "tool").write_bytes(b"#!/bin/sh\nexit 0\n")
    (target / "tool").write_text("the venv's own")
    script = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
    script += "from catalog import move_commands; move_commands(Path(sys.argv[2]), Path(sys.argv[3]))"
    testbed = str(ROOT / "slurm/testbed")
    subprocess.run([sys.executable, "-c", script, testbed, source, target], check=True, timeout=30)
    assert (target / "torchrun").read_text().splitlines()[:2] == ["#!/opt/venv/bin/python3", "import sys"]
    assert (target / "tool").read_text() == "the venv's own"
    assert not source.exists()


def test_what_does_not_fit_or_is_not_to_be_had_is_left_out_with_the_reason(tmp_path: Path) -> None:
    """A disk without room, and a pip without its packages: no image, a sentence each, and no error."""
    script = f"""if True:
    import sys; sys.path.insert(0, {str(ROOT / "slurm/testbed")!r})
    import shutil
    from pathlib import Path
    import catalog
    from layout import Layout

    layout = Layout(Path(sys.argv[1], "state"), Path(sys.argv[1], "cache"))
    real = catalog.resolve
    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: usage._replace(free=4_000_000_000)
    for packages in (["torch"], ["torch", "nvidia-cublas"], None):
        catalog.resolve = lambda install: packages or real([*install, "--no-index", "--isolated"])
        for line in catalog.build_all(layout, layout.cache / "base", ["pytorch"], Path("x.whl"), ""):
            print(line)
    """
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    room, with_cuda, no_packages = done.stdout.splitlines()
    assert room == f"pytorch left out: without CUDA it takes 6 GB, and {tmp_path}/cache has 4.0 GB free"
    assert with_cuda == f"pytorch left out: with CUDA it takes 20 GB, and {tmp_path}/cache has 4.0 GB free"
    assert no_packages.startswith("pytorch left out: pip cannot get its packages: Could not find a version")
