"""Training data is looked at before the queue: what is wrong with it is told with file and line, all at once."""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import os
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from training_packages import need_training_packages

from tuneplane.data import check, rows
from tuneplane.data.check import Look, look_at, model_faults
from tuneplane.kernel.errors import Fault
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import load_catalog

CATALOG = load_catalog([packaged_configs()])

TALK = {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "what?", "completion": "that"}
BETTER = {"prompt": "what?", "chosen": "that", "rejected": "this"}


def written(path: Path, values: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(v, ensure_ascii=False) + "\n" for v in values), encoding="utf-8")
    return path


def look(path: Path, method: str = "sft", **params: Any) -> Look:
    binding = CATALOG.get(f"trl/{method}").binding("train_data")
    assert binding is not None
    return look_at(binding, path, {"dataset_text_field": "text", **params})


def said(path: Path, method: str = "sft", **params: Any) -> list[str]:
    return [f"{f.where}: {f.what}" for f in look(path, method, **params).faults]


@pytest.mark.parametrize(
    ("method", "row"),
    [
        ("sft", TALK),
        ("sft", PAIR),
        (
            "sft",
            {
                "prompt": [{"role": "user", "content": "a"}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
        ),
        ("sft", {"text": "once", "source": 3}),
        ("sft", {"prompt": "", "completion": "from nothing"}),
        ("sft", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]}),
        ("sft", {"messages": [{"role": "user", "content": [{"type": "text", "text": "seen"}]}]}),
        ("dpo", BETTER),
        ("dpo", {"chosen": TALK["messages"], "rejected": TALK["messages"]}),
        ("grpo", {"prompt": [{"role": "user", "content": "a"}], "answer": 4}),
    ],
)
def test_rows_that_trl_takes_pass(tmp_path: Path, method: str, row: dict[str, Any]) -> None:
    found = look(written(tmp_path / "a.jsonl", [row, row, row]), method)
    assert (found.faults, found.notices, found.unchecked, found.rows) == ([], [], [], 3)


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_pass(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n\r\n".join(json.dumps(TALK).encode() for _ in range(3)))
    found = look(file)
    assert (found.faults, found.rows) == ([], 3)


@pytest.mark.parametrize(
    ("method", "bad", "what"),
    [
        ("sft", {"messages": "hello"}, "messages is text, not a list of messages with role and content"),
        ("sft", {"messages": []}, "messages is empty"),
        ("sft", {"messages": None}, "messages is null"),
        ("sft", {"messages": ["hello"]}, "messages[0] is text, not a message with role and content"),
        ("sft", {"messages": [{"content": "hello"}]}, "messages[0] has no role"),
        ("sft", {"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ("sft", {"messages": [{"role": "user", "content": 7}]}, "messages[0].content is an int, not text"),
        ("sft", {"talk": []}, "has no messages"),
        ("sft", ["hello"], "is a list, not a mapping of columns"),
        ("sft", 7, "is an int, not a mapping of columns"),
        ("dpo", {**BETTER, "chosen": ""}, "chosen is empty"),
        ("dpo", {**BETTER, "chosen": " \n"}, "chosen is empty"),
        ("dpo", {**BETTER, "rejected": None}, "rejected is null"),
        ("dpo", {**BETTER, "chosen": TALK["messages"]}, "prompt is text and chosen a list of messages"),
        ("grpo", {"prompt": ""}, "prompt is empty"),
        ("grpo", {"prompt": 3}, "prompt is an int, not text or a list of messages"),
    ],
)
def test_the_first_bad_line_is_named_and_the_others_are_counted(
    tmp_path: Path, method: str, bad: Any, what: str
) -> None:
    good: dict[str, Any] = {"sft": TALK, "dpo": BETTER, "grpo": {"prompt": "what?"}}[method]
    file = written(tmp_path / "a b.jsonl", [good, good, bad, good, bad, bad])
    (only,) = said(file, method)
    assert only.startswith(f"{file}:3: {what}") and only.endswith(" (and 2 more like it)")


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", [PAIR, {"prompt": "x"}, {**PAIR, "completion": ""}])
    with file.open("ab") as more:
        more.write(b'{"prompt": "caf\xe9", "completion": "x"}\n{"prompt": \n')
    assert [line.removeprefix(f"{file}:") for line in said(file)] == [
        "2: has no completion",
        "3: completion is empty",
        "4: is not UTF-8: byte 0xe9 at column 16",
        "5: is not JSON: Expecting value at column 12",
    ]


def test_without_the_columns_those_that_are_there_and_the_nearest_are_named(tmp_path: Path) -> None:
    (fault,) = look(written(tmp_path / "a.jsonl", [{"promt": "a", "complation": "b"}] * 5)).faults
    assert fault.what == (
        "train data has no columns messages; or prompt and completion; or text; it has promt, complation"
    )
    assert "promt → prompt" in fault.remedy and "complation → completion" in fault.remedy
    assert fault.where.endswith("a.jsonl:1")


def test_the_text_column_is_the_one_that_the_parameter_names(tmp_path: Path) -> None:
    file = written(tmp_path / "a.jsonl", [{"body": "hello"}])
    assert said(file, dataset_text_field="body") == []
    assert "or text; it has body" in said(file)[0]


def test_rows_of_two_kinds_are_told_apart(tmp_path: Path) -> None:
    listed = {"prompt": TALK["messages"]}
    (only,) = said(written(tmp_path / "a.jsonl", [{"prompt": "a"}, listed]), "grpo")
    assert ":2: prompt is a list, in the rows before it is not" in only


def test_files_that_are_not_data(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "wide.jsonl").write_bytes(json.dumps(TALK).encode("utf-16"))
    (tmp_path / "a.csv").write_text("text\nhello\n")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others/a.txt").write_text("x")
    (tmp_path / "saved/train").mkdir(parents=True)
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 10_000)[:-40])
    told = {file.name: said(file)[0].split(": ", 1)[1] for file in sorted(tmp_path.iterdir())}
    assert told == {
        "a.csv": "train data is none of .jsonl, .json or .parquet",
        "cut.jsonl.gz": "cannot be unpacked: Compressed file ended before the end-of-stream marker was reached",
        "empty.jsonl": "train data has no rows",
        "folder.jsonl": "train data is a folder that is called like a file",
        "nothing": "train data has no file of .jsonl, .json or .parquet",
        "others": "train data has no file of .jsonl, .json or .parquet",
        "pipe.jsonl": "train data is neither a file nor a folder",
        "saved": "train data was written by save_to_disk, which load_dataset does not read",
        "wide.jsonl": "is UTF-16, not UTF-8",
    }


def test_a_folder_is_all_its_files_hidden_ones_apart(tmp_path: Path) -> None:
    written(tmp_path / "a/b/part-2.jsonl", [PAIR, {"prompt": "x", "completion": None}])
    written(tmp_path / "a/part-1.json", [PAIR])
    written(tmp_path / "a/.cache/part-3.jsonl", [{"prompt": 1}])
    (tmp_path / "a/README.md").write_text("# data\n")
    (tmp_path / "a/loop").symlink_to(tmp_path / "a/b")
    found = look(tmp_path / "a")
    assert sorted({f.where for f in found.faults}) == sorted(
        f"{tmp_path}/a/{place}/part-2.jsonl:2" for place in ("b", "loop")
    )
    (tmp_path / "a/README.md").write_text("---\nconfigs:\n- config_name: x\n---\n")
    assert look(tmp_path / "a").unchecked and not look(tmp_path / "a").faults


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_packed_files_are_read(tmp_path: Path, pack: Any) -> None:
    file = tmp_path / ("a.jsonl.gz" if pack is gzip.compress else "a.jsonl.bz2")
    file.write_bytes(pack("".join(json.dumps(r) + "\n" for r in [PAIR, PAIR, 3]).encode()))
    assert said(file) == [f"{file}:3: is an int, not a mapping of columns"]


def test_json_may_be_a_list_or_values_over_several_lines(tmp_path: Path) -> None:
    listed, spread = tmp_path / "a.json", tmp_path / "b.json"
    listed.write_text(json.dumps([PAIR, PAIR, {"prompt": "x"}], indent=1))
    spread.write_text("".join(json.dumps(r, indent=1) + "\n" for r in [PAIR, PAIR, {"prompt": "x"}]))
    assert said(listed) == [f"{listed}:10: has no completion"]
    assert said(spread) == [f"{spread}:9: has no completion"]
    listed.write_text('[{"text": "a"},\n{"text": "b"')
    assert said(listed)[0].startswith(f"{listed}:2: is not JSON")
    listed.write_text('[{"text": "a"},\n')
    assert said(listed) == [f"{listed}:2: the list has no end"]
    listed.write_bytes(b'[{"text": "a"},\n{"text": "\xff"}]')
    assert said(listed) == [f"{listed}:2: is not UTF-8: byte 0xff"]


def test_a_character_may_lie_across_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "CHUNK", 7)
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": "你好😀" * 9}] * 5, ensure_ascii=False), encoding="utf-8")
    found = look(file)
    assert (found.faults, found.rows) == ([], 5)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"text": "' + "\0" * 99 + '"}', "\0" * 5_000]
)
def test_hostile_json_is_a_fault_and_no_crash(tmp_path: Path, text: str) -> None:
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(text)
        assert len(said(tmp_path / name)) == 1


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path) -> None:
    need_training_packages()
    pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([TALK, TALK, {"messages": None}]), file)
    assert said(file) == [f"{file}, row 3: messages is null"]
    file.write_bytes(b"PAR1 no")
    assert "is not parquet" in said(file)[0]


def test_without_pyarrow_parquet_is_not_looked_at_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    found = look(tmp_path / "a.parquet")
    assert found.faults == [] and "pyarrow is not installed on this host" in found.unchecked[0]


def test_of_a_huge_file_so_much_is_looked_at_as_time_and_memory_allow(tmp_path: Path) -> None:
    file = tmp_path / "huge.jsonl"
    with file.open("wb") as out:
        block = (json.dumps({"text": "x" * 1000}) + "\n").encode() * 1000
        for _ in range(60):
            out.write(block)
        out.truncate(200 << 30)  # 200 GB, of which the end is a hole
    binding = CATALOG.get("trl/sft").binding("train_data")
    assert binding is not None
    tracemalloc.start()
    began = time.monotonic()
    found = look_at(binding, file, {"dataset_text_field": "text"}, seconds=0.1)
    assert time.monotonic() - began < 5
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    (notice,) = found.notices
    assert "rows were looked at in 0.1 s; the rest of" in notice and "of it) was not" in notice
    assert found.faults == [] and found.rows > 100


def test_time_runs_out_on_bad_rows_and_on_many_small_files_too(tmp_path: Path) -> None:
    binding = CATALOG.get("trl/sft").binding("train_data")
    assert binding is not None
    (tmp_path / "bad.jsonl").write_text('{"text": 1\n' * 200_000)
    found = look_at(binding, tmp_path / "bad.jsonl", {}, seconds=0)
    assert len(found.faults) == 1 and len(found.notices) == 1
    for number in range(5):
        written(tmp_path / f"many/{number}.jsonl", [TALK])
    (notice,) = look_at(binding, tmp_path / "many", {}, seconds=0).notices
    assert "1 rows were looked at in 0 s; 4 of 5 files were not" in notice


def test_nothing_waits_for_a_pipe(tmp_path: Path) -> None:
    """Of a pipe without a writer an open never returns, of a device a read has no end."""
    for name in ("itself.jsonl", "data/a.jsonl", "card/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "device").mkdir()
    (tmp_path / "device/a.jsonl").symlink_to("/dev/zero")
    assert "is neither a file nor a folder" in said(tmp_path / "itself.jsonl")[0]
    assert "is no file: a pipe" in said(tmp_path / "data")[0]
    assert "is no file: a pipe" in said(tmp_path / "device")[0]
    assert "has no file of .jsonl" in said(tmp_path / "card")[0]
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        model = make_model(tmp_path / f"model of {name}")
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)
        assert name in model_faults(model)[0].what


def test_of_wide_rows_no_more_are_read_than_there_is_time_for(tmp_path: Path) -> None:
    file = written(tmp_path / "wide.jsonl", [{"text": "x" * 1_000_000}] * 20)
    binding = CATALOG.get("trl/sft").binding("train_data")
    assert binding is not None
    found = look_at(binding, file, {"dataset_text_field": "text"}, seconds=0)
    assert found.rows == 1 and "rows were looked at in 0 s" in found.notices[0]


def test_a_list_of_many_small_rows_is_read_whole_in_the_time_that_there_is(tmp_path: Path) -> None:
    row = json.dumps({"text": "x" * 100})
    (tmp_path / "list.json").write_text(f"[{', '.join([row] * 200_000)}]")
    found = look(tmp_path / "list.json", dataset_text_field="text")
    assert found.rows == 200_000 and found.notices == []


def test_links_that_lead_up_and_lines_without_rows_have_an_end(tmp_path: Path) -> None:
    written(tmp_path / "a/b/one.jsonl", [TALK])
    for name in ("up", "up too"):
        (tmp_path / "a/b" / name).symlink_to(tmp_path / "a")
    assert look(tmp_path / "a").rows == 1
    (tmp_path / "blank.jsonl").write_text("\n" * 300_000)
    assert "more than 100,000 blank lines on end" in said(tmp_path / "blank.jsonl")[0]


def test_faults_at_many_places_of_a_row_are_one(tmp_path: Path) -> None:
    rows_ = [{"messages": [*TALK["messages"]] * n + [{"role": "user", "content": 7}]} for n in range(1, 50)]
    (only,) = said(written(tmp_path / "a.jsonl", rows_))
    assert ":1: messages[2].content is an int, not text (and 48 more like it)" in only


def test_a_row_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW_BYTES", 1 << 20)
    file = tmp_path / "a.jsonl"
    with file.open("wb") as out:
        out.truncate(64 << 30)
    (fault,) = look(file).faults
    assert isinstance(fault, Fault) and fault.what == "a row of more than 1 MB"


# Models


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def make_model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(8),
    }
    for name, content in {**whole, **{k.replace("__", "."): v for k, v in files.items()}}.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_whole_model_passes_and_what_is_missing_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a model")
    assert model_faults(model) == []
    for name, what in [
        ("config.json", "model has no config.json"),
        ("tokenizer.json", "model has no tokenizer"),
        (
            "model.safetensors",
            "model has no weights (model.safetensors, or model.safetensors.index.json and its",
        ),
    ]:
        kept = (model / name).read_bytes()
        (model / name).unlink()
        (fault,) = model_faults(model)
        assert fault.what.startswith(what) and fault.where == str(model) and fault.remedy
        (model / name).write_bytes(kept)
    assert "a file, not a folder" in model_faults(model / "config.json")[0].what


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "model.safetensors is empty"),
        (b"\x10\0\0", "model.safetensors is cut off"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a pointer of git-lfs, not weights",
        ),
        ((1 << 60).to_bytes(8, "little") + b"{}", "model.safetensors is cut off"),
        ((2).to_bytes(8, "little") + b"[]", "model.safetensors has a damaged header"),
        (headed(b'{"w": {"data_offsets": [0, "x"]}}'), "model.safetensors has a damaged header"),
        (headed(b"[" * 100_000), "model.safetensors has a damaged header"),
    ],
)
def test_weights_that_are_none_are_seen_without_loading_them(
    tmp_path: Path, content: bytes, what: str
) -> None:
    (fault,) = model_faults(make_model(tmp_path / "m", model__safetensors=content))
    assert what in fault.what


def test_weights_cut_off_by_a_byte_and_a_missing_shard_are_seen(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert model_faults(model)[0].what == "model model.safetensors is cut off"
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-3.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    weights.rename(model / "x-2.safetensors")
    assert model_faults(model)[0].what == "model lacks x-1.safetensors and 1 more of 3 shards"


def test_a_configuration_that_is_nested_without_end_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", config__json=b"[" * 100_000)
    assert "config.json is not JSON" in model_faults(model)[0].what


def test_lora_weights_alone_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds LoRA weights alone" in model_faults(tmp_path)[0].what


def test_looking_takes_as_long_as_it_says() -> None:
    assert check.LOOK_S == 10
