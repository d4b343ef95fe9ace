"""A tiny Llama with a tokenizer, and data of three forms, made on the spot. argv: the folder for them."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

folder = Path(sys.argv[1])
questions = [f"what is {a} and {b}" for a in range(8) for b in range(8)]

raw = Tokenizer(models.BPE(unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.ByteLevel()
raw.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
special = ["<unk>", "<pad>", "</s>"]
raw.train_from_iterator(
    questions, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", eos_token="</s>", chat_template=CHAT
)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
)
model.save_pretrained(folder / "tiny model")
tokenizer.save_pretrained(folder / "tiny model")


def write(name: str, rows: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / name).write_text(text, encoding="utf-8")


def said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


write("sft.jsonl", [{"messages": said("user", q) + said("assistant", q[8:])} for q in questions])
write("held [out].jsonl", [{"messages": said("user", q) + said("assistant", q[8:])} for q in questions[:8]])
write(
    "dpo.jsonl",
    [
        {
            "prompt": said("user", q),
            "chosen": said("assistant", q[8:]),
            "rejected": said("assistant", "no"),
        }
        for q in questions
    ],
)
write("grpo.jsonl", [{"prompt": said("user", q), "answer": q[8:]} for q in questions])
