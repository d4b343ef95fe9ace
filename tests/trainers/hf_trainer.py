"""A real trainer of transformers on a tiny model: what a user's train.py looks like. Started by tests.

argv: JSON with `steps`, `pause_s` (what each step of attempt 0 takes longer), `callback` (`class`, `instance`
or `rank0`).
Its own history goes to `history-<attempt>.json` in the output folder, by rank 0.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tuneplane.report import TunePlaneCallback

asked = {"steps": 12, "pause_s": 0.0, "callback": "class", **json.loads(sys.argv[1])}
out = Path(os.environ["TUNEPLANE_OUT_DIR"])
checkpoints = out / "checkpoints"
attempt = os.environ["TUNEPLANE_JOB_ATTEMPT"]


class Pause(TrainerCallback):
    """Steps that take their time."""

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(asked["pause_s"] if attempt == "0" else 0.0)


class Words(torch.utils.data.Dataset):
    """Made up."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        ids = (torch.arange(16) * (index + 1)) % 32
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
)
arguments = TrainingArguments(
    output_dir=str(checkpoints),
    max_steps=asked["steps"],
    per_device_train_batch_size=2,
    learning_rate=0.01,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=asked["steps"],
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
callback = TunePlaneCallback if asked["callback"] == "class" else TunePlaneCallback()
given = asked["callback"] != "rank0" or os.environ["RANK"] == "0"
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Words(64),
    eval_dataset=Words(8),
    callbacks=[Pause(), *([callback] if given and asked["callback"] != "class" else [])],
)
if asked["callback"] == "class":
    trainer.add_callback(callback)
latest = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
trainer.train(resume_from_checkpoint=latest)
if trainer.is_world_process_zero():
    (out / f"history-{attempt}.json").write_text(json.dumps(trainer.state.log_history))
    print("ended after step", trainer.state.global_step, "of", asked["steps"], flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads sometimes keep an interpreter from ending
