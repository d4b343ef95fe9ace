"""Which variables hold secrets (C11), by their names: the one rule, for both sides of a run and for reporting."""

from __future__ import annotations

import re

TYPE_CHECKING = False  # `typing` costs reporting 10 ms of import
if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET_NAME = re.compile(
    r"(?i)(?<![a-z])(key|secrets?|passwd)(?![a-z])|token(?![a-z])|password|passphrase|credential"
    r"|(api|auth|access|private|secret)key(?![a-z])|_pwd(?![a-z])"
)
"""Names whose values are secrets: HF_TOKEN, S3_KEY, WANDB_APIKEY. Not MAX_TOKENS, nor KEYMAP."""

SHORTEST_SECRET = 8
"""Characters. A shorter value is no secret worth the name: looking for it would find ordinary words."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret, by its name alone."""
    return SECRET_NAME.search(name) is not None


def secret_values(environ: Mapping[str, str]) -> dict[str, str]:
    """Name → value of those variables that hold a secret which is long enough to be looked for."""
    return {
        name: value
        for name, value in environ.items()
        if len(value) >= SHORTEST_SECRET and is_secret_name(name)
    }
