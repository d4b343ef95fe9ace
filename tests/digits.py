"""Real images to train on: the 1,797 handwritten digits that scikit-learn ships, 8 × 8 grey pixels each."""

from __future__ import annotations

from pathlib import Path

HELD_OUT = 5
"""Every fifth image of each file order is held out; one less, so that two ranks have unequal shares of them."""


def write_digits(folder: Path) -> Path:
    """`train/<digit>/*.png` and `validation/<digit>/*.png` below `folder`, 1,437 and 359 images; returns it."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[1:], digits.target[1:], strict=True), start=1):
        part = "validation" if number % HELD_OUT == 0 else "train"
        path = folder / part / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(path)
    return folder
