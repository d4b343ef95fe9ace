"""The JobSpec: what job.json may hold, told key by key where it does not, and read again in every version."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import string
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreters import pythons
from jobspec_docs import BEGIN, PAGE, SCHEMA, page_text, schema, schema_text
from launch_jobs import JOBSPECS, complete_job

from tuneplane import spec
from tuneplane.kernel.errors import UsageError
from tuneplane.spec import API_VERSION, Capsule, JobSpec, Metadata, Output, Slurm, dump, load, read

ROOT = Path(__file__).resolve().parents[1]
COMPLETE = json.loads((JOBSPECS / "v1-complete.json").read_text(encoding="utf-8"))


def faults_of(value: Any) -> list[str]:
    """What `load` says of a JSON value, one sentence a fault."""
    with pytest.raises(UsageError) as caught:
        load(value if isinstance(value, str) else json.dumps(value))
    assert all(fault.where == "job.json" for fault in caught.value.faults)
    return [fault.what for fault in caught.value.faults]


def with_value(key: str, value: Any) -> dict[str, Any]:
    """The complete JobSpec with one value changed, or one key added."""
    changed = copy.deepcopy(COMPLETE)
    *path, last = key.split(".")
    inner = changed
    for name in path:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    inner[last] = value
    return changed


def without_key(key: str) -> dict[str, Any]:
    changed = copy.deepcopy(COMPLETE)
    *path, last = key.split(".")
    inner = changed
    for name in path:
        inner = inner[name]
    del inner[last]
    return changed


# Versions


@pytest.mark.parametrize("path", sorted(JOBSPECS.glob("v*.json")), ids=lambda p: p.stem)
def test_a_file_of_every_version_still_reads(path: Path) -> None:
    job = read(path)
    assert job.metadata.run_id == "ring-20260114-093012-x3k9"
    assert load(dump(job)) == job


def test_the_present_version_has_a_file_that_says_every_key() -> None:
    newest = JOBSPECS / f"{API_VERSION.rpartition('/')[2]}-complete.json"
    text = newest.read_text(encoding="utf-8")
    assert text == dump(read(newest)), (
        "a key is missing in it, or stands elsewhere: make a file of the new key"
    )


def test_that_file_leaves_nothing_to_a_default() -> None:
    """A key that has its default's value would prove nothing."""

    def defaults(value: Any) -> list[str]:
        found = []
        for f in dataclasses.fields(value):
            inner = getattr(value, f.name)
            if dataclasses.is_dataclass(inner):
                found += defaults(inner)
            elif isinstance(inner, (list, dict)):
                found += [] if inner else [f.name]
            elif inner == f.default and f.name != "apiVersion":
                found.append(f.name)
        return found

    assert defaults(complete_job()) == []


@pytest.mark.parametrize(
    "version", ["tuneplane/job/v0", "tuneplane/job/v2", "", None, 1, ["tuneplane/job/v1"]]
)
def test_another_version_is_refused_with_the_remedy_and_nothing_else_is_judged(version: Any) -> None:
    with pytest.raises(UsageError) as caught:
        load(json.dumps({"apiVersion": version, "nonsense": 1}))
    (fault,) = caught.value.faults
    assert fault.what == f"apiVersion {version!r} is not 'tuneplane/job/v1'"
    assert fault.remedy == "use the TunePlane version that wrote this run, or submit the experiment again"


# Bytes


def test_the_order_of_keys_is_that_of_the_fields_and_apiversion_comes_first() -> None:
    value = json.loads(dump(complete_job()))
    assert list(value) == ["apiVersion", "metadata", "spec"]
    assert list(value["metadata"]) == [f.name for f in dataclasses.fields(Metadata)]
    assert list(value["spec"]["slurm"]) == [f.name for f in dataclasses.fields(Slurm)]


@pytest.mark.slow
def test_the_same_jobspec_has_the_same_bytes_under_every_python_and_locale() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom tuneplane.spec import dump, read\n"
        "sys.stdout.buffer.write(dump(read(Path(sys.argv[2]))).encode())"
    )
    path = JOBSPECS / "v1-complete.json"
    for version, python in pythons((3, 9)).items():
        for locale in ("C", "C.UTF-8"):
            done = subprocess.run(
                [python, "-I", "-S", "-c", code, str(ROOT), str(path)],
                env={"LC_ALL": locale, "PYTHONUTF8": "0"},
                capture_output=True,
                timeout=30,
                check=True,
            )
            assert done.stdout == path.read_bytes(), (version, locale)


def test_bytes_of_a_path_that_are_no_utf8_survive_in_a_file_that_is_utf8(tmp_path: Path) -> None:
    folder = b"/shared/caf\xe9/x".decode("utf-8", "surrogateescape")
    job = complete_job()
    job = dataclasses.replace(job, metadata=dataclasses.replace(job.metadata, folder=folder))
    (tmp_path / "job.json").write_bytes(dump(job).encode("utf-8"))
    assert read(tmp_path / "job.json").metadata.folder == folder


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_has_no_word_for_is_never_written(number: float) -> None:
    job = complete_job()
    job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, hyperparams={"lr": number}))
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        dump(job)


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
undecodable = st.binary().map(lambda data: data.decode("utf-8", "surrogateescape"))


@pytest.mark.slow
@given(
    hyperparams=st.dictionaries(st.text(), values, max_size=4),
    folder=undecodable,
    names=st.lists(st.text(), max_size=3),
    directives=st.dictionaries(st.text(string.ascii_lowercase + "-", min_size=1), st.text(), max_size=3),
    number=st.integers(min_value=0),
    seconds=st.floats(min_value=0.01, allow_infinity=False),
)
@settings(deadline=None)
def test_whatever_was_written_reads_as_it_was(
    hyperparams: dict[str, Any],
    folder: str,
    names: list[str],
    directives: dict[str, str],
    number: int,
    seconds: float,
) -> None:
    job = complete_job()
    assert job.spec.slurm is not None
    job = JobSpec(
        dataclasses.replace(job.metadata, folder=folder, dirty=names),
        dataclasses.replace(
            job.spec,
            hyperparams=hyperparams,
            slurm=dataclasses.replace(job.spec.slurm, extra_directives=directives),
            node=dataclasses.replace(job.spec.node, heartbeat_s=seconds),
            capsule=Capsule("sha256:0", number, number, ""),
            outputs=[Output(name, name) for name in names],
        ),
    )
    text = dump(job)
    text.encode("utf-8")
    assert load(text) == job
    assert dump(load(text)) == text


# What is refused


def test_every_fault_of_a_file_is_told_at_once_by_its_dotted_key() -> None:
    value = copy.deepcopy(COMPLETE)
    value["extra"] = 1
    value["spec"]["resources"]["nodes"] = "four"
    value["spec"]["resources"]["gpus"] = 8
    del value["spec"]["capsule"]["digest"]
    value["spec"]["container"]["mounts"][1]["read_only"] = "yes"
    value["spec"]["container"]["image"]["sha256"] = None
    value["spec"]["slurm"]["extra_directives"]["comment"] = 3
    value["spec"]["outputs"][2]["kind"] = "csv"
    value["spec"]["outputs"].append("checkpoints")
    value["spec"]["node"] = []
    assert faults_of(value) == [
        "unknown key extra",
        "unknown key spec.resources.gpus",
        "spec.resources.nodes is a string, not an integer",
        "spec.container.image.sha256 is null, not a string",
        "spec.container.mounts[1].read_only is a string, not a boolean",
        "spec.node is an array, not an object",
        "missing key spec.capsule.digest",
        "spec.slurm.extra_directives.comment is an integer, not a string",
        "spec.outputs[2].kind is 'csv', not artifact or tensorboard or jsonl",
        "spec.outputs[3] is a string, not an object",
    ]


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("spec.resources.nodes", True, "spec.resources.nodes is a boolean, not an integer"),
        ("spec.resources.nodes", 2.0, "spec.resources.nodes is a number, not an integer"),
        ("spec.resources.nodes", None, "spec.resources.nodes is null, not an integer"),
        ("spec.resources.nodes", 0, "spec.resources.nodes is 0: it is at least 1"),
        ("spec.resources.gpus_per_node", -1, "spec.resources.gpus_per_node is -1: it is at least 1"),
        ("spec.resources.cpus_per_node", True, "spec.resources.cpus_per_node is a boolean, not an integer"),
        ("spec.resources.cpus_per_node", 0, "spec.resources.cpus_per_node is 0: it is at least 1"),
        ("spec.resources.scheduler", "Slurm", "spec.resources.scheduler is 'Slurm', not slurm or local"),
        ("spec.resources.device", "tpu", "spec.resources.device is 'tpu', not gpu or cpu"),
        ("spec.node.heartbeat_s", True, "spec.node.heartbeat_s is a boolean, not a number"),
        ("spec.node.heartbeat_s", 0, "spec.node.heartbeat_s is 0: it is at least 0.01"),
        ("spec.node.stop_grace_s", -1, "spec.node.stop_grace_s is -1: it is at least 0"),
        ("spec.reporting.enabled", 1, "spec.reporting.enabled is an integer, not a boolean"),
        ("spec.slurm.exclusive", None, "spec.slurm.exclusive is null, not a boolean"),
        (
            "spec.slurm.gpu_request",
            "gpus",
            "spec.slurm.gpu_request is 'gpus', not gpus-per-node or gres or none",
        ),
        ("spec.slurm.signal_before_end_s", 0, "spec.slurm.signal_before_end_s is 0: it is at least 1"),
        ("spec.slurm.partition", 5, "spec.slurm.partition is an integer, not a string"),
        (
            "spec.container.runtime",
            "docker",
            "spec.container.runtime is 'docker', not apptainer or singularity or enroot or pyxis or none",
        ),
        (
            "spec.framework.observability",
            "both",
            "spec.framework.observability is 'both', not external or platform",
        ),
        ("spec.node.secrets", {}, "spec.node.secrets is an object, not an array"),
        ("spec.node.secrets", ["A", 1], "spec.node.secrets[1] is an integer, not a string"),
        ("spec.node.environment", [], "spec.node.environment is an array, not an object"),
        ("spec.hyperparams", "lr=1", "spec.hyperparams is a string, not an object"),
        ("spec.plugins.0.pin", "x", "unknown key spec.plugins[0].pin"),
        ("spec", None, "spec is null, not an object"),
        ("spec.slurm", None, "missing key spec.slurm: spec.resources.scheduler is slurm"),
    ],
)
def test_a_wrong_value_is_told_in_one_sentence(key: str, value: Any, fault: str) -> None:
    assert faults_of(with_value(key, value)) == [fault]


def test_what_takes_a_number_takes_a_whole_one() -> None:
    assert load(json.dumps(with_value("spec.node.stop_grace_s", 3))).spec.node.stop_grace_s == 3


def test_a_run_without_slurm_needs_no_slurm_part() -> None:
    value = with_value("spec.resources.scheduler", "local")
    value["spec"]["slurm"] = None
    assert load(json.dumps(value)).spec.slurm is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"apiVersion": ', "not JSON: Expecting value: line 1 column 16 (char 15)"),
        ("[]", "a JobSpec is a JSON object"),
        ("null", "a JobSpec is a JSON object"),
        ('{"a": NaN}', "not JSON: NaN is no number of JSON"),
        ('{"a": [-Infinity]}', "not JSON: -Infinity is no number of JSON"),
        ('{"a": 1e999}', "not JSON: 1e999 is too large for a number"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "not JSON: the key 'c' stands twice in one object"),
        ("[" * 200_000, "not JSON: nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused(text: str, fault: str) -> None:
    assert faults_of(text) == [fault]


def test_a_file_that_is_not_utf8_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    with pytest.raises(FileNotFoundError):
        read(path)
    path.write_bytes(b'{"apiVersion": "\xff"}')
    with pytest.raises(UsageError, match=r"job\.json: not UTF-8: invalid start byte at byte 16"):
        read(path)


# The schema


def test_the_schema_and_the_table_in_the_docs_are_those_of_the_code() -> None:
    remedy = "python tests/jobspec_docs.py"
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), remedy
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page and page == page_text(page), remedy


def test_every_key_has_a_meaning_in_the_docs() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 90
    assert [row for row in rows if row.rstrip("| ").count("|") < 3] == []


@functools.cache
def validator() -> Any:
    """Of the schema. To JSON Schema 2.0 is an integer; to us it is none."""
    jsonschema.Draft202012Validator.check_schema(schema())
    integers = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, v: isinstance(v, int) and not isinstance(v, bool)
    )
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=integers)(schema())


def is_valid(value: Any) -> bool:
    """Whether the schema takes a value."""
    return bool(validator().is_valid(value))


def is_loaded(value: Any) -> bool:
    try:
        load(json.dumps(value))
    except UsageError:
        return False
    return True


def keys_of(value: Any, prefix: str = "") -> list[str]:
    """Every dotted key of the complete file; of free-form objects the object alone."""
    found = []
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        found.append(f"{prefix}{name}")
        if prefix + str(name) != "spec.hyperparams":
            found += keys_of(inner, f"{prefix}{name}.")
    return found


KEYS = keys_of(COMPLETE)
GONE = "taken away"


def changed_at(key: str, change: Any) -> dict[str, Any]:
    value = copy.deepcopy(COMPLETE)
    *path, last = key.split(".")
    inner: Any = value
    for name in path:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    at: Any = int(last) if isinstance(inner, list) else last
    if change is GONE:
        del inner[at]
    else:
        inner[at] = change
    return value


def test_schema_and_reader_agree_on_the_kept_files() -> None:
    for path in JOBSPECS.glob("v1-*.json"):
        assert is_valid(json.loads(path.read_text(encoding="utf-8"))), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [KEYS, None, True, 0, -1, 2.5, "word", "local", [], {}, {"x": 1}, ["a"], [1]], ids=repr
)
def test_schema_and_reader_agree_on_every_key_with_every_kind_of_value(change: Any) -> None:
    for key in KEYS:
        value = changed_at(key, change)
        assert is_valid(value) == is_loaded(value), (key, change)


def test_schema_and_reader_agree_that_unknown_keys_are_refused() -> None:
    objects = [
        key
        for key in KEYS
        if isinstance(_at(key), dict)
        and key.split(".")[-1] not in ("hyperparams", "environment", "extra_directives")
    ]
    assert len(objects) > 15
    for key in ["", *objects]:
        value = copy.deepcopy(COMPLETE)
        inner: Any = value
        for name in key.split(".") if key else []:
            inner = inner[int(name)] if isinstance(inner, list) else inner[name]
        inner["Nodes"] = 1
        assert not is_valid(value) and not is_loaded(value), key


def _at(key: str) -> Any:
    inner: Any = COMPLETE
    for name in key.split("."):
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    return inner


def test_msgspec_is_no_part_of_it() -> None:
    """One reader: that of the kernel, which has the standard library alone."""
    assert "msgspec" not in Path(spec.__file__).read_text(encoding="utf-8")
