"""A model of a few thousand weights with its tokenizer, and conversations for it. Started by tests.

argv: a folder; its `model` and `data/train.jsonl` are made.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

where = Path(sys.argv[1])
texts = [line for line in Path(__file__).read_text().splitlines() if line.strip()] * 2
raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
raw.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "</s>"]))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
)
tokenizer.save_pretrained(where / "model")
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
).save_pretrained(where / "model")
(where / "data").mkdir()
(where / "data/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
