"""The trl adapter: TRL's own scripts in every rank, with a config file of the parameters; export by one process.

docs/recipes/trl.md says how it is used. Data and model are looked at before the queue by `tuneplane.data`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tuneplane.hf_export.checkpoints import last_complete
from tuneplane.kernel.errors import Fault
from tuneplane.recipes.adapters import Command, Launch, NodeFacts

OPERATIONS = {"train": Launch.TORCHRUN, "export": Launch.ONE_PROCESS}

CONFIG, DATASET = "trl.yaml", "dataset"
"""Below `NodeFacts.files_dir`: what `--config` names, and the folder of the card that names local data files."""

TRAIN, VALIDATION = "train", "validation"
"""Splits of local data, as its card calls them."""

FILE = re.compile(r"\.(jsonl?|parquet)(\.(gz|bz2|xz))?$")
"""A binding that names a file, not a folder."""

ANY_FILE = "**/*.[jp][sa][or][nq]*"
"""All .jsonl, .json and .parquet files below a folder, in one pattern: one that finds nothing is an error."""

REWARDS = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
)
"""The reward functions that trl.scripts.grpo knows by name; others are imported."""


def train(node: NodeFacts) -> Command:
    """`-m trl.scripts.…` with a config file, in the experiment's folder: rewards are imported from there."""
    config = f"{node.files_dir}/{CONFIG}"
    files = {config: yaml_of(training(node))}
    card = dataset_card(node.bindings)
    if card:
        files[f"{node.files_dir}/{DATASET}/README.md"] = f"---\n{yaml_of(card)}---\n"
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_MININTERVAL": "10",
    }  # a line of the log, not of a terminal
    if is_local(node.bindings.get("train_data", "")):
        # Beside the data it would be prepared once for all nodes, on a filesystem whose locks may not hold.
        env["HF_DATASETS_CACHE"] = f"{node.tmp_dir}/datasets"
    return Command(
        argv=("-m", node.entrypoint, "--config", config),
        cwd=node.exp_dir,
        launch=Launch.TORCHRUN,
        env=env,
        files=files,
        bridge=("--hook", "transformers", "--hook", "saves"),
    )


def export(node: NodeFacts) -> Command:
    """Write `hf_export` of the run's output folder, of its final weights or else its last complete checkpoint."""
    argv = ["python3", "-m", "tuneplane.hf_export", node.out_dir]
    if node.bindings.get("model"):
        argv += [
            f"--model={node.bindings['model']}",
            f"--revision={node.params.get('model_revision') or 'main'}",
        ]
    if node.params.get("trust_remote_code"):
        argv.append("--trust-remote-code")
    return Command(argv=tuple(argv), cwd=node.work_dir, launch=Launch.ONE_PROCESS)


def training(node: NodeFacts) -> dict[str, Any]:
    """The config file: parameters by their names, null ones left to TRL, and what the platform decides."""
    data, params = node.bindings, {k: v for k, v in node.params.items() if v is not None and "." not in k}
    config: dict[str, Any] = {
        "model_name_or_path": data.get("model", ""),
        "output_dir": f"{node.out_dir}/checkpoints",
        "report_to": "none",  # the bridge's hook reports
        "disable_tqdm": True,  # a log is no terminal
        **params,
    }
    if node.device == "cpu":
        config["use_cpu"] = True
        config.setdefault("bf16", False)
    validation = data.get("validation_data")
    config.setdefault("eval_strategy", "steps" if validation else "no")
    if FILE.search(data.get("train_data", "")) or validation:  # by the card
        config["dataset_name"] = f"{node.files_dir}/{DATASET}"
        config["dataset_train_split"], config["dataset_test_split"] = TRAIN, VALIDATION
    else:
        config["dataset_name"] = data.get("train_data", "")
    checkpoint = last_complete({c.name: c.files for c in node.checkpoints}, node.nodes * node.gpus_per_node)
    if checkpoint is not None:
        config["resume_from_checkpoint"] = f"{node.out_dir}/checkpoints/{checkpoint}"
    return config


def dataset_card(bindings: Mapping[str, str]) -> dict[str, Any]:
    """The metadata of a dataset card that names local files as splits; empty where none is needed.

    trl.scripts take one name for `datasets.load_dataset`, and no files; a folder with such a card is one.
    """
    train, validation = bindings.get("train_data", ""), bindings.get("validation_data")
    if not is_local(train) or not (FILE.search(train) or validation):
        return {}
    splits = [(TRAIN, train), *([(VALIDATION, validation)] if validation else [])]
    files = [{"split": split, "path": [_pattern(path)]} for split, path in splits]
    return {"configs": [{"config_name": "default", "data_files": files}]}


def is_local(binding: str) -> bool:
    """Whether a binding is a path, not the id of something on the Hub."""
    return binding.startswith("/")


def faults(params: Mapping[str, Any], bindings: Mapping[str, str], ranks: int | None) -> list[Fault]:
    """What does not fit together, as a training would find when it starts. ranks: of all nodes, None: unknown."""
    found: list[Fault] = []
    data, validation = bindings.get("train_data"), bindings.get("validation_data")
    if data and validation and not is_local(data):
        what = f"{data} is a data set of the Hub, which is evaluated on a split of its own"
        found.append(Fault(what, "--validation-data", "--set dataset_test_split=NAME in its place"))
    evaluates = params.get("eval_strategy") not in (None, "no")
    if evaluates and data and is_local(data) and FILE.search(data) and not validation:
        what = f"eval_strategy is {params['eval_strategy']}, and there is nothing to evaluate on"
        found.append(Fault(what, "--validation-data", "name a file, or leave eval_strategy away"))
    if params.get("bf16") and params.get("fp16"):
        found.append(Fault("bf16 and fp16 exclude each other", "--set", "keep one"))
    if params.get("assistant_only_loss") and params.get("completion_only_loss"):
        found.append(
            Fault("assistant_only_loss and completion_only_loss exclude each other", "--set", "keep one")
        )
    found += _reward_faults(params)
    if ranks is not None and "num_generations" in params:
        found += _generation_faults(params, ranks, evaluates or validation is not None)
    return found


def _reward_faults(params: Mapping[str, Any]) -> list[Fault]:
    names = params.get("reward_funcs")
    if names is None:
        return []
    found = [
        Fault(
            f"reward_funcs: {name} is no reward function of TRL, and no dotted name",
            "reward_funcs",
            f"one of {', '.join(REWARDS)}, or MODULE.FUNCTION of a module in the experiment's folder",
        )
        for name in names
        if name not in REWARDS and "." not in name.strip(".")
    ]
    if not names:
        found.append(Fault("reward_funcs is empty", "reward_funcs", "name one or more"))
    weights = params.get("reward_weights")
    if weights is not None and len(weights) != len(names):
        what = f"{len(weights)} reward_weights for {len(names)} reward_funcs"
        found.append(Fault(what, "reward_weights", "one weight for each, or null"))
    return found


def _generation_faults(params: Mapping[str, Any], ranks: int, evaluates: bool) -> list[Fault]:
    """A round of generation holds whole groups of completions, as GRPOConfig checks when training starts."""
    found = []
    group = params["num_generations"]
    batch = params.get("per_device_train_batch_size", 8)
    rounds = params.get("steps_per_generation") or params.get("gradient_accumulation_steps", 1)
    if batch * ranks * rounds % group:
        all_of_them = f"{ranks} ranks × {batch} samples × {rounds} batches"
        what = f"num_generations={group} does not divide the completions of a round, {all_of_them}"
        remedy = "change num_generations, per_device_train_batch_size or gradient_accumulation_steps"
        found.append(Fault(what, "num_generations", remedy))
    group, batch = params.get("num_generations_eval") or group, params.get("per_device_eval_batch_size", 8)
    if evaluates and batch * ranks % group:
        what = f"{ranks} ranks × {batch} samples of an evaluation are not whole groups of {group} completions"
        found.append(Fault(what, "per_device_eval_batch_size", "change it, or num_generations_eval"))
    return found


def yaml_of(mapping: Mapping[str, Any]) -> str:
    """A mapping as YAML 1.1, a key a line, in ASCII alone: whatever locale it is read in, it says the same."""
    return "".join(f"{json.dumps(key)}: {_ascii(_flow(value))}\n" for key, value in mapping.items())


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 takes 1e-05 for text
    return text


def _ascii(text: str) -> str:
    r"""JSON's own `\ud83d\ude00` is two characters to YAML, which has `\U0001f600`."""
    return re.sub(
        r"[^\x20-\x7e]",
        lambda m: f"\\U{ord(m[0]):08x}" if ord(m[0]) > 0xFFFF else f"\\u{ord(m[0]):04x}",
        text,
    )


def _pattern(path: str) -> str:
    """A path as the pattern that finds it, or the files below it, and nothing else."""
    escaped = re.sub(r"[][*?]", lambda m: f"[{m[0]}]", path)
    return escaped if FILE.search(path) else f"{escaped}/{ANY_FILE}"
