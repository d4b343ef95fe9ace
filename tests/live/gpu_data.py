"""What gpu_check.py trains on, made on the spot: images of digits, sums to complete, a small language model.

`write_model` needs the trainer's Python, the rest a bare one: gpu_data.py MODEL DATA HIDDEN LAYERS
"""

from __future__ import annotations

import json
import random
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path


def images() -> Iterator[tuple[int, list[list[int]]]]:
    """Labels and grey pixels: the digits that scikit-learn ships, else bars whose place is their class."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        draw = random.Random(0)
        for number in range(1500):
            label = number // 5 % 10  # every fifth image of each is held out
            yield (
                label,
                [[min(255, draw.randrange(64) + 190 * (x == label)) for x in range(10)] for _ in range(10)],
            )
    else:
        digits = load_digits()
        for label, pixels in zip(digits.target, digits.images, strict=True):
            yield int(label), [[int(value * 255 / 16) for value in row] for row in pixels]


def png(rows: Sequence[Sequence[int]]) -> bytes:
    """A grey image of 8 bits as PNG (https://www.w3.org/TR/png-3/)."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 0, 0, 0, 0)
    pixels = b"".join(b"\0" + bytes(row) for row in rows)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b""))
    )


def write_images(folder: Path) -> None:
    """`train/<class>/*.png` and `validation/<class>/*.png`, every fifth held out."""
    for number, (label, rows) in enumerate(images()):
        path = folder / ("validation" if number % 5 == 0 else "train") / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(rows))


def write_sums(path: Path, rows: int, terms: int) -> None:
    """Rows of prompt and completion: a start and a step, and the numbers that follow."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            start, step = draw.randrange(100), draw.randrange(1, 10)
            numbers = " ".join(str(start + step * n) for n in range(1, terms))
            row = {"prompt": f"From {start} by {step}:", "completion": f" {numbers}"}
            file.write(json.dumps(row) + "\n")


def write_model(folder: Path, data: Path, hidden: int, layers: int) -> None:
    """A Llama of random weights and a tokenizer trained on the data. hidden: a multiple of 32."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train(
        [str(data)], trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    )
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, **tokens).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=made.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
