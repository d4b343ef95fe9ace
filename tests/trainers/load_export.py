"""What exported models are, as a user loads them: argv are folders; one JSON object on stdout, by folder.

`weights`: sum of all parameters; `next`: the logits of a prompt's next token. A folder with LoRA weights alone is
loaded by PEFT on its base.
"""

import json
import sys
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

found = {}
for name in sys.argv[1:]:
    lora = (Path(name) / "adapter_config.json").exists()
    kind = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    model = kind.from_pretrained(name)
    ids = AutoTokenizer.from_pretrained(name)("what is 3 and 4", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, -1]
    weights = sum(float(p.double().sum()) for p in model.parameters())
    found[name] = {
        "weights": weights,
        "next": [round(float(x), 4) for x in logits[:20]],
        "type": str(model.dtype),
    }
print(json.dumps(found))
