"""The trl adapter: whole commands, variables and files for one node and for four; what does not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tuneplane.hf_export.checkpoints import last_complete
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.adapters import Checkpoint, NodeFacts, compile_command, input_faults, trl
from tuneplane.recipes.catalog import load_catalog

WHOLE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")


def facts(nodes: int = 1, rank: int = 0, **more: Any) -> NodeFacts:
    told = NodeFacts(
        work_dir="/scratch/work",
        exp_dir="/scratch/work/experiments/chat",
        out_dir="/runs/chat/out",
        entrypoint="trl.scripts.sft",
        nodes=nodes,
        gpus_per_node=8,
        node_rank=rank,
        main_ip="10.0.0.1",
        main_port=29500,
        params={
            "learning_rate": 2e-5,
            "max_steps": -1,
            "packing": False,
            "eval_strategy": None,
            "bf16": None,
        },
        module=True,
        bindings={"model": "/models/tiny", "train_data": "/data/talks.jsonl"},
        files_dir="/scratch/files",
        tmp_dir="/scratch/tmp",
    )
    return dataclasses.replace(told, **more)


SFT_CONFIG = """\
"model_name_or_path": "/models/tiny"
"output_dir": "/runs/chat/out/checkpoints"
"report_to": "none"
"disable_tqdm": true
"learning_rate": 2.0e-05
"max_steps": -1
"packing": false
"eval_strategy": "no"
"dataset_name": "/scratch/files/dataset"
"dataset_train_split": "train"
"dataset_test_split": "validation"
"""
CARD = """\
---
"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": ["/data/talks.jsonl"]}]}]
---
"""


@pytest.mark.parametrize(("nodes", "rank"), [(1, 0), (4, 0), (4, 3)])
def test_the_same_command_and_files_on_every_node(nodes: int, rank: int) -> None:
    command = compile_command("trl", "train", facts(nodes, rank))
    assert command.argv == ("-m", "trl.scripts.sft", "--config", "/scratch/files/trl.yaml")
    assert command.cwd == "/scratch/work/experiments/chat"
    assert (command.launch, command.bridge) == ("torchrun", ("--hook", "transformers", "--hook", "saves"))
    assert command.env == {
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_MININTERVAL": "10",
        "HF_DATASETS_CACHE": "/scratch/tmp/datasets",
    }
    assert command.files == {
        "/scratch/files/trl.yaml": SFT_CONFIG,
        "/scratch/files/dataset/README.md": CARD,
    }


def test_a_data_set_of_the_hub_is_named_and_left_in_the_sites_cache() -> None:
    bindings = {"model": "org/model", "train_data": "org/talks"}
    params = {"dataset_test_split": "held_out", "eval_strategy": "epoch"}
    command = trl.train(facts(bindings=bindings, params=params))
    config = yaml.safe_load(command.files["/scratch/files/trl.yaml"])
    assert config["model_name_or_path"] == "org/model" and config["dataset_name"] == "org/talks"
    assert config["dataset_test_split"] == "held_out" and config["eval_strategy"] == "epoch"
    assert len(command.files) == 1 and "HF_DATASETS_CACHE" not in command.env


def test_a_folder_alone_keeps_its_own_splits_and_beside_validation_data_is_trained_on_whole() -> None:
    alone = trl.training(facts(bindings={"train_data": "/data/talks"}))
    assert (alone["dataset_name"], alone["eval_strategy"]) == ("/data/talks", "no")
    assert "dataset_test_split" not in alone
    both = {"train_data": "/data/[a] talks?", "validation_data": "/data/held*.json"}
    assert trl.training(facts(bindings=both))["eval_strategy"] == "steps"
    (card,) = trl.dataset_card(both)["configs"]
    assert [split["path"] for split in card["data_files"]] == [
        [f"/data/[[]a[]] talks[?]/{trl.ANY_FILE}"],
        ["/data/held[*].json"],
    ]


def test_on_a_cpu_profile_it_trains_without_bfloat16_unless_asked_to() -> None:
    assert "use_cpu" not in trl.training(facts())
    config = trl.training(facts(device="cpu"))
    assert (config["use_cpu"], config["bf16"]) == (True, False)
    assert trl.training(facts(device="cpu", params={"bf16": True}))["bf16"] is True


def checkpoint(step: int, *files: str) -> Checkpoint:
    return Checkpoint(f"checkpoint-{step}", f"/runs/chat/out/checkpoints/checkpoint-{step}", files)


def test_it_goes_on_from_the_last_complete_checkpoint() -> None:
    ranks = tuple(f"rng_state_{rank}.pth" for rank in range(8))
    found = (
        checkpoint(9, *WHOLE, *ranks),
        checkpoint(10, *WHOLE, *ranks),
        checkpoint(20, *WHOLE, *ranks[:7]),  # a rank was killed before it had saved its random state
        checkpoint(30, *ranks, "model.safetensors", "optimizer.pt", "scheduler.pt"),
        checkpoint(40, *WHOLE, *ranks, "checkpoint-is-incomplete.txt"),
        Checkpoint("latest", "/elsewhere", (*WHOLE, *ranks)),
    )
    config = trl.training(facts(checkpoints=found))
    assert config["resume_from_checkpoint"] == "/runs/chat/out/checkpoints/checkpoint-10"
    assert "resume_from_checkpoint" not in trl.training(facts(checkpoints=found[3:]))


def test_random_states_of_other_ranks_are_better_than_to_start_again() -> None:
    assert last_complete({"checkpoint-5": WHOLE}, 16) == "checkpoint-5"
    assert last_complete({"checkpoint-5": (*WHOLE, "rng_state.pth")}, 1) == "checkpoint-5"
    lora = ("adapter_model.safetensors", *WHOLE[1:])
    assert last_complete({"checkpoint-5": lora, "checkpoint-6": lora[1:]}, 1) == "checkpoint-5"


def test_export_is_one_process_on_the_runs_output_folder() -> None:
    command = compile_command("trl", "export", facts(params={"trust_remote_code": True}))
    assert command.launch == "one-process" and not command.bridge and not command.files
    assert command.argv == (
        *("python3", "-m", "tuneplane.hf_export", "/runs/chat/out"),
        *("--model=/models/tiny", "--revision=main", "--trust-remote-code"),
    )


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False, allow_infinity=False))
def test_any_path_and_number_reads_as_written(text: str, number: float) -> None:
    values = {"path": text, "number": number, "list": [text, -3, True, None], "nested": {"a": [{"b": text}]}}
    written = trl.yaml_of(values)
    assert written.isascii() and yaml.safe_load(written) == values


GRPO = {"reward_funcs": ["rewards.near"], "num_generations": 8, "per_device_train_batch_size": 8}
BOUND = {"model": "/models/tiny", "train_data": "/data/questions.jsonl"}


@pytest.mark.parametrize(
    ("params", "bindings", "ranks", "said"),
    [
        ({"eval_strategy": "steps"}, BOUND, 8, "eval_strategy is steps, and there is nothing to evaluate on"),
        ({"bf16": True, "fp16": True}, BOUND, 8, "bf16 and fp16 exclude each other"),
        ({}, {"train_data": "a/b", "validation_data": "/v.json"}, 8, "evaluated on a split of its own"),
        (
            {**GRPO, "reward_funcs": ["acuracy_reward"]},
            BOUND,
            8,
            "acuracy_reward is no reward function of TRL",
        ),
        ({**GRPO, "reward_funcs": []}, BOUND, 8, "reward_funcs is empty"),
        ({**GRPO, "reward_weights": [1.0, 2.0]}, BOUND, 8, "2 reward_weights for 1 reward_funcs"),
        ({**GRPO, "num_generations": 6}, BOUND, 2, "num_generations=6 does not divide"),
        ({**GRPO, "num_generations_eval": 3, "eval_strategy": "epoch"}, BOUND, 8, "whole groups of 3"),
    ],
)
def test_what_does_not_fit_together_is_told(
    params: dict[str, Any], bindings: dict[str, str], ranks: int, said: str
) -> None:
    assert said in " ".join(fault.what for fault in input_faults("trl", params, bindings, ranks))


def test_the_catalogs_defaults_fit_together() -> None:
    catalog = load_catalog([packaged_configs()])
    for method in ("trl/sft", "trl/dpo", "trl/grpo"):
        params = {p.name: p.default for p in catalog.get(method).parameters if not p.required}
        assert input_faults("trl", params, BOUND, 1) == [], method


def test_what_the_methods_share_they_say_alike() -> None:
    """Three files that people read alone; nothing else keeps them from drifting apart."""
    catalog = load_catalog([packaged_configs()])
    sft, *others = (catalog.get(f"trl/{name}") for name in ("sft", "dpo", "grpo"))
    own = {"learning_rate", "logging_steps", "beta", "loss_type", "max_length"}
    for recipe in others:
        for parameter in recipe.parameters:
            same = sft.parameter(parameter.name)
            assert same is None or parameter.name in own or parameter == same, parameter.name
