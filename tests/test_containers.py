"""What each container runtime is told, to the letter, and what it cannot be told."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneplane.containers import (
    RUNTIMES,
    SIF,
    SQUASHFS,
    Container,
    Launch,
    Mount,
    faults,
    form_faults,
    image_form,
    launch,
    serves_image,
)
from tuneplane.kernel.errors import OperationError, UsageError

FULL = Container(
    runtime="apptainer",
    image="/images/trainer.sif",
    options=("--site",),
    gpus=True,
    workdir="/scratch/a/work",
    tmp_dir="/scratch/a/tmp",
    home_dir="/scratch/a/home",
    state_dir="/scratch/a/runtime",
    log="/shared/runs/alice/x/attempts/0/node-0.log",
)
BARE = Container(runtime="apptainer", image="/x.sif", state_dir="/s")
TRAIN = ["bash", "/scratch/a/work/experiments/x/train.sh"]
ENV = {
    "PATH": "/usr/bin",
    "HOME": "/home/alice",
    "TMPDIR": "/scratch/a/tmp",
    "HF_TOKEN": "s3cret",
    "EMPTY": "",
}
MOUNTS = [
    Mount("/scratch/a/work", "/scratch/a/work", read_only=True),
    Mount("/shared/runs/alice/x/out", "/shared/runs/alice/x/out"),
    Mount("/data/imagenet", "/data"),
]
HOST = {
    "PATH": "/opt/bin:/usr/bin",
    "HOME": "/home/alice",
    "USER": "alice",
    "LOGNAME": "alice",
    "TMPDIR": "/scratch/a/tmp",
    "APPTAINER_BIND": "/etc",
    "ENROOT_MOUNT_HOME": "y",
    "PYXIS_CONTAINER_MOUNTS": "/etc",
    "http_proxy": "http://p",
    "LANG": "de",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOB_ID": "4242",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_CPUS_ON_NODE": "64",
    "SLURM_GPUS_PER_NODE": "h200:8",
    "SLURMD_NODENAME": "n4",
}
"""The agent's own environment on the last of four nodes."""

SCRIPT = "/scratch/a/runtime/start.sh"
TRAINER = ["bash", "/scratch/a/work/experiments/x/train.sh"]

FULL_APPTAINER = [
    *["apptainer", "--quiet", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,tmp,cwd,hostfs"],
    *["--home", "/scratch/a/home", "--pwd", "/scratch/a/work", "--nv"],
    *["--mount", "type=bind,source=/scratch/a/tmp,destination=/tmp"],
    *["--mount", "type=bind,source=/data/imagenet,destination=/data"],
    *["--mount", "type=bind,source=/scratch/a/tmp,destination=/var/tmp"],
    *["--mount", "type=bind,source=/scratch/a/home,destination=/scratch/a/home"],
    *["--mount", "type=bind,source=/scratch/a/work,destination=/scratch/a/work,ro"],
    *["--mount", f"type=bind,source={SCRIPT},destination={SCRIPT},ro"],
    *["--mount", "type=bind,source=/shared/runs/alice/x/out,destination=/shared/runs/alice/x/out"],
    *["--site", "/images/trainer.sif", "/bin/sh", SCRIPT, "run", *TRAINER],
]
FULL_ENROOT = [
    *["enroot", "start"],
    *["--mount", "/scratch/a/tmp:/tmp:none:x-create=auto,rbind"],
    *["--mount", "/data/imagenet:/data:none:x-create=auto,rbind"],
    *["--mount", "/scratch/a/tmp:/var/tmp:none:x-create=auto,rbind"],
    *["--mount", "/scratch/a/home:/scratch/a/home:none:x-create=auto,rbind"],
    *["--mount", "/scratch/a/work:/scratch/a/work:none:x-create=auto,rbind,ro"],
    *["--mount", "/shared/runs/alice/x/out:/shared/runs/alice/x/out:none:x-create=auto,rbind"],
    *["--site", "--rc", SCRIPT, "/images/trainer.sqsh", "run", *TRAINER],
]
FULL_PYXIS = [
    *["srun", "--jobid=4242", "--nodes=1", "--ntasks=1", "--nodelist=n4", "--cpus-per-task=64", "--overlap"],
    *["--mem=0", "--mpi=none"],
    "--export=HOME,USER,LOGNAME,TERM,NVIDIA_VISIBLE_DEVICES,NVIDIA_DRIVER_CAPABILITIES,"
    "ENROOT_LOGIN_SHELL,ENROOT_CONFIG_PATH",
    *["--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"],
    *["--container-readonly", "--container-image=/images/trainer.sqsh"],
    "--container-mounts="
    "/scratch/a/tmp:/tmp,"
    "/data/imagenet:/data,"
    "/scratch/a/tmp:/var/tmp,"
    "/scratch/a/home:/scratch/a/home,"
    "/scratch/a/work:/scratch/a/work:ro,"
    f"{SCRIPT}:{SCRIPT}:ro,"
    "/shared/runs/alice/x/out:/shared/runs/alice/x/out,"
    "/shared/runs/alice/x/attempts/0/node-0.log:/shared/runs/alice/x/attempts/0/node-0.log",
    *["--site", "/bin/sh", SCRIPT, "run", *TRAINER],
]

ENROOT_FOLDERS = {
    f"ENROOT_{name.upper()}_PATH": f"/scratch/a/runtime/enroot/{name}"
    for name in ("runtime", "cache", "data", "temp", "config")
}
ENROOT_SETTINGS = {
    "ENROOT_LOGIN_SHELL": "no",
    "ENROOT_MOUNT_HOME": "no",
    "ENROOT_REMAP_ROOT": "no",
    "ENROOT_ROOTFS_WRITABLE": "no",
}
USER = {"HOME": "/home/alice", "USER": "alice", "LOGNAME": "alice"}
GPUS = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
PATHS = {"PATH": "/opt/bin:/usr/bin", "TMPDIR": "/scratch/a/tmp"}


@pytest.mark.parametrize(
    ("runtime", "image", "argv", "environ"),
    [
        (
            "apptainer",
            "/images/trainer.sif",
            FULL_APPTAINER,
            {**PATHS, "HOME": "/home/alice", "APPTAINERENV_HF_TOKEN": "s3cret", "APPTAINERENV_EMPTY": ""},
        ),
        (
            "singularity",
            "/images/trainer.sif",
            ["singularity", *FULL_APPTAINER[1:]],
            {**PATHS, "HOME": "/home/alice", "SINGULARITYENV_HF_TOKEN": "s3cret", "SINGULARITYENV_EMPTY": ""},
        ),
        (
            "enroot",
            "/images/trainer.sqsh",
            FULL_ENROOT,
            {**PATHS, **USER, **GPUS, **ENROOT_SETTINGS, **ENROOT_FOLDERS},
        ),
        (
            "pyxis",
            "/images/trainer.sqsh",
            FULL_PYXIS,
            {
                **{"PATH": PATHS["PATH"], "SLURM_CONF": "/etc/slurm/slurm.conf", **USER, **GPUS},
                **{name: ENROOT_FOLDERS[name] for name in ("ENROOT_CONFIG_PATH",)},
                "ENROOT_LOGIN_SHELL": "no",
            },
        ),
    ],
)
def test_a_runtime_is_told_everything_and_no_value_of_the_environment_in_its_arguments(
    runtime, image, argv, environ
):
    """On the last of four nodes, with GPUs."""
    started = launch(replace(FULL, runtime=runtime, image=image), TRAIN, ENV, MOUNTS, HOST)
    assert started.argv == argv
    assert started.environ == environ
    assert started.cwd == "/"
    assert started.enter == [*argv[: -len(TRAIN) - 1], "enter"]
    assert list(started.files) == [SCRIPT]
    assert "s3cret" not in repr(started)
    assert started.leader == (["/bin/sh", SCRIPT, "run"] if runtime == "pyxis" else [])
    assert started.terminal == ("--pty" if runtime == "pyxis" else "")


ONE_NODE = {"PATH": "/usr/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "2"}


@pytest.mark.parametrize(
    ("runtime", "image", "argv", "environ"),
    [
        (
            "apptainer",
            "/x.sif",
            [
                *["apptainer", "--quiet", "exec", "--cleanenv", "--no-eval"],
                *["--no-mount", "home,tmp,cwd,hostfs", "--pwd", "/"],
                *["--mount", "type=bind,source=/s/start.sh,destination=/s/start.sh,ro"],
                *["/x.sif", "/bin/sh", "/s/start.sh", "run", "true"],
            ],
            {"PATH": "/usr/bin"},
        ),
        (
            "enroot",
            "/x.sqsh",
            ["enroot", "start", "--rc", "/s/start.sh", "/x.sqsh", "run", "true"],
            {
                "PATH": "/usr/bin",
                "NVIDIA_VISIBLE_DEVICES": "void",
                **ENROOT_SETTINGS,
                **{name: path.replace("/scratch/a/runtime", "/s") for name, path in ENROOT_FOLDERS.items()},
            },
        ),
        (
            "pyxis",
            "/x.sqsh",
            [
                *["srun", "--jobid=7", "--nodes=1", "--ntasks=1", "--nodelist=n1", "--cpus-per-task=2"],
                *["--overlap", "--mem=0", "--mpi=none"],
                "--export=TERM,NVIDIA_VISIBLE_DEVICES,ENROOT_LOGIN_SHELL,ENROOT_CONFIG_PATH",
                *["--no-container-mount-home", "--no-container-remap-root", "--no-container-entrypoint"],
                *["--container-readonly", "--container-image=/x.sqsh"],
                "--container-mounts=/s/start.sh:/s/start.sh:ro",
                *["/bin/sh", "/s/start.sh", "run", "true"],
            ],
            {
                "PATH": "/usr/bin",
                "NVIDIA_VISIBLE_DEVICES": "void",
                "ENROOT_LOGIN_SHELL": "no",
                "ENROOT_CONFIG_PATH": "/s/enroot/config",
            },
        ),
        ("none", "", ["true"], {}),
    ],
)
def test_a_runtime_is_told_no_more_than_was_asked(runtime, image, argv, environ):
    """On one node, without GPUs: where an image asks for some itself, it gets none."""
    started = launch(replace(BARE, runtime=runtime, image=image), ["true"], {}, (), ONE_NODE)
    assert (started.argv, started.environ) == (argv, environ)


FULL_LISTS = {
    "apptainer": FULL_APPTAINER,
    "singularity": ["singularity", *FULL_APPTAINER[1:]],
    "enroot": FULL_ENROOT,
    "pyxis": FULL_PYXIS,
    "none": TRAIN,
}
WITHOUT_GPUS = {
    "--nv": None,
    FULL_PYXIS[9]: FULL_PYXIS[9].replace("NVIDIA_DRIVER_CAPABILITIES,", ""),
}
"""What differs in the lists above where a node has no GPUs; an image that asks for some is told `void`."""


@pytest.mark.parametrize("gpus", [True, False], ids=["gpus", "no gpus"])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_whole_list_on_each_node_of_a_run_with_gpus_and_without(runtime, nodes, gpus):
    """Nothing but pyxis' step knows of its node; a step of its own for each, whatever their number."""
    ending = "sif" if runtime in ("apptainer", "singularity") else "sqsh"
    container = replace(FULL, runtime=runtime, image=f"/images/trainer.{ending}", gpus=gpus)
    mounts = [] if runtime == "none" else MOUNTS
    for rank in range(nodes):
        host = {
            **HOST,
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": str(nodes),
            "SLURMD_NODENAME": f"n{rank + 1}",
        }
        started = launch(container, TRAIN, ENV, mounts, host)
        expected = [
            f"--nodelist=n{rank + 1}" if word == "--nodelist=n4" else word for word in FULL_LISTS[runtime]
        ]
        if not gpus:
            changed = [WITHOUT_GPUS.get(word, word) for word in expected]
            expected = [word for word in changed if word is not None]
        assert started.argv == expected
        told = {name: value for name, value in started.environ.items() if name.startswith("NVIDIA_")}
        hooks = GPUS if gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}
        assert told == (hooks if runtime in ("enroot", "pyxis") else {})


SPACES = [
    Mount("/d/my data", "/d/my data"),
    Mount("/d/a:b", "/in/c:d", read_only=True),
    Mount('/d/"q",r', "/q"),
]


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_the_whole_list_with_mounts_of_spaces_colons_quotes_and_commas(runtime):
    started = launch(replace(BARE, runtime=runtime), ["true"], {}, SPACES, ONE_NODE)
    assert started.argv == [
        *[runtime, "--quiet", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,tmp,cwd,hostfs"],
        *["--pwd", "/"],
        *["--mount", 'type=bind,"source=/d/""q"",r",destination=/q'],
        *["--mount", 'type=bind,"source=/d/my data","destination=/d/my data"'],
        *["--mount", "type=bind,source=/d/a:b,destination=/in/c:d,ro"],
        *["--mount", "type=bind,source=/s/start.sh,destination=/s/start.sh,ro"],
        *["/x.sif", "/bin/sh", "/s/start.sh", "run", "true"],
    ]


def test_without_a_container_a_folder_of_any_name_is_there_under_its_own_alone():
    bare = Container(runtime="none")
    assert launch(bare, ["true"], {}, SPACES[:1]) == Launch(["true"], {}, "/")
    assert [fault.what for fault in faults(bare, ["true"], {}, SPACES)] == [
        "'/d/a:b' cannot be mounted as '/in/c:d' without a container",
        "'/d/\"q\",r' cannot be mounted as '/q' without a container",
    ]


def test_a_runtime_without_any_path_gets_the_usual_one():
    for runtime in ("apptainer", "enroot", "pyxis"):
        started = launch(replace(BARE, runtime=runtime), ["true"], {}, (), {"SLURM_JOB_ID": "7"})
        assert started.environ["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def test_what_the_site_says_of_devices_reaches_enroots_hooks_and_the_trainer():
    env = {"NVIDIA_VISIBLE_DEVICES": "void", "MELLANOX_VISIBLE_DEVICES": "all", "NVIDIA_X": "1"}
    for runtime in ("enroot", "pyxis"):
        started = launch(replace(FULL, runtime=runtime, image="/x.sqsh"), TRAIN, env, (), HOST)
        assert {name: started.environ[name] for name in env} == env
        assert "export MELLANOX_VISIBLE_DEVICES=all\n" in started.files[SCRIPT]


def test_pyxis_outside_of_a_slurm_job_is_told():
    with pytest.raises(OperationError, match="in Slurm jobs alone"):
        launch(replace(BARE, runtime="pyxis"), ["true"], {})


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
    started = launch(replace(BARE, runtime=runtime, binary=binary), ["true"], {"A": "1"})
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
    assert (
        fault.what == "container runtime 'docker' is not one of apptainer, singularity, enroot, pyxis, none"
    )


def mount_options(started: Launch) -> list[str]:
    return [value for flag, value in zip(started.argv, started.argv[1:], strict=False) if flag == "--mount"]


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1).map(
        lambda name: "/m/" + name
    )
)
def test_whatever_a_mount_is_called_its_option_reads_back_as_csv(path):
    mount = Mount(path, path + "/target", read_only=True)
    if faults(BARE, ["true"], {}, [mount]):
        assert ".." in path.split("/")
        return
    (option,) = [o for o in mount_options(launch(BARE, ["true"], {}, [mount])) if "/s/start.sh" not in o]
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
        ("UID", "1", "UID is a shell's own"),
        ("IFS", "1", "IFS is a shell's own"),
        ("GID", "1", "GID is Apptainer's own"),
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
        ({"state_dir": ""}, "folder of the runtime '' is not an absolute path"),
    ],
)
def test_a_folder_or_image_that_cannot_be_said_is_refused(changed, words):
    container = Container(**{**FULL.__dict__, **changed})
    with pytest.raises(UsageError, match=words):
        launch(container, TRAIN, {})


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("argv", [[], [""], ["a\0b"]])
def test_a_command_that_is_none_is_refused(runtime, argv):
    with pytest.raises(UsageError):
        launch(replace(BARE, runtime=runtime), argv, {}, (), ONE_NODE)


UNSAYABLE = ["/a b", "/a\tb", "/a\nb", "/a:b", "/a,b", "/a'b", '/a"b', "/a\\b", "/a$b", "/a`b", "/a\x01b"]


@pytest.mark.parametrize("runtime", ["enroot", "pyxis"])
@pytest.mark.parametrize("path", UNSAYABLE)
def test_enroot_and_pyxis_refuse_a_mount_that_they_would_read_as_another(runtime, path):
    """Blanks, colons and commas separate the fields; a shell reads the rest."""
    container = replace(FULL, runtime=runtime, image="/x.sqsh")
    for mount in (Mount(path, "/data"), Mount("/data", path)):
        (fault,) = faults(container, TRAIN, {}, [mount])
        assert fault.what.startswith(f"{runtime} cannot mount {path!r}: white space, quotes and any of")
        assert fault.remedy == "rename it, or use a profile with another container runtime"
    assert faults(FULL, TRAIN, {}, [Mount(path, "/data")]) == [], "Apptainer can be told it"


@pytest.mark.parametrize("runtime", ["enroot", "pyxis"])
@pytest.mark.parametrize("path", UNSAYABLE)
@pytest.mark.parametrize("field", ["image", "state_dir"])
def test_enroot_and_pyxis_refuse_an_image_or_a_scratch_folder_of_such_a_name(runtime, path, field):
    container = replace(FULL, runtime=runtime, image="/x.sqsh")
    found = faults(replace(container, **{field: path}), TRAIN, {})
    assert f"{runtime} cannot be given the path {path!r}" in str(found[0])


@pytest.mark.parametrize("runtime", ["enroot", "pyxis"])
def test_enroot_and_pyxis_take_any_value_of_the_environment(runtime):
    """It passes by a file that a shell reads."""
    env = {"A": "a\nB=1\n", "B": "'x' \"y\"", "C": "\udcff", "D": "$(id) `id` \\", "E": ""}
    script = launch(replace(FULL, runtime=runtime, image="/x.sqsh"), TRAIN, env, (), HOST).files[SCRIPT]
    assert "export D='$(id) `id` \\'\n" in script


@pytest.mark.parametrize(
    ("runtime", "form", "refused"),
    [
        *[(runtime, form, False) for runtime in ("apptainer", "singularity") for form in (SIF, SQUASHFS)],
        *[(runtime, SQUASHFS, False) for runtime in ("enroot", "pyxis")],
        *[(runtime, SIF, True) for runtime in ("enroot", "pyxis")],
    ],
)
def test_each_runtime_starts_images_of_its_own_form(runtime, form, refused):
    found = form_faults(runtime, form, "/images/x.sif", "--image")
    assert [fault.what for fault in found] == (
        [f"{runtime} starts squashfs files (.sqsh), and /images/x.sif is a SIF"] if refused else []
    )


def test_an_image_is_built_in_the_form_that_every_version_of_its_runtime_starts():
    built = {runtime: image_form(runtime) for runtime in RUNTIMES}
    squashfs = {"enroot": SQUASHFS, "pyxis": SQUASHFS}
    assert built == {"apptainer": SIF, "singularity": SIF, **squashfs, "none": ""}


def test_all_faults_are_told_at_once():
    with pytest.raises(UsageError) as error:
        launch(Container(runtime="apptainer"), [], {"A-B": "", "UID": ""}, [Mount("x", "/")])
    assert len(error.value.faults) == 7


def test_the_processes_that_serve_an_image_are_known_and_a_trainer_is_none_of_them():
    assert serves_image("squashfuse_ll") and serves_image("fuse-overlayfs")
    assert not serves_image("python3") and not serves_image("starter")


def test_every_runtime_can_be_told_the_simplest_start():
    for runtime in RUNTIMES:
        assert launch(replace(BARE, runtime=runtime), ["true"], {}, (), ONE_NODE).argv[-1] == "true"


def test_it_needs_nothing_but_the_standard_library():
    root = Path(__file__).parents[1]
    program = f"import sys; sys.path.insert(0, {str(root)!r}); import tuneplane.containers"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True, timeout=60)
