"""`python3 -m tuneplane.hf_export OUT`: write OUT/hf_export of what a run left. The trl adapter's `export`.

Runs in the image, in one process. torch, transformers and peft are imported where LoRA weights are merged alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from tuneplane.hf_export.checkpoints import TO_RESUME, last_complete, step_of
from tuneplane.hf_export.folder import ADAPTER, EXPORT, FINAL, Origin, read_origin, written_whole
from tuneplane.hf_export.weights import ADAPTER_CONFIG, model_problems, weight_problems
from tuneplane.kernel import env

NOT_OF_THE_MODEL = (*TO_RESUME, "training_args.bin", "scaler.pt", "README.md")
"""What a checkpoint holds to go on with, besides the random states."""


@dataclass(frozen=True)
class Source:
    """Where the weights are, and what is to be said of them."""

    folder: Path
    origin: Origin

    @property
    def lora(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()


def main(argv: list[str] | None = None) -> int:
    """0: hf_export is there. 1: there is nothing to make it from, or it could not be written."""
    parser = argparse.ArgumentParser(prog="python3 -m tuneplane.hf_export")
    parser.add_argument("out", type=Path, help="output folder of the run")
    parser.add_argument(
        "--model", default="", help="base of LoRA weights; what they name themselves if empty"
    )
    parser.add_argument("--revision", default="main")
    parser.add_argument("--trust-remote-code", action="store_true")
    given = parser.parse_args(argv)
    place = given.out / EXPORT
    if _is_final(place, given.out / ADAPTER):
        print(f"export: {place} is the final model already", flush=True)
        return 0
    source = find_source(given.out)
    if source is None:
        print(f"export: {given.out} has no final model and no complete checkpoint", file=sys.stderr)
        return 1
    print(f"export: {source.folder} (step {source.origin.step}) → {place}", flush=True)
    try:
        origin = replace(source.origin, merged=source.lora)
        with written_whole(place, origin) as new:
            if source.lora:
                write_merged(source.folder, new, given.model, given.revision, given.trust_remote_code)
            else:
                copy_model(source.folder, new)
            problems = model_problems(new)
            if problems:
                raise ValueError(f"{source.folder} {'; '.join(problems)}")
    except (OSError, ValueError, ImportError) as error:
        print(f"export: {place} was not written: {error}", file=sys.stderr)
        return 1
    print(f"export: {place} written", flush=True)
    return 0


def find_source(out: Path) -> Source | None:
    """The best that a run left: LoRA weights of its end, else its last complete checkpoint.

    A whole model of its end is in place already.
    """
    adapter = out / ADAPTER
    origin = read_origin(adapter)
    if origin is not None:
        return Source(adapter, replace(origin, source=ADAPTER))
    folder = out / "checkpoints"
    found = {p.name: os.listdir(p) for p in folder.glob("checkpoint-*") if p.is_dir() and not p.is_symlink()}
    while found:
        name = last_complete(found, 1)
        if name is None:
            return None
        source = Source(folder / name, Origin(name, step_of(name), os.environ.get(env.NRL_RUN_ID, "")))
        if not _problems(source):
            return source
        del found[name]  # cut off by a full disk, perhaps: the one before it is better than none
    return None


def copy_model(source: Path, new: Path) -> None:
    """Copy what belongs to the model: weights, configuration, tokenizer. Raises OSError."""
    for file in sorted(source.iterdir()):
        name = file.name
        if file.is_file() and name not in NOT_OF_THE_MODEL and not name.startswith("rng_state"):
            shutil.copyfile(file, new / name)


def write_merged(adapter: Path, new: Path, base: str, revision: str, trust_remote_code: bool) -> None:
    """Write the base model with LoRA weights merged into it, and the tokenizer that lies beside them.

    Merged in float32, as training held the weights, and stored in the base's own type.
    Raises OSError, ValueError, ImportError.
    """
    torch, peft, transformers = map(importlib.import_module, ("torch", "peft", "transformers"))
    name = base or peft.PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    config = transformers.AutoConfig.from_pretrained(
        name, revision=revision, trust_remote_code=trust_remote_code
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        name, revision=revision, trust_remote_code=trust_remote_code, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(adapter), trust_remote_code=trust_remote_code)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # a chat template brought tokens along
        model.resize_token_embeddings(len(tokenizer))
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.to(getattr(config, "dtype", None) or torch.float32).save_pretrained(str(new))
    tokenizer.save_pretrained(str(new))


def _problems(source: Source) -> list[str]:
    if source.lora:
        return weight_problems(source.folder / "adapter_model.safetensors")
    return model_problems(source.folder)


def _is_final(place: Path, adapter: Path) -> bool:
    """Whether the export is whole and of the training's end."""
    origin, of_adapter = read_origin(place), read_origin(adapter)
    if origin is None or model_problems(place):
        return False
    if of_adapter is not None:
        return (
            origin.source == ADAPTER
            and origin.step == of_adapter.step
            and origin.made_at >= of_adapter.made_at
        )
    return origin.source == FINAL


if __name__ == "__main__":
    sys.exit(main())
