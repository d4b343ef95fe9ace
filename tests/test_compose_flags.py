"""What the command line and the submitting shell say, and mounts as they write them."""

from __future__ import annotations

import pytest
from compose_folders import Folders, folders, h200

from tuneplane.compose import parse_mount, render_config

__all__ = ["folders", "h200"]


def test_flags_have_the_last_word_and_lists_are_added_to(h200: Folders) -> None:
    h200.write("user", "defaults", "cluster: {mounts: ['/a:/a'], slurm: {time: 10, exclusive: false}}\n")
    composed = h200.compose(
        cluster__slurm__time=("--time", "02:00:00"),
        cluster__slurm__exclusive=("--exclusive", True),
        cluster__slurm__qos=("--qos", None),
        cluster__mounts=("--mount", ["/b:/b:ro"]),
    )
    slurm = composed.config.cluster.slurm
    assert (slurm.time, slurm.exclusive, slurm.qos) == ("02:00:00", True, None)
    assert composed.config.cluster.mounts == ["/a:/a", "/b:/b:ro"]
    assert composed.origins["cluster.slurm.time"] == "--time"
    assert composed.origins["cluster.mounts"].endswith("defaults.yaml:1 and --mount")


def test_a_wrong_flag_is_named(h200: Folders) -> None:
    message = h200.refusal(
        cluster__slurm__time=("--time", "soon"),
        cluster__mounts=("--mount", ["/a", "b:/c"]),
        cluster__slurm__dependency=("--dependency", "after:x"),
        cluster__slurm__mail_type=("--mail-type", "SOMETIMES"),
        cluster__slurm__job_name=("--job-name", "a\n#SBATCH --uid=0"),
        cluster__max_nodes=("--max", "many"),
    )
    for words in (
        "--time: cluster.slurm.time is 'soon': must be a time",
        "--mount: cluster.mounts: '/a' must be SRC:DST",
        "--mount: cluster.mounts: 'b:/c' must hold absolute paths",
        "--dependency: cluster.slurm.dependency is 'after:x'",
        "--mail-type: cluster.slurm.mail_type is 'SOMETIMES'",
        "--job-name: cluster.slurm.job_name holds a line break or control character ('\\n')",
        "--max: 'many' is not a whole number",
    ):
        assert words in message


def test_the_users_sbatch_variables_stand_over_files_and_under_flags(h200: Folders) -> None:
    h200.environ |= {
        "SBATCH_PARTITION": "mine",
        "SBATCH_TIMELIMIT": "1-0",
        "SBATCH_ACCOUNT": "acc",
        "SBATCH_QOS": "",
        "SBATCH_EXCLUSIVE": "exclusive",
        "SBATCH_WCKEY": "w",
        "SBATCH_MEM_PER_NODE": "4G",
        "SBATCH_EXPORT": "ALL",
        "SLURM_JOB_ID": "1",
    }
    composed = h200.compose(cluster__slurm__account=("--account", "flag"))
    slurm = composed.config.cluster.slurm
    assert (slurm.partition, slurm.time, slurm.account, slurm.qos) == ("mine", "1-0", "flag", None)
    assert slurm.exclusive
    assert slurm.extra_directives == {"wckey": "w"}
    assert composed.origins["cluster.slurm.partition"] == "$SBATCH_PARTITION"
    assert "# $SBATCH_PARTITION" in render_config(composed)
    assert [notice.split("=")[0] for notice in composed.notices] == ["$SBATCH_EXPORT", "$SBATCH_MEM_PER_NODE"]


def test_a_wrong_sbatch_variable_is_named(h200: Folders) -> None:
    h200.environ["SBATCH_TIMELIMIT"] = "a while"
    assert "$SBATCH_TIMELIMIT: cluster.slurm.time is 'a while'" in h200.refusal()


def test_sbatch_variables_mean_nothing_on_this_machine(folders: Folders) -> None:
    folders.environ |= {"SBATCH_PARTITION": "gpu", "SBATCH_EXPORT": "ALL"}
    composed = folders.compose("local")
    assert composed.config.cluster.slurm.partition is None
    assert composed.notices == ()


@pytest.mark.parametrize(
    ("text", "source", "target", "read_only"),
    [
        ("/a:/b", "/a", "/b", False),
        ("/a:/b:ro", "/a", "/b", True),
        ("/a:/b:rw", "/a", "/b", False),
        (r"/a\:1:/b\:2:ro", "/a:1", "/b:2", True),
        (r"/a\\:/b", "/a\\", "/b", False),
        (r"/a\x:/b", "/a\\x", "/b", False),
        ("/a $x'\"%数:/b c", "/a $x'\"%数", "/b c", False),
    ],
)
def test_a_mount_is_read(text: str, source: str, target: str, read_only: bool) -> None:
    mount = parse_mount(text)
    assert (mount.source, mount.target, mount.read_only) == (source, target, read_only)


@pytest.mark.parametrize(
    "text",
    ["", "/a", "/a:", ":/b", "/a:b", "a:/b", "/a:/b:", "/a:/b:x", "/a:/b:ro:ro", "/a/../b:/c", "/a:/", "::"],
)
def test_what_is_no_mount(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|would"):
        parse_mount(text)
