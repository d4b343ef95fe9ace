"""The script as made through submitit: pure, safe against any value, and noisy where submitit changes."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_jobs import JOBSPECS, bare_slurm_job, changed, complete_job, local_job
from submitit.slurm import slurm as submitit_slurm

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.launch.script import header, local_script, quote
from tuneplane.launch.slurm import SlurmLauncher, directives, faults
from tuneplane.spec import JobSpec, dump, load

ROOT = Path(__file__).resolve().parents[1]
LINE_BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x1b", "\x00", "\x7f", "\x85", "\u2028", "\u2029"]


def render(job: JobSpec) -> str:
    return SlurmLauncher(job).render()


def refusals(job: JobSpec) -> list[str]:
    with pytest.raises(UsageError) as caught:
        SlurmLauncher(job)
    return [fault.what for fault in caught.value.faults]


# submitit's private parts


def test_submitit_is_the_version_whose_private_parts_are_known() -> None:
    major, minor = version("submitit").split(".")[:2]
    assert (major, minor) == ("1", "5"), "look at what follows before the pin is moved"


def test_submitit_has_the_parameters_and_defaults_that_the_script_counts_on() -> None:
    known = {
        "command": inspect.Parameter.empty,
        "folder": inspect.Parameter.empty,
        "job_name": "submitit",
        "partition": None,
        "time": 5,
        "nodes": 1,
        "ntasks_per_node": None,
        "cpus_per_task": None,
        "cpus_per_gpu": None,
        "num_gpus": None,
        "gpus_per_node": None,
        "gpus_per_task": None,
        "qos": None,
        "setup": None,
        "teardown": None,
        "mem": None,
        "mem_per_gpu": None,
        "mem_per_cpu": None,
        "signal_delay_s": 90,
        "comment": None,
        "constraint": None,
        "exclude": None,
        "account": None,
        "gres": None,
        "mail_type": None,
        "mail_user": None,
        "nodelist": None,
        "dependency": None,
        "exclusive": None,
        "array_parallelism": 256,
        "wckey": "submitit",
        "stderr_to_stdout": False,
        "map_count": None,
        "additional_parameters": None,
        "srun_args": None,
        "use_srun": True,
    }
    found = inspect.signature(submitit_slurm._make_sbatch_string).parameters
    assert {name: parameter.default for name, parameter in found.items()} == known


def test_every_directive_that_we_give_is_one_of_submitits_parameters() -> None:
    known = set(inspect.signature(submitit_slurm._make_sbatch_string).parameters)
    assert set(directives(complete_job())) <= known


def test_the_methods_that_are_overridden_are_still_called() -> None:
    text = inspect.signature(submitit_slurm.SlurmExecutor._make_submission_file_text)
    assert list(text.parameters) == ["self", "command", "uid"]
    assert isinstance(inspect.getattr_static(submitit_slurm.SlurmExecutor, "affinity"), classmethod)
    assert "_make_submission_file_text" in inspect.getsource(submitit_slurm.SlurmExecutor.__mro__[1])


def test_submitits_own_script_is_as_it_was() -> None:
    """What stands in it that we take out or replace, and in which order."""
    text = submitit_slurm._make_sbatch_string(
        command="the command",
        folder="/f",
        setup=["the setup"],
        teardown=["the teardown"],
        use_srun=False,
        stderr_to_stdout=True,
        additional_parameters={"b": "x y", "a": True},
    )
    assert text.splitlines() == [
        "#!/bin/bash",
        "",
        "# Parameters",
        "#SBATCH --a",
        "#SBATCH --b='x y'",
        "#SBATCH --job-name=submitit",
        "#SBATCH --nodes=1",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=/f/%j_0_log.out",
        "#SBATCH --signal=USR2@90",
        "#SBATCH --time=5",
        "#SBATCH --wckey=submitit",
        "",
        "# setup",
        "the setup",
        "",
        "# command",
        "export SUBMITIT_EXECUTOR=slurm",
        "the command",
        "",
        "",
        "# teardown",
        "the teardown",
    ]


# Pure


RENDER = """
import sys
from pathlib import Path
from tuneplane.spec import read
from tuneplane.submit import script_of
sys.stdout.buffer.write(script_of(read(Path(sys.argv[1]))).encode("utf-8", "surrogateescape"))
"""


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"LANG": "C", "LC_ALL": "C"},
        {"LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Tokyo"},
        {"USER": "mallory", "LOGNAME": "mallory", "HOME": "/nonexistent", "PYTHONHASHSEED": "7"},
        {
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_NTASKS": "5",
            "SBATCH_PARTITION": "debug",
            "SLURM_CLUSTER_NAME": "x",
        },
        {
            "SUBMITIT_PREEMPT_SIGNAL": "USR1\n#SBATCH --uid=0",
            "SUBMITIT_EXECUTOR": "local",
            "_TEST_SUBMITIT_": "1",
        },
        {"HF_TOKEN": "hf_a_planted_token", "PATH": "/nonexistent", "COLUMNS": "20"},
    ],
    ids=["empty", "C", "turkish", "another-user", "in-a-job", "submitit", "no-path"],
)
def test_the_script_depends_on_the_jobspec_alone(tmp_path: Path, environ: dict[str, str]) -> None:
    expected = render(complete_job()).encode()
    done = subprocess.run(
        [sys.executable, "-c", RENDER, str(JOBSPECS / "v1-complete.json")],
        env={"PYTHONPATH": str(ROOT), **environ},
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == expected
    assert b"planted" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_rendering_touches_no_file_and_starts_no_program(tmp_path: Path) -> None:
    """Its folder need not exist, and does not exist afterwards; it asks neither time, host nor process."""
    folder = tmp_path / "not there" / "ring-20260114-093012-x3k9"
    job = tmp_path / "job.json"
    job.write_text(dump(changed(complete_job(), {"metadata.folder": str(folder)})), encoding="utf-8")
    watched = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tuneplane.launch.slurm import SlurmLauncher\n"
        "from tuneplane.spec import read\n"
        "job = read(Path(sys.argv[1]))\n"
        "seen = []\n"
        "watch = lambda event, args: seen.append((event, args))\n"
        "sys.addaudithook(watch)\n"
        "SlurmLauncher(job).render()\n"
        "touching = ('open', 'os.', 'subprocess', 'socket', 'shutil', 'tempfile', 'glob', 'pwd')\n"
        "print([e for e in seen if e[0].startswith(touching)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", watched, str(job)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
    assert not folder.parent.exists()


def test_the_same_jobspec_renders_alike_however_often_and_whatever_came_before() -> None:
    first = render(complete_job())
    render(bare_slurm_job(job_name="another", signal_before_end_s=None))
    launcher = SlurmLauncher(complete_job())
    assert launcher.render() == launcher.render() == first


@pytest.mark.contract("C42")
def test_two_runs_of_one_experiment_differ_in_the_run_id_alone() -> None:
    one = complete_job()
    text = dump(one).replace("ring-20260114-093012-x3k9", "ring-20260114-093013-0000")
    text = text.replace('"created_at": "2026-01-14T09:30:12Z"', '"created_at": "2026-01-14T09:30:13Z"')
    other = render(load(text))
    assert other != render(one)
    assert other.replace("ring-20260114-093013-0000", "ring-20260114-093012-x3k9") == render(one)


# Values that try to be more than a value


TEXT_KEYS = [
    *("job_name", "gpu_type", "partition", "account", "qos", "reservation", "constraint", "time", "nodelist"),
    *("exclude", "dependency", "mail_user", "mail_type"),
]


@pytest.mark.parametrize("key", TEXT_KEYS)
@pytest.mark.parametrize("broken", LINE_BREAKS, ids=ascii)
def test_a_value_with_a_line_break_is_refused_by_its_key(key: str, broken: str) -> None:
    value = f"x{broken}rm -rf $HOME"
    job = bare_slurm_job(**{key: value})
    assert faults(job) == SlurmFault(
        f"{value!r} holds a line break or control character", f"spec.slurm.{key}"
    )


def SlurmFault(what: str, where: str) -> Any:

    return [Fault(what, where)]


@pytest.mark.parametrize("broken", LINE_BREAKS, ids=ascii)
def test_lists_directives_memory_and_folder_are_looked_at_too(broken: str) -> None:
    evil = f"x{broken}#SBATCH --uid=0"
    job = changed(
        bare_slurm_job(
            modules=["a", evil], srun_options=[evil], extra_directives={"comment": evil, evil: "x"}
        ),
        {"spec.resources.memory_per_node": evil, "metadata.folder": f"/shared/{evil}"},
    )
    found = refusals(job)
    assert len(found) == 7  # the name of a directive is also none of sbatch's
    assert sum("holds a line break or control character" in what for what in found) == 6


def test_all_faults_are_told_at_once() -> None:
    job = changed(
        bare_slurm_job(
            job_name="a\nb",
            extra_directives={
                "output": "/tmp/x",
                "Comment": "x",
                "--comment": "x",
                "job_name": "x",
                "array": "0-9",
                "signal": "USR1@5",
                "chdir": "/",
                "partition": "x",
                "gpus-per-node": "1",
                "": "x",
            },
            gpu_request="gpus-per-node",
        ),
        {"metadata.folder": "/shared/a\\b"},
    )
    assert refusals(job) == [
        "/shared/a\\b holds a backslash, which sbatch takes for an escape in the name of its output file",
        "'a\\nb' holds a line break or control character",
        "output is set by TunePlane itself",
        "'Comment' is no long name of an sbatch option without its dashes",
        "'--comment' is no long name of an sbatch option without its dashes",
        "'job_name' is no long name of an sbatch option without its dashes",
        "array is set by TunePlane itself",
        "signal is set by TunePlane itself",
        "chdir is set by TunePlane itself",
        "partition is set by TunePlane itself",
        "gpus-per-node is set by TunePlane itself",
        "'' is no long name of an sbatch option without its dashes",
    ]


def test_memory_may_be_an_extra_directive_where_the_profile_asks_for_none() -> None:
    job = bare_slurm_job(extra_directives={"mem": "0"})
    assert "#SBATCH --mem=0" in render(job).splitlines()
    asked = changed(job, {"spec.resources.memory_per_node": "100G"})
    assert refusals(asked) == ["mem is set by TunePlane itself"]


def test_a_run_without_a_slurm_part_is_no_batch_script() -> None:
    job = local_job("/x/ring-20260114-093012-x3k9")
    assert [f.what for f in faults(job)] == ["there is no Slurm part"]


words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=40)


@given(text=words)
@settings(deadline=None)
def test_no_text_gets_out_of_its_directive(text: str) -> None:
    """As sbatch reads a directive: quotes as in a shell, and a backslash as an escape even within them."""
    plain = render(bare_slurm_job(job_name="x")).splitlines()
    lines = render(bare_slurm_job(job_name=text)).splitlines()
    assert len(lines) == len(plain)
    ((at, line),) = [
        (i, new) for i, (old, new) in enumerate(zip(plain, lines, strict=True)) if old != new
    ] or [(plain.index("#SBATCH --job-name=x"), "#SBATCH --job-name=x")]
    assert plain[at] == "#SBATCH --job-name=x"
    assert sbatch_reads(line.removeprefix("#SBATCH ")) == f"--job-name={text}"


def sbatch_reads(line: str) -> str:
    """One argument as slurm's src/sbatch/opt.c (_get_argument) takes it from a directive."""
    argument, quoted, escaped = "", "", False
    for c in line:
        if escaped:
            argument, escaped = argument + c, False
        elif c == "\\":
            escaped = True
        elif quoted:
            if c == quoted:
                quoted = ""
            else:
                argument += c
        elif c in "'\"":
            quoted = c
        elif c.isspace() or c == "#":
            break
        else:
            argument += c
    assert not quoted
    return argument


@given(st.text(st.characters(exclude_characters="\0"), max_size=60))
@settings(deadline=None, max_examples=150)
def test_bash_reads_back_what_was_quoted_on_one_line(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    word = quote(data)
    assert "\n" not in word and "\r" not in word
    done = subprocess.run(
        ["/bin/bash", "--norc", "-c", f"printf %s {word}".encode("utf-8", "surrogateescape")],
        env={"HOME": "/root", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == data.encode("utf-8", "surrogateescape")


@pytest.mark.parametrize("field", ["run_id", "experiment", "lab", "user", "tuneplane", "commit", "folder"])
@pytest.mark.parametrize("broken", LINE_BREAKS, ids=ascii)
def test_no_text_gets_out_of_the_header(field: str, broken: str) -> None:
    job = complete_job()
    text = f"x{broken}touch /tmp/gotcha"
    metadata = dataclasses.replace(job.metadata, **{field: text})
    lines = "\n".join(header(dataclasses.replace(job, metadata=metadata))).splitlines()
    assert len(lines) == len(header(job))
    assert all(line == "#" or line.startswith("# ") for line in lines)


@pytest.mark.parametrize(
    "folder", ["/x/a\nb/r", "/x/'; touch gotcha; '/r", "/x/$(touch gotcha)/r", "/x/`id`/r"]
)
def test_a_local_scripts_folder_adds_no_line_and_no_command(folder: str) -> None:
    plain = local_script(local_job("/x/y/r")).splitlines()
    lines = local_script(local_job(folder)).splitlines()
    assert len(lines) == len(plain)
    (assignment,) = [line for line in lines if line.startswith("run=")]
    done = subprocess.run(
        ["/bin/bash", "-c", f'{assignment}\nprintf %s "$run"'],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout == folder


def test_the_environment_and_secrets_of_the_jobspec_stand_in_no_script() -> None:
    text = render(complete_job())
    node, reporting = complete_job().spec.node, complete_job().spec.reporting
    told = [
        *node.environment,
        *node.environment.values(),
        *node.secrets,
        reporting.endpoint,
        reporting.token_sha256,
    ]
    assert [value for value in told if value in text] == []
