"""Whether a folder holds a whole model, by its files: names, the index of shards, the sizes that headers state.

Exports look before they copy, `tp submit` at a local model. Standard library alone; nothing is loaded.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_ONE, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer_config.json",
)

_LFS = b"version https://git-lfs"
_LARGEST_HEADER = 100_000_000  # as of the safetensors format


def model_problems(folder: Path) -> list[str]:
    """What keeps a folder from being a model that loads by itself; empty where nothing does.

    Each is a sentence whose subject is the folder or a file in it.
    """
    names = _names(folder)
    if CONFIG not in names:
        if ADAPTER_CONFIG in names:
            return ["holds LoRA weights alone, no model"]
        return [f"has no {CONFIG}"]
    problems = _config_problems(folder / CONFIG)
    for one, index in ((ONE, INDEX), (OLD_ONE, OLD_INDEX)):
        if index in names:
            return problems + _shard_problems(folder, index, names)
        if one in names:
            return problems + weight_problems(folder / one)
    return [*problems, f"has no weights ({ONE}, or {INDEX} and its shards)"]


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies beside the model."""
    return not _names(folder).isdisjoint(TOKENIZERS)


def weight_problems(file: Path) -> list[str]:
    """What is wrong with one file of weights, as its size and its header say it."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return [f"{file.name} is no file"]
        size = status.st_size
        with file.open("rb") as handle:
            head = handle.read(max(8, len(_LFS)))
            if head.startswith(_LFS):
                return [f"{file.name} is a pointer of git-lfs, not weights"]
            if size == 0:
                return [f"{file.name} is empty"]
            if file.suffix != ".safetensors":
                return []
            return _header_problems(handle.read, file.name, size, head)
    except OSError as error:
        return [f"{file.name} cannot be read: {error.strerror}"]


def _header_problems(read: Any, name: str, size: int, head: bytes) -> list[str]:
    """A safetensors file is 8 bytes of length, so much JSON, and the bytes of which that JSON states the ends."""
    cut = [f"{name} is cut off"]
    if len(head) < 8:
        return cut
    (length,) = struct.unpack("<Q", head[:8])
    if length > _LARGEST_HEADER or length + 8 > size:
        return cut
    try:
        header = json.loads((head[8:] + read(length + 8 - len(head)))[:length])
        ends = [int(tensor["data_offsets"][1]) for key, tensor in header.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return [f"{name} has a damaged header"]
    return cut if size < 8 + length + max(ends, default=0) else []


def _shard_problems(folder: Path, index: str, names: frozenset[str]) -> list[str]:
    try:
        shards = sorted(set(_read_json(folder / index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"{index} cannot be read"]
    missing = [shard for shard in shards if shard not in names]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return [f"lacks {missing[0]}{more} of {len(shards)} shards"]
    return [problem for shard in shards for problem in weight_problems(folder / shard)]


def _config_problems(file: Path) -> list[str]:
    try:
        config = _read_json(file)
    except OSError as error:
        return [f"{CONFIG} cannot be read: {error.strerror}"]
    except (ValueError, RecursionError):
        return [f"{CONFIG} is not JSON"]
    return [] if isinstance(config, dict) else [f"{CONFIG} is not a mapping"]


def _read_json(file: Path) -> Any:
    """The value in a file. Raises OSError, ValueError, RecursionError."""
    if not file.is_file() and file.exists():  # a pipe would be waited for
        raise ValueError("is no file")
    with file.open("rb") as handle:
        data = handle.read(_LARGEST_HEADER + 1)
    if len(data) > _LARGEST_HEADER:
        raise ValueError("is too large")
    return json.loads(data.decode("utf-8"))


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()
