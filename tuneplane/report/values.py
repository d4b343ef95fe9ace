"""From what a trainer logs to names and numbers: flatten, prefix, reduce to a mean (C15). Pure; called by Session.

Tensors and arrays are known by what they can do (`tolist`, `item`, `mean`); no library is imported for them (C18).
"""

from __future__ import annotations

import sys
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Union

    Number = Union[int, float]

_SMALL = 4096
"""Arrays up to this size are averaged element by element in double precision; longer ones by their own `mean`."""

_MAX_DEPTH = 32
_MAX_CONTAINERS = 100_000
"""Bounds on nesting and on containers a call: a structure that holds itself must end somewhere."""

_INT64 = 1 << 63
_FLOATS = frozenset((float,))
_NAMES = frozenset((str,))
_SEQUENCES = (list, tuple, range, set, frozenset, deque)


class NotReducible(ValueError):
    """The value has no mean."""


class Flat:
    """The outcome of `flatten`: numbers by name, and the names (with types) of what was dropped."""

    __slots__ = ("dropped", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[str, Number] = {}
        self.dropped: list[str] = []


def flatten(metrics: Any, prefix: str | None = None) -> Flat:
    """Flatten nested mappings with `/`, put `prefix` before names without a namespace, reduce values to means."""
    flat = Flat()
    if not prefix and type(metrics) is dict and _is_flat(metrics):
        flat.numbers = metrics
        return flat
    space = str(prefix).strip("/") + "/" if prefix else ""
    _flatten_into(flat, metrics, "", "" if space == "/" else space, _Budget(), 0)
    return flat


def _is_flat(metrics: dict[Any, Any]) -> bool:
    """Whether there is nothing to do, which is the rule: a flat dict of floats."""
    return _FLOATS.issuperset(map(type, metrics.values())) and _NAMES.issuperset(map(type, metrics))


def mean(value: Any) -> Number:
    """The mean of a number, tensor, array or nested list of them. Integers beyond 64 bits become floats.

    Raises NotReducible, or whatever the value itself raises when asked for its numbers.
    """
    leaves = _Leaves()
    leaves.add(value, 0)
    return _storable(leaves.mean())


def _flatten_into(flat: Flat, metrics: Any, outer: str, space: str, budget: _Budget, depth: int) -> None:
    budget.spend(depth)
    for key, value in metrics.items():
        name, number = outer, value
        try:
            text = key if type(key) is str else str(key)
            if not text or text.isspace():
                raise NotReducible("no name")
            name = outer + text
            kind = type(value)
            if kind is not float:
                if kind is dict or _is_mapping(value):
                    _flatten_into(flat, value, name + "/", space, budget, depth + 1)
                    continue
                if kind is not int or not -_INT64 <= value < _INT64:
                    number = mean(value)
            flat.numbers[space + name if space and "/" not in name else name] = number
        except Exception:  # a value that cannot be read costs itself alone
            flat.dropped.append(f"{name[:80]!r} ({type(value).__name__})")


def _is_mapping(value: Any) -> bool:
    """Mappings by what they can do; a Series has `items` too, but also `tolist`, and is an array to us."""
    return isinstance(value, dict) or (
        hasattr(value, "items") and hasattr(value, "keys") and not hasattr(value, "tolist")
    )


def _storable(number: Number) -> Number:
    """Ints of 64 bits as they are, larger ones as floats. Raises OverflowError beyond a float's range."""
    return number if isinstance(number, float) or -_INT64 <= number < _INT64 else float(number)


class _Budget:
    """How many containers one call may still open."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _MAX_CONTAINERS

    def spend(self, depth: int) -> None:
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            raise NotReducible("too deep or too large")


class _Leaves:
    """The numbers inside one value: single ones, and the means of arrays too long to take apart."""

    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self.means: list[tuple[float, int]] = []  # mean and how many numbers it stands for
        self.budget = _Budget()

    def mean(self) -> Number:
        count = len(self.numbers) + sum(size for _, size in self.means)
        if not count:
            raise NotReducible("empty")
        if count == 1 and self.numbers:
            return self.numbers[0]
        total = sum(self.numbers)
        if self.means:
            return (total + sum(part * size for part, size in self.means)) / count
        result = total / count
        if (
            result - result != 0.0
        ):  # overflow of the sum, or a number that is inf or nan: only the latter stay so
            result = sum(number / count for number in self.numbers)
        return result

    def add(self, value: Any, depth: int) -> None:
        if isinstance(value, float):
            self.numbers.append(float(value))
        elif isinstance(value, int):
            self.numbers.append(int(value))
        elif isinstance(value, _SEQUENCES):
            self.budget.spend(depth)
            for element in value:
                self.add(element, depth + 1)
        elif value is None or isinstance(value, (str, bytes, bytearray, memoryview, dict)):
            raise NotReducible("not a number")
        elif hasattr(value, "tolist"):
            self._add_array(value, depth)
        elif hasattr(value, "item"):
            self.budget.spend(depth)
            self.add(value.item(), depth + 1)
        elif hasattr(value, "__float__"):
            self._add_real(value)
        elif hasattr(value, "mean"):
            self.budget.spend(depth)
            self.add(value.mean(), depth + 1)
        else:
            raise NotReducible("not a number")

    def _add_real(self, value: Any) -> None:
        """Decimal, Fraction, bfloat16 scalars and their like."""
        number = float(value)
        if number in (float("inf"), float("-inf")) and value != number:
            raise NotReducible("beyond the range of a float")
        self.numbers.append(number)

    def _add_array(self, value: Any, depth: int) -> None:
        self.budget.spend(depth)
        value = _local(value)
        if _has_other_kind(value):
            raise NotReducible("complex numbers and dates have no mean that is a number")
        size = size_of(value)
        if size > _SMALL:
            self.means.append((_long_mean(value), size))
            return
        before = len(self.numbers), len(self.means)
        try:
            self.add(value.tolist(), depth + 1)
        except NotReducible:
            if not hasattr(value, "mean") or not size:
                raise
            del self.numbers[before[0] :], self.means[before[1] :]
            self.add(value.mean(), depth + 1)  # masked arrays and series with holes know their own mean


def _has_other_kind(value: Any) -> bool:
    """Arrays whose elements a careless conversion would turn into numbers: complex ones, dates, durations."""
    is_complex = getattr(value, "is_complex", None)
    if callable(is_complex) and is_complex() is True:
        return True
    return getattr(getattr(value, "dtype", None), "kind", "") in ("c", "m", "M")


def _local(value: Any) -> Any:
    """A sharded tensor's numbers live on several ranks: asking for them here alone would wait for the others."""
    if not (hasattr(value, "to_local") and hasattr(value, "placements")):
        return value
    if all(placement.is_replicate() for placement in value.placements):
        return value.to_local()
    raise NotReducible("sharded over ranks")


def size_of(value: Any) -> int:
    """How many numbers an array holds; 1 where it does not say."""
    numel = getattr(value, "numel", None)
    size = numel() if callable(numel) else getattr(value, "size", 1)
    return size if isinstance(size, int) else 1


def _long_mean(value: Any) -> float:
    """The mean of a long array by its own library, in a precision that half floats do not spoil."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor):
        wide = torch.float32 if value.is_floating_point() and value.element_size() <= 4 else torch.float64
        return float(value.detach().mean(dtype=wide))
    try:
        return float(value.mean(dtype="float64" if "numpy" in type(value).__module__ else "float32"))
    except TypeError:
        return float(value.mean())
