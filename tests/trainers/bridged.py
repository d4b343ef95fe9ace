"""A trainer of transformers that knows nothing of TunePlane, and ends as any script does. Started by tests.

argv: the folder of its own history and checkpoints. Prints the callbacks of the trainers that it makes.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

out = Path(sys.argv[1])


class Words(torch.utils.data.Dataset):
    """Made up."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(16) * (index + 1)) % 32
        return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    for attempt in range(2):
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Words(), eval_dataset=Words())
        print(attempt, [type(one).__name__ for one in trainer.callback_handler.callbacks])
    trainer.train()
    (out / "history.json").write_text(json.dumps(trainer.state.log_history))
