"""`NAME[:TOTAL_GPUS]` and where it lands: what a user types after --profile, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneplane.kernel.errors import UsageError
from tuneplane.profile import Placement, parse_profile, place
from tuneplane.site import Caps, Cluster, Site, Slurm
from tuneplane.slurmforms import memory_mib, time_s

H200 = Cluster(
    name="h200",
    scheduler="slurm",
    device="gpu",
    gpus_per_node=8,
    max_nodes=4,
    cpus_per_node=64,
    memory_per_node="1500G",
    request_memory=True,
)
CPU = Cluster(name="cpu", scheduler="slurm", device="cpu", gpus_per_node=4, max_nodes=3, cpus_per_node=32)
LOCAL = Cluster(name="local", scheduler="local", device="cpu", gpus_per_node=4)


def refusal(
    cluster: Cluster, text: str, nodes: int | None = None, each: int | None = None, **more: Site
) -> str:
    with pytest.raises(UsageError) as caught:
        place(cluster, parse_profile(text).total, nodes, each, **more)
    return str(caught.value)


def shape(cluster: Cluster, text: str, nodes: int | None = None, each: int | None = None) -> tuple[int, int]:
    placement = place(cluster, parse_profile(text).total, nodes, each)
    return placement.nodes, placement.gpus_per_node


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h200", (1, 8)),
        ("h200:1", (1, 1)),
        ("h200:4", (1, 4)),
        ("h200:8", (1, 8)),
        ("h200:16", (2, 8)),
        ("h200:32", (4, 8)),
        ("h200:00008", (1, 8)),
    ],
)
def test_a_total_is_part_of_one_node_or_whole_nodes(text: str, expected: tuple[int, int]) -> None:
    assert shape(H200, text) == expected


def test_twelve_on_nodes_of_eight_names_the_nearest_that_fit() -> None:
    assert "nearest that fit: 8 and 16" in refusal(H200, "h200:12")


def test_the_nearest_that_fit_stay_within_the_profile() -> None:
    message = refusal(H200, "h200:33")
    assert "nearest that fit: 32" in message
    assert "40" not in message


def test_the_bare_name_asks_for_the_profiles_default() -> None:
    assert shape(
        Cluster(name="a", scheduler="slurm", device="gpu", gpus_per_node=8, default_gpus=2), "a"
    ) == (1, 2)
    assert shape(CPU, "cpu") == (1, 1)


@pytest.mark.parametrize(
    ("text", "nodes", "each", "expected"),
    [
        ("h200", 2, None, (2, 8)),
        ("h200", None, 3, (1, 3)),
        ("h200", 3, 2, (3, 2)),
        ("h200:12", 2, None, (2, 6)),
        ("h200:12", None, 6, (2, 6)),
        ("h200:12", 2, 6, (2, 6)),
        ("h200:4", 4, None, (4, 1)),
    ],
)
def test_the_shape_may_be_said_itself(
    text: str, nodes: int | None, each: int | None, expected: tuple[int, int]
) -> None:
    assert shape(H200, text, nodes, each) == expected


@pytest.mark.parametrize(
    ("text", "nodes", "each", "words"),
    [
        ("h200:16", 2, 4, "--nodes 2 × --gpus-per-node 4 is 8 GPUs, and h200:16 asks for 16"),
        ("h200:8", 3, None, "nearest that fit: 6 and 9"),
        ("h200:2", 4, None, "nearest that fit: 4"),
        ("h200:9", None, 4, "nearest that fit: 8 and 12"),
        ("h200", None, 9, "--gpus-per-node: 9 GPUs a node: a node of h200 has 8"),
        ("h200:16", 1, None, "16 GPUs a node: a node of h200 has 8"),
        ("h200", 5, None, "--nodes: 5 nodes: profile h200 has 4"),
        ("h200:40", None, None, "5 nodes: profile h200 has 4"),
        ("h200", 0, None, "--nodes: 0 is too few"),
        ("h200", None, -1, "--gpus-per-node: -1 is too few"),
    ],
)
def test_contradictions_and_what_lies_beyond_are_refused(
    text: str, nodes: int | None, each: int | None, words: str
) -> None:
    assert words in refusal(H200, text, nodes, each)


def test_every_fault_of_a_shape_is_told_at_once() -> None:
    message = refusal(H200, "h200:7", 5, 9, site=Site(caps=Caps(nodes=2, gpus=16), contact="hpc@example.com"))
    for words in (
        "asks for 7",
        "a node of h200 has 8",
        "profile h200 has 4",
        "allows 2 a run",
        "45 GPUs: the site allows 16",
        "hpc@example.com",
    ):
        assert words in message


def test_a_cap_is_told_with_its_number_and_what_is_within_it_passes() -> None:
    site = Site(caps=Caps(nodes=2, gpus=16))
    assert "24 GPUs: the site allows 16 a run" in refusal(H200, "h200:24", site=site)
    assert place(H200, 16, site=site).nodes == 2


def test_processes_of_a_cpu_profile_stay_on_one_node_unless_nodes_are_asked_for() -> None:
    assert shape(CPU, "cpu:3") == (1, 3)
    assert shape(CPU, "cpu:6", nodes=3) == (3, 2)
    assert shape(CPU, "cpu", nodes=3) == (3, 1)
    assert "say on how many nodes: --nodes 2" in refusal(CPU, "cpu:6")


def test_gpu_caps_do_not_count_processes() -> None:
    assert place(CPU, 4, site=Site(caps=Caps(gpus=1))).gpus_per_node == 4


def test_this_machine_is_one_node() -> None:
    assert shape(LOCAL, "local:4") == (1, 4)
    assert "this machine has 4" in refusal(LOCAL, "local:5")
    assert "runs on this machine alone" in refusal(LOCAL, "local", nodes=2)


def test_cpus_and_memory_are_the_share_of_the_gpus() -> None:
    assert place(H200, 8) == Placement(1, 8, 64, "1500G")
    assert place(H200, 3) == Placement(1, 3, 24, "576000M")
    assert place(H200, 16) == Placement(2, 8, 64, "1500G")


def test_cpus_and_memory_are_asked_for_only_where_the_site_says_so() -> None:
    quiet = Cluster(scheduler="slurm", device="gpu", gpus_per_node=8, cpus_per_node=64, request_cpus=False)
    assert place(quiet, 4) == Placement(1, 4, None, None)
    few = Cluster(scheduler="slurm", device="gpu", gpus_per_node=8, cpus_per_node=4)
    assert place(few, 1).cpus_per_node == 1


def test_an_exclusive_node_is_asked_for_whole() -> None:
    exclusive = Cluster(
        scheduler="slurm",
        device="gpu",
        gpus_per_node=8,
        cpus_per_node=64,
        memory_per_node="1500G",
        request_memory=True,
        slurm=Slurm(exclusive=True),
    )
    assert place(exclusive, 2) == Placement(1, 2, 64, "1500G")


@pytest.mark.parametrize(
    "text",
    ["", ":8", "h200:", "h200:x", "h200:-1", "h200:0", "h200:8:2", "h200:８", "h200: 8", " h200", "../h200",
     "a/b", ".h200", "h200.yaml", "h200\n", "h200:8\n", "h200:99999999999", "x" * 200, "h 200", "h200$"],
)  # fmt: skip
def test_what_is_not_a_profile_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_profile(text)


def test_roles_are_recognised_and_refused() -> None:
    with pytest.raises(UsageError, match="no recipe of this version has roles"):
        parse_profile("train=h200:8")


@given(st.integers(1, 64), st.integers(1, 16))
def test_what_is_placed_is_what_was_asked_for(total: int, each: int) -> None:
    cluster = Cluster(name="c", scheduler="slurm", device="gpu", gpus_per_node=each)
    try:
        placement = place(cluster, total)
    except UsageError:
        assert total > each
        assert total % each
    else:
        assert placement.nodes * placement.gpus_per_node == total
        assert placement.nodes == 1 or placement.gpus_per_node == each


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("02:00:00", 7200),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("7-00:00:01", 604801),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
    ],
)
def test_slurms_forms_of_a_time(text: str, seconds: int | None) -> None:
    assert time_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5 hours", "1:2:3:4", "-1", "1-", "2h", "1.5", "٣", "1-2:3:4:5"])
def test_other_forms_of_a_time_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="none of Slurm's forms"):
        time_s(text)


def test_slurms_forms_of_a_memory_size() -> None:
    assert [memory_mib(t) for t in ("1500", "2048K", "3M", "1500G", "2t")] == [1500, 2, 3, 1536000, 2097152]
    for text in ("", "1.5G", "lots", "10GB", "-1"):
        with pytest.raises(ValueError, match="not a size of memory"):
            memory_mib(text)
