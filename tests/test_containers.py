"""What each container runtime is told, to the letter, and what it cannot be told."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneplane.containers import RUNTIMES, Container, Launch, Mount, faults, launch, serves_image
from tuneplane.kernel.errors import UsageError

FULL = Container(
    runtime="apptainer",
    image="/images/trainer.sif",
    options=("--rocm",),
    gpus=True,
    workdir="/scratch/a/work",
    tmp_dir="/scratch/a/tmp",
    home_dir="/scratch/a/home",
)
TRAIN = ["bash", "/scratch/a/work/experiments/x/train.sh"]
ENV = {
    "PATH": "/usr/bin",
    "HOME": "/home/alice",
    "TMPDIR": "/scratch/a/tmp",
    "HF_TOKEN": "s3cret",
    "EMPTY": "",
}
HOST = {
    "PATH": "/opt/apptainer/bin:/usr/bin",
    "APPTAINER_BIND": "/etc",
    "http_proxy": "http://p",
    "LANG": "de",
}


def test_apptainer_is_told_everything_and_no_value_of_the_environment_in_its_arguments():
    mounts = [
        Mount("/scratch/a/work", "/scratch/a/work", read_only=True),
        Mount("/shared/runs/alice/x/out", "/shared/runs/alice/x/out"),
        Mount("/data/imagenet", "/data"),
    ]
    started = launch(FULL, TRAIN, ENV, mounts, HOST)
    assert started.argv == [
        "apptainer",
        "--quiet",
        "exec",
        "--cleanenv",
        "--no-eval",
        "--no-mount",
        "home,tmp,cwd,hostfs",
        "--home",
        "/scratch/a/home",
        "--pwd",
        "/scratch/a/work",
        "--nv",
        "--mount",
        "type=bind,source=/scratch/a/tmp,destination=/tmp",
        "--mount",
        "type=bind,source=/data/imagenet,destination=/data",
        "--mount",
        "type=bind,source=/scratch/a/tmp,destination=/var/tmp",
        "--mount",
        "type=bind,source=/scratch/a/home,destination=/scratch/a/home",
        "--mount",
        "type=bind,source=/scratch/a/work,destination=/scratch/a/work,ro",
        "--mount",
        "type=bind,source=/shared/runs/alice/x/out,destination=/shared/runs/alice/x/out",
        "--rocm",
        "/images/trainer.sif",
        "env",
        "HOME=/scratch/a/home",
        "bash",
        "/scratch/a/work/experiments/x/train.sh",
    ]
    assert started.environ == {
        "PATH": "/opt/apptainer/bin:/usr/bin",
        "APPTAINERENV_HF_TOKEN": "s3cret",
        "APPTAINERENV_EMPTY": "",
        "APPTAINERENV_TMPDIR": "/tmp",
    }
    assert started.cwd == "/"
    assert "s3cret" not in repr(started)


def test_apptainer_is_told_no_more_than_was_asked():
    started = launch(Container(runtime="apptainer", image="/x.sif"), ["true"], {})
    assert started.argv == [
        *["apptainer", "--quiet", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,tmp,cwd,hostfs"],
        *["--pwd", "/", "/x.sif", "true"],
    ]
    assert started.environ == {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


@pytest.mark.parametrize(
    ("runtime", "binary", "program", "prefix"),
    [
        ("apptainer", "", "apptainer", "APPTAINERENV_"),
        ("apptainer", "/opt/a/bin/apptainer", "/opt/a/bin/apptainer", "APPTAINERENV_"),
        ("singularity", "", "singularity", "SINGULARITYENV_"),
        ("apptainer", "/usr/bin/singularity", "/usr/bin/singularity", "SINGULARITYENV_"),
        ("apptainer", "singularity-ce", "singularity-ce", "SINGULARITYENV_"),
        ("singularity", "/opt/singularity/bin/apptainer", "/opt/singularity/bin/apptainer", "APPTAINERENV_"),
    ],
)
def test_singularity_gets_the_environment_under_the_name_that_it_reads(runtime, binary, program, prefix):
    started = launch(Container(runtime=runtime, image="/x.sif", binary=binary), ["true"], {"A": "1"})
    assert started.argv[0] == program
    assert started.environ[prefix + "A"] == "1"


@pytest.mark.contract("C10")
def test_the_path_of_the_host_stays_outside_a_container():
    started = launch(FULL, TRAIN, {"PATH": "/host/bin", "A": "1"}, (), {"PATH": "/usr/bin"})
    assert [name for name in started.environ if name.endswith("PATH")] == ["PATH"]
    assert "/host/bin" not in str(started.argv) + str(started.environ)


def test_without_a_container_everything_is_as_it_is():
    bare = Container(runtime="none", workdir="/scratch/a/work", tmp_dir="/scratch/a/tmp", home_dir="/h")
    mounts = [Mount("/data", "/data", read_only=True)]
    assert launch(bare, TRAIN, ENV, mounts, HOST) == Launch(TRAIN, ENV, "/scratch/a/work")


def test_without_a_container_a_mount_under_another_name_is_refused():
    with pytest.raises(UsageError, match="cannot be mounted as '/data' without a container"):
        launch(Container(runtime="none"), ["true"], {}, [Mount("/scratch/data", "/data")])
    assert faults(Container(runtime="none"), ["true"], {}, [Mount("/data/", "/data")]) == []


def test_building_the_same_start_twice_gives_the_same_and_changes_nothing_given():
    argv, env, mounts = list(TRAIN), dict(ENV), [Mount("/data", "/data")]
    first = launch(FULL, argv, env, mounts, HOST)
    assert launch(FULL, argv, env, mounts, HOST) == first
    assert (argv, env, mounts) == (TRAIN, ENV, [Mount("/data", "/data")])


def test_an_unknown_runtime_is_named_with_those_there_are():
    (fault,) = faults(Container(runtime="docker"), ["true"], {})
    assert fault.what == "container runtime 'docker' is not one of apptainer, singularity, none"


def mount_options(started: Launch) -> list[str]:
    return [value for flag, value in zip(started.argv, started.argv[1:], strict=False) if flag == "--mount"]


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1).map(
        lambda name: "/m/" + name
    )
)
def test_whatever_a_mount_is_called_its_option_reads_back_as_csv(path):
    container = Container(runtime="apptainer", image="/x.sif")
    mount = Mount(path, path + "/target", read_only=True)
    if faults(container, ["true"], {}, [mount]):
        assert ".." in path.split("/")
        return
    (option,) = mount_options(launch(container, ["true"], {}, [mount]))
    (fields,) = (
        csv.reader([option], strict=True) if "\n" not in option else csv.reader(option.splitlines(True))
    )
    assert fields == ["type=bind", f"source={path}", f"destination={path}/target", "ro"]


def test_outer_folders_are_mounted_before_inner_ones():
    mounts = [Mount("/1", "/a/b/c"), Mount("/2", "/a"), Mount("/3", "/a/b/"), Mount("/4", "/tmp/x")]
    started = launch(FULL, TRAIN, {}, mounts)
    targets = [option.split("destination=")[1] for option in mount_options(started)]
    assert targets.index("/a") < targets.index("/a/b/") < targets.index("/a/b/c")
    assert targets.index("/tmp") < targets.index("/tmp/x")


@pytest.mark.parametrize(
    ("mounts", "words"),
    [
        ([Mount("relative", "/x")], "'relative' is not an absolute path"),
        ([Mount("/x", "relative")], "'relative' is not an absolute path"),
        ([Mount("", "/x")], "'' is not an absolute path"),
        ([Mount("/x", "/a/../b")], "holds '..'"),
        ([Mount("/x", "/")], "cannot be mounted as /"),
        ([Mount("/x", "//")], "cannot be mounted as /"),
        ([Mount("/x", "/d"), Mount("/y", "/d/")], "'/x' and '/y' are both to be mounted as '/d'"),
        ([Mount("/x", "/tmp")], "both to be mounted as '/tmp'"),
        ([Mount("/a\rb", "/x")], "cannot mount '/a\\rb'"),
        ([Mount("/a\udcff", "/x")], "cannot mount '/a\\udcff'"),
        ([Mount("/a\0b", "/x")], "NUL byte"),
    ],
)
def test_a_mount_that_cannot_be_said_is_refused(mounts, words):
    with pytest.raises(UsageError) as error:
        launch(FULL, TRAIN, {}, mounts)
    assert any(words in fault.what for fault in error.value.faults)


def test_the_same_mount_asked_for_twice_is_mounted_once():
    started = launch(FULL, TRAIN, {}, [Mount("/data", "/data"), Mount("/data", "/data")])
    assert str(started.argv).count("destination=/data'") == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("A-B", "1", "'A-B' is no name"),
        ("1A", "1", "'1A' is no name"),
        ("", "1", "'' is no name"),
        ("A=B", "1", "'A=B' is no name"),
        ("A\n", "1", "is no name"),
        ("A;id", "1", "is no name"),
        ("Ä", "1", "is no name"),
        ("UID", "1", "UID is Apptainer's own"),
        ("EUID", "1", "EUID is Apptainer's own"),
        ("PREPEND_PATH", "/x", "PREPEND_PATH is Apptainer's own"),
        ("APPTAINER_BIND", "/x", "APPTAINER_BIND is Apptainer's own"),
        ("SINGULARITYENV_X", "/x", "SINGULARITYENV_X is Apptainer's own"),
        ("A", "s3cret\0", "the value of A holds a NUL byte"),
        ("A", "s3cret\udcff", "the value of A is not UTF-8"),
    ],
)
def test_a_variable_that_would_not_arrive_as_it_is_is_refused_without_showing_its_value(name, value, words):
    with pytest.raises(UsageError) as error:
        launch(FULL, TRAIN, {name: value})
    assert words in str(error.value)
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image": ""}, "there is no image to start"),
        ({"image": "trainer.sif"}, "is not an absolute path"),
        ({"image": "/a\udcff.sif"}, "is not UTF-8"),
        ({"image": "docker://alpine"}, "is not an absolute path"),
        ({"workdir": "work"}, "is not an absolute path"),
        ({"home_dir": "/a:b"}, "would split it at the colon"),
        ({"home_dir": "home"}, "is not an absolute path"),
        ({"tmp_dir": "tmp"}, "is not an absolute path"),
    ],
)
def test_a_folder_or_image_that_cannot_be_said_is_refused(changed, words):
    container = Container(**{**FULL.__dict__, **changed})
    with pytest.raises(UsageError, match=words):
        launch(container, TRAIN, {})


@pytest.mark.parametrize("runtime", ["apptainer", "none"])
@pytest.mark.parametrize("argv", [[], [""], ["a\0b"]])
def test_a_command_that_is_none_is_refused(runtime, argv):
    with pytest.raises(UsageError):
        launch(Container(runtime=runtime, image="/x.sif"), argv, {})


def test_a_command_that_env_would_take_for_a_variable_is_refused():
    with pytest.raises(UsageError, match="env would take it for a variable"):
        launch(FULL, ["a=b"], {})


def test_all_faults_are_told_at_once():
    with pytest.raises(UsageError) as error:
        launch(Container(runtime="apptainer"), [], {"A-B": "", "UID": ""}, [Mount("x", "/")])
    assert len(error.value.faults) == 6


def test_the_processes_that_serve_an_image_are_known_and_a_trainer_is_none_of_them():
    assert serves_image("squashfuse_ll") and serves_image("fuse-overlayfs")
    assert not serves_image("python3") and not serves_image("starter")


def test_every_runtime_can_be_told_the_simplest_start():
    for runtime in RUNTIMES:
        assert launch(Container(runtime=runtime, image="/x.sif"), ["true"], {}).argv[-1] == "true"


def test_it_needs_nothing_but_the_standard_library():
    root = Path(__file__).parents[1]
    program = f"import sys; sys.path.insert(0, {str(root)!r}); import tuneplane.containers"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)
