"""A tiny language model in Hugging Face form and a task of four questions, for tests of the real lm-eval.

`python tests/eval_lab.py MODEL TASKS` writes both. It needs torch and transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TASK = """task: colours
dataset_path: json
dataset_kwargs: {data_files: {validation: colours.jsonl}}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
"""Its data lies beside it, by a relative path."""

QUESTIONS = (
    ("the sky is", ("blue", "green"), 0),
    ("grass is", ("green", "white"), 0),
    ("snow is", ("black", "white"), 1),
    ("coal is", ("black", "blue"), 0),
)


def write_task(folder: Path) -> None:
    """The task `colours`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "colours.yaml").write_text(TASK)
    rows = [{"question": q, "choices": list(c), "answer": a} for q, c, a in QUESTIONS]
    (folder / "colours.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_model(folder: Path) -> None:
    """A Llama of 3,000 parameters that knows the words of the questions."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    texts = [f"{question} {' '.join(choices)}" for question, choices, _ in QUESTIONS]
    raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
    write_task(Path(sys.argv[2]))
