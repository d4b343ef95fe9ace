"""Whether torch, transformers and TRL are here: tests of real trainers need them, `make test` installs them."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need_training_packages() -> None:
    """Skip where they are not installed; in CI that is a failure."""
    if importlib.util.find_spec("trl") is not None and importlib.util.find_spec("peft") is not None:
        return
    reason = "tests/requirements-training.txt is not installed: `make test` does so"
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
    pytest.skip(reason)
