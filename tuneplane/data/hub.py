"""Models and data sets of the Hugging Face Hub, where compute nodes have no way to it: what the cache holds.

`check.py` asks. The layout is that of huggingface_hub and datasets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tuneplane.hf_export.weights import has_tokenizer, model_problems
from tuneplane.kernel.errors import Fault

_TRUE = ("1", "ON", "YES", "TRUE")


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether Hugging Face's libraries are told not to ask the Hub."""
    told = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
    return told.upper() in _TRUE


def hub_cache(environment: Mapping[str, str]) -> Path | None:
    """Where models are cached; None where the site does not say."""
    if environment.get("HF_HUB_CACHE"):
        return Path(environment["HF_HUB_CACHE"])
    return Path(environment["HF_HOME"]) / "hub" if environment.get("HF_HOME") else None


def datasets_cache(environment: Mapping[str, str]) -> Path | None:
    """Where data sets are cached; None where the site does not say."""
    if environment.get("HF_DATASETS_CACHE"):
        return Path(environment["HF_DATASETS_CACHE"])
    return Path(environment["HF_HOME"]) / "datasets" if environment.get("HF_HOME") else None


def cached_model_faults(name: str, revision: str, cache: Path, where: str) -> list[Fault]:
    """What keeps a model from being loaded from the cache alone."""
    fetch = f"on a host with internet: HF_HOME={cache.parent} hf download {name}"
    folder = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / revision).read_text().strip() if not _is_commit(revision) else revision
    except OSError:
        commit = ""
    snapshot = folder / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        at = "" if revision == "main" else f" at {revision}"
        what = f"model {name}{at} is not in {cache}, and the site is offline (HF_HUB_OFFLINE)"
        return [Fault(what, where, fetch)]
    problems = model_problems(snapshot) + ([] if has_tokenizer(snapshot) else ["has no tokenizer"])
    return [Fault(f"model {name} in {cache} {problem}", where, fetch) for problem in problems]


def cached_dataset_faults(name: str, cache: Path, where: str) -> list[Fault]:
    """What keeps a data set from being loaded from the cache alone: there it is under a name of its own."""
    wanted = _folded(name.replace("/", "___"))
    try:
        folders = [folder for folder in cache.iterdir() if _folded(folder.name) == wanted]
    except OSError:
        folders = []
    if any(path.is_dir() for folder in folders for path in folder.glob("*/*/*")):
        return []
    load = f"import datasets; datasets.load_dataset('{name}')"
    remedy = f'on a host with internet: HF_HOME={cache.parent} python -c "{load}"'
    return [
        Fault(f"data set {name} is not in {cache}, and the site is offline (HF_HUB_OFFLINE)", where, remedy)
    ]


def _folded(name: str) -> str:
    """`acme___My_Talk` and `acme___MyTalk` alike: datasets puts underscores where capitals are."""
    return re.sub("[_-]", "", name).casefold()


def _is_commit(revision: str) -> bool:
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision))
