"""Files that are wrong: each told with its line, and nothing ever a traceback."""

from __future__ import annotations

import os

import pytest
import yaml
from compose_folders import H200, Folders, folders, h200, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuneplane.compose import render_config
from tuneplane.kernel.errors import OperationError, TunePlaneError, UsageError

__all__ = ["folders", "h200"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("cluster:\n  slurm: {partition: gpu\n", 3, "not YAML"),
        ("cluster:\n\tslurm: 1\n", 2, "not YAML"),
        ("a: b: c\n", 1, "not YAML"),
        ("- cluster\n", 1, "must be a mapping"),
        ("just text\n", 1, "must be a mapping"),
        ("cluster: {}\n---\ncluster: {}\n", 2, "not YAML"),
        ("cluster:\n  scratch: /a\n  scratch: /b\n", 3, "the key scratch stands twice, first in line 2"),
        ("cluster: !!python/object:os.system {}\n", 1, "the YAML tag"),
        ("cluster: &a\n  slurm: *a\n", 1, "is nested in itself"),
        ("x: &x {a: 1}\ncluster:\n  <<: *x\n", 3, "<< is not read here"),
        ("? [a, b]\n: c\n", 1, "a key must be plain text"),
        (
            "cluster:\n  slurm:\n    partitoin: gpu\n",
            3,
            "unknown key cluster.slurm.partitoin\n  → did you mean",
        ),
        ("clutser: {}\n", 1, "unknown key clutser\n  → did you mean cluster?"),
        ("hydra:\n  run: {dir: x}\n", 1, "unknown key hydra"),
        ("cluster:\n  slurm: gpu\n", 2, "cluster.slurm is not a mapping of keys"),
        ("cluster:\n  mounts: /a:/a\n", 2, "cluster.mounts is not a list of texts\n  → write [a, b]"),
        ("cluster:\n  mounts: [[a]]\n", 2, "cluster.mounts has an item that is not text"),
        ("cluster:\n  mounts: [null]\n", 2, "cluster.mounts has an item that is not text"),
        ("cluster:\n  environment: [A=1]\n", 2, "cluster.environment is not a mapping of names to texts"),
        ("cluster:\n  environment: {A: [1]}\n", 2, "cluster.environment.A is not text"),
        ("cluster:\n  scratch: {a: b}\n", 2, "cluster.scratch is not text"),
        ("cluster:\n  gpus_per_node: eight\n", 2, "cluster.gpus_per_node: 'eight' is not a whole number"),
        ("cluster:\n  gpus_per_node: 8.5\n", 2, "'8.5' is not a whole number"),
        ("cluster:\n  gpus_per_node: true\n", 2, "'true' is not a whole number"),
        ("cluster:\n  heartbeat_s: .nan\n", 2, "'.nan' is not a number"),
        ("cluster:\n  slurm: {exclusive: maybe}\n", 2, "'maybe' is not true or false"),
        ("cluster:\n  scratch:\n", 2, "cluster.scratch has no value"),
    ],
)
def test_a_faulty_file_is_told_with_its_line(h200: Folders, text: str, line: int, words: str) -> None:
    path = h200.write("lab", "defaults", text)
    message = h200.refusal()
    assert any(fault.startswith(f"{path}:{line}: ") and words in fault for fault in split(message)), message


@pytest.mark.parametrize("layer", ["site", "user", "lab"])
def test_a_file_that_is_no_yaml_is_the_only_fault(h200: Folders, layer: str) -> None:
    """What is not set, or does not fit, may stand in that very file."""
    path = h200.write(layer, "cluster/h200", "device: [gpu\nscheduler: slurm\n")
    (fault,) = split(h200.refusal())
    assert fault.startswith(f"{path}:2: not YAML: ")


def test_a_file_that_is_no_yaml_hides_no_fault_of_another(h200: Folders) -> None:
    h200.write("site", "cluster/h200", "device: [gpu\nscheduler: slurm\n")
    other = h200.write("user", "defaults", "cluster: {scratsh: /tmp}\n")
    assert [fault.partition(": ")[0] for fault in split(h200.refusal())] == [
        f"{h200.site}/cluster/h200.yaml:2",
        f"{other}:1",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"a: \x00\n", b"cluster: {}\n" * 200_000, b"[" * 100_000])
def test_a_file_that_is_no_configuration_at_all(h200: Folders, data: bytes) -> None:
    path = h200.user / "defaults.yaml"
    path.write_bytes(data)
    assert str(path) in h200.refusal()


def test_aliases_that_would_explode_are_read_in_no_time(h200: Folders) -> None:
    lines = ["x0: &x0 [a, a]"] + [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 30)]
    h200.write("user", "defaults", "\n".join(lines) + "\n")
    assert "unknown key x0" in h200.refusal()


def test_a_pipe_and_a_folder_in_place_of_a_file(h200: Folders) -> None:
    os.mkfifo(h200.user / "defaults.yaml")
    assert "is not a regular file" in h200.refusal()
    (h200.user / "defaults.yaml").unlink()
    (h200.user / "defaults.yaml").mkdir()
    with pytest.raises(TunePlaneError, match=r"defaults\.yaml"):
        h200.compose()


def test_a_link_to_nowhere_is_told(h200: Folders) -> None:
    (h200.user / "defaults.yaml").symlink_to("gone.yaml")
    with pytest.raises(OperationError, match=r"defaults\.yaml: cannot be read"):
        h200.compose()


def as_nobody(function) -> str:
    """What an ordinary user is told: tests run as root, whom no mode keeps out."""
    if os.geteuid() != 0:
        with pytest.raises(OperationError) as caught:
            function()
        return str(caught.value)
    os.setegid(65534)
    os.seteuid(65534)
    try:
        with pytest.raises(OperationError) as caught:
            function()
    finally:
        os.seteuid(0)
        os.setegid(0)
    return str(caught.value)


def test_an_unreadable_folder_or_file_ends_with_exit_1(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("unreadable")
    for folder in (root, *list(root.parents)[:3]):
        folder.chmod(0o755)
    folders = Folders(root)
    file = folders.write("site", "cluster/h200", H200)
    file.chmod(0o000)
    assert f"{file}: cannot be read: Permission denied" in as_nobody(folders.compose)
    file.chmod(0o644)
    (folders.site / "cluster").chmod(0o000)
    assert f"{file}: cannot be read: Permission denied" in as_nobody(folders.compose)
    (folders.site / "cluster").chmod(0o755)
    folders.site.chmod(0o000)
    assert f"{folders.site}: cannot be read: Permission denied" in as_nobody(folders.compose)
    folders.site.chmod(0o755)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        (
            "[/container@container: aptainer]",
            "names container/aptainer, and no layer has a container/aptainer.yaml",
        ),
        ("[/container@container: aptainer]", "did you mean apptainer?"),
        ("[nowhere]", "names cluster/nowhere"),
        ("[h200]", "leads back to itself"),
        ("[../../../../etc/passwd]", "defaults"),
        ("[override /fabric@environment: ib]", "cannot be followed"),
        ("[{a: b, c: d}]", "cannot be followed"),
        ("[[a]]", "cannot be followed"),
        ("{container: none}", "cannot be followed"),
        ("none", "cannot be followed"),
        ("[/container@container: none, /container@container: apptainer]", "cannot be followed"),
        ("[/container@slurm.nothing: none]", "would land under cluster.slurm.nothing"),
        ("['${oc.env']", "cannot be followed"),
        ("[/container@container: {a: b}]", "cannot be followed"),
        ("[_self_, _self_]", "cannot be followed"),
    ],
)
def test_a_defaults_list_that_leads_nowhere(h200: Folders, defaults: str, words: str) -> None:
    path = h200.write("lab", "cluster/h200", f"scratch: /lab\ndefaults: {defaults}\n")
    message = h200.refusal()
    assert words in message
    assert str(path) in message or words.startswith("would land")


TEXT = st.sampled_from(
    ["h200", "local", "_self_", "/container@container", "override /site", "optional x", "../x", "", "???", "~",
     "a@b.c:d", "cluster", "hydra/launcher", "/site@cluster", "null", "${cluster}", "${oc.env:HF_TOKEN}", "a b"]
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ANYTHING,
    st.dictionaries(
        st.sampled_from(["slurm", "container", "mounts", "environment", "device", "x"]), ANYTHING
    ),
)
def test_whatever_stands_in_a_file_the_answer_is_a_configuration_or_faults(
    tmp_path_factory: pytest.TempPathFactory, defaults: object, keys: dict[str, object]
) -> None:
    folders = Folders(tmp_path_factory.mktemp("anything"))
    folders.write("site", "cluster/h200", H200)
    text = yaml.safe_dump({"defaults": defaults, **keys}, allow_unicode=True)
    (folders.lab / "configs" / "cluster").mkdir()
    (folders.lab / "configs" / "cluster" / "h200.yaml").write_text(
        text, encoding="utf-8", errors="surrogateescape"
    )
    try:
        composed = folders.compose()
    except UsageError as error:
        assert error.faults
    else:
        assert yaml.safe_load(render_config(composed))
