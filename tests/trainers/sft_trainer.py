"""TRL's SFTTrainer on a tiny model, a tokenizer made on the spot and a data set of this very file.

argv: JSON with `steps`. Its own history goes to `history-<attempt>.json` in the output folder.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tuneplane.report import TunePlaneCallback

asked = json.loads(sys.argv[1])
out = Path(os.environ["TUNEPLANE_OUT_DIR"])
texts = [line for line in Path(__file__).read_text().splitlines() if line.strip()] * 2

raw = Tokenizer(models.WordLevel(unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
raw.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "</s>"]))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
)

torch.manual_seed(0)
trainer = SFTTrainer(
    model=LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
        )
    ),
    args=SFTConfig(
        output_dir=str(out / "checkpoints"),
        max_steps=asked["steps"],
        per_device_train_batch_size=2,
        max_length=32,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    eval_dataset=Dataset.from_dict({"text": texts[:8]}),
    processing_class=tokenizer,
    callbacks=[TunePlaneCallback()],
)
trainer.train()
history = out / f"history-{os.environ['TUNEPLANE_JOB_ATTEMPT']}.json"
history.write_text(json.dumps(trainer.state.log_history))
sys.stdout.flush()
os._exit(0)
