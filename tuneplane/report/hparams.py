"""Hyper-parameters as plain JSON: what `init(hparams=…)` was given, with known secrets masked (C11, C15). Pure."""

from __future__ import annotations

from tuneplane.kernel.secret_names import secret_values
from tuneplane.report.lines import unicode
from tuneplane.report.values import size_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

_MAX_DEPTH = 16
_MAX_ENTRIES = 10_000
_MAX_TEXT = 4_000
_MAX_ARRAY = 1_000

MASK = "***"


def known_secrets(environ: Mapping[str, str]) -> list[str]:
    """Values of secret-named variables, longest first, so that one inside another is masked whole."""
    return sorted({*secret_values(environ).values()}, key=len, reverse=True)


def plain(hparams: Any, secrets: Iterable[str] = ()) -> dict[str, Any]:
    """A JSON object of `hparams`: a mapping, dataclass, namespace, named tuple or config object.

    What JSON has no form for becomes its text; an entry that cannot even be written as text is left out.
    """
    plainer = _Plainer(tuple(secrets))
    value = plainer.value(_opened(hparams), 0)
    return value if isinstance(value, dict) else {"hparams": value}


def _opened(hparams: Any) -> Any:
    """The mapping inside a config object, tried from the most deliberate form to the barest."""
    if isinstance(hparams, dict):
        return hparams
    for form in ("to_dict", "_asdict", "model_dump"):
        method = getattr(hparams, form, None)
        if callable(method) and not isinstance(hparams, type):
            try:
                found = method()
            except Exception:  # the next form may do
                continue
            if isinstance(found, dict):
                return found
    if hasattr(hparams, "items") or not hasattr(hparams, "__dict__") or callable(hparams):
        return hparams
    return dict(vars(hparams))


class _Plainer:
    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._secrets = secrets
        self._left = _MAX_ENTRIES

    def value(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(str.__str__(value))
        if isinstance(value, float):
            return float(value)
        if isinstance(value, int):
            return _storable_int(int(value))
        if depth < _MAX_DEPTH:
            if isinstance(value, dict) or (hasattr(value, "items") and hasattr(value, "keys")):
                return self.mapping(value.items(), depth)
            if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
                fields = [(name, getattr(value, name, None)) for name in value.__dataclass_fields__]
                return self.mapping(fields, depth)
            if isinstance(value, (list, tuple, set, frozenset)):
                return self.sequence(value, depth)
            if hasattr(value, "tolist") and size_of(value) <= _MAX_ARRAY:
                return self.value(value.tolist(), depth + 1)
        return self.text(_text_of(value))

    def mapping(self, items: Iterable[tuple[Any, Any]], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            self._left -= 1
            if self._left < 0:
                break
            try:
                found[self.text(key if isinstance(key, str) else str(key))] = self.value(value, depth + 1)
            except Exception:  # one entry that cannot be written costs itself alone
                continue
        return found

    def sequence(self, values: Iterable[Any], depth: int) -> list[Any]:
        found = []
        for value in values:
            self._left -= 1
            if self._left < 0:
                break
            found.append(self.value(value, depth + 1))
        return found

    def text(self, text: str) -> str:
        for secret in self._secrets:
            if secret in text:
                text = text.replace(secret, MASK)
        return unicode(text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…")


def _storable_int(number: int) -> Any:
    """Ints of 64 bits as they are; beyond that as a float, and beyond that as what they are: huge."""
    if -(1 << 63) <= number < 1 << 63:
        return number
    try:
        return float(number)
    except OverflowError:
        return f"an integer of {number.bit_length()} bits"


def _text_of(value: Any) -> str:
    """Functions and classes by name (their repr holds an address), everything else as its str."""
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if isinstance(name, str) else str(value)
