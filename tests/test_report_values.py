"""What `log` makes of the values that trainers throw at it."""

from __future__ import annotations

import array
import collections
import enum
import math
import re
import statistics
import sys
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.report.hparams import known_secrets, plain
from tuneplane.report.values import NotReducible, flatten, mean


class Tensor:
    """As a tensor behaves to someone who only asks: `numel`, `tolist`, `item`, `mean`."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def _flat(self, values: Any) -> list[Any]:
        return (
            [leaf for value in values for leaf in self._flat(value)] if isinstance(values, list) else [values]
        )

    def numel(self) -> int:
        return len(self._flat(self.values))

    def tolist(self) -> Any:
        return self.values

    def item(self) -> Any:
        if self.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return self._flat(self.values)[0]

    def mean(self) -> Tensor:
        return Tensor(statistics.fmean(self._flat(self.values)))

    def __float__(self) -> float:
        return float(self.item())


class OnlyItem:
    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value


class BFloat16:
    """As ml_dtypes' scalars: no Python number, but convertible to one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


class Sharded(Tensor):
    """As a DTensor: asking for its numbers waits for other ranks."""

    asked = 0

    def __init__(self, values: Any, replicated: bool) -> None:
        super().__init__(values)
        self.placements = [SimpleNamespace(is_replicate=lambda: replicated)]

    def to_local(self) -> Tensor:
        return Tensor(self.values)

    def tolist(self) -> Any:
        Sharded.asked += 1
        raise RuntimeError("this would wait for the other ranks for ever")

    item = mean = __float__ = tolist  # type: ignore[assignment]


class Explosive:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Explosive
        raise RuntimeError(f"no {name}")


class Colour(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5),
        (7, 7),
        (True, 1),
        (Colour.RED, 3),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        ([1, 2, 3], 2.0),
        ((1.0, [2, 4]), 7 / 3),
        (range(5), 2.0),
        ({2, 4}, 3.0),
        (collections.deque([1, 2], maxlen=8), 1.5),
        (array.array("f", [0.5, 1.5]), 1.0),
        (Tensor(3.0), 3.0),
        (Tensor([[1.0, 2.0], [3.0, 6.0]]), 3.0),
        ([Tensor(1.0), Tensor(2.0)], 1.5),
        (Tensor([float(i) for i in range(10_001)]), 5000.0),
        ([Tensor([1.0] * 10_000), 10_001.0], 2.0 - 1 / 10_001),
        (OnlyItem(0.5), 0.5),
        (BFloat16(0.5), 0.5),
        (Tensor([BFloat16(0.5), BFloat16(1.5)]), 1.0),
        (Sharded([1.0, 2.0], replicated=True), 1.5),
        (2**62, 2**62),
        (2**70, float(2**70)),
        ([1e308, 1e308], 1e308),
    ],
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)),  # workers must name tests alike
)
def test_what_has_a_mean_is_its_mean(value: Any, expected: float) -> None:
    found = mean(value)
    assert found == pytest.approx(expected, rel=1e-12)
    assert type(found) in (int, float)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "0.5",
        b"1",
        [],
        [1, "two"],
        [None],
        {"a": 1}.keys(),
        1j,
        object(),
        Explosive(),
        10**400,
        Fraction(10**400),
        Decimal("1e400"),
        Decimal("sNaN"),
        Tensor([]),
        Tensor([[1.0, "x"]]),
        Sharded([1.0], replicated=False),
        lambda: 1,
        int,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_mean_is_dropped_and_the_rest_stays(value: Any) -> None:
    flat = flatten({"loss": 0.5, "bad": value, "deep": {"worse": value, "lr": 1e-3}})
    assert flat.numbers == {"loss": 0.5, "deep/lr": 1e-3}
    assert len(flat.dropped) == 2 and not Sharded.asked


def test_nan_and_infinities_are_values() -> None:
    nan, inf = float("nan"), float("inf")
    flat = flatten({"a": nan, "b": inf, "c": [1, -inf], "d": Tensor([nan, 1.0]), "e": Decimal("Infinity")})
    assert math.isnan(flat.numbers["a"]) and math.isnan(flat.numbers["d"])
    assert (flat.numbers["b"], flat.numbers["c"], flat.numbers["e"]) == (inf, -inf, inf)
    assert not flat.dropped


def test_nested_mappings_flatten_with_slashes_whatever_their_keys() -> None:
    flat = flatten({"a": {"b": {"c": 1}}, 2: 3, None: 4, ("x", 1): 5, "损失": 7})
    assert flat.numbers == {"a/b/c": 1, "2": 3, "None": 4, "('x', 1)": 5, "损失": 7}


@pytest.mark.parametrize("blank", ["", " ", "\t\n", "\u3000"])
@pytest.mark.parametrize("prefix", ["", "validation"])
def test_a_value_without_a_name_is_dropped_and_counted(blank: str, prefix: str) -> None:
    flat = flatten({blank: 1, "deep": {blank: 2, "acc": 3}, "loss": 4}, prefix)
    assert sorted(flat.numbers.values()) == [3, 4] and len(flat.dropped) == 2


def test_a_key_that_has_no_text_drops_its_value_alone() -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("mute")

    assert flatten({Mute(): 1, "loss": 2}).numbers == {"loss": 2}


@pytest.mark.parametrize("prefix", ["validation", "validation/", "/validation", 7])
def test_a_prefix_goes_before_names_that_have_no_namespace(prefix: Any) -> None:
    flat = flatten({"loss": 1, "eval/loss": 2, "deep": {"acc": 3}}, prefix)
    space = str(prefix).strip("/")
    assert flat.numbers == {f"{space}/loss": 1, "eval/loss": 2, "deep/acc": 3}


@pytest.mark.parametrize("prefix", [None, "", "/"])
def test_an_empty_prefix_is_none(prefix: Any) -> None:
    assert flatten({"loss": 1}, prefix).numbers == {"loss": 1}


def test_structures_that_hold_themselves_end() -> None:
    twins: dict[str, Any] = {"x": 1.0}
    twins["left"] = twins["right"] = twins
    rings: list[Any] = [1.0]
    rings += [rings, rings]
    flat = flatten({"twins": twins, "rings": rings, "loss": 0.5})
    assert flat.numbers["loss"] == 0.5 and flat.numbers["twins/x"] == 1.0
    assert "rings" not in flat.numbers and flat.dropped


leaves = st.one_of(
    st.floats(width=32),
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.lists(st.floats(-1e6, 1e6), max_size=4),
)
nested = st.recursive(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), leaves, max_size=4),
    lambda inner: st.dictionaries(
        st.text("abc", min_size=1, max_size=2), st.one_of(leaves, inner), max_size=3
    ),
    max_leaves=12,
)


def _model(metrics: Any, outer: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in metrics.items():
        name = f"{outer}{key}"
        if isinstance(value, dict):
            found.update(_model(value, name + "/"))
        elif isinstance(value, list):
            if value:
                found[name] = sum(value) / len(value)
        elif isinstance(value, (bool, int, float)):
            found[name] = value
    return found


@settings(deadline=None, max_examples=200)
@given(nested)
def test_flattening_agrees_with_a_plain_model(metrics: dict[str, Any]) -> None:
    assert repr(flatten(metrics).numbers) == repr(
        {name: int(value) if isinstance(value, bool) else value for name, value in _model(metrics).items()}
    ) or flatten(metrics).numbers == pytest.approx(_model(metrics), nan_ok=True)


def test_numpy_arrays_of_every_kind() -> None:
    numpy = pytest.importorskip("numpy")
    good = {
        "scalar": (numpy.float32(0.5), 0.5),
        "zero_d": (numpy.array(3), 3),
        "half": (numpy.full(10_000, 0.1, dtype=numpy.float16), pytest.approx(0.1, rel=1e-3)),
        "ints": (numpy.arange(10_000), 4999.5),
        "bools": (numpy.array([True, False]), 0.5),
        "matrix": (numpy.ones((3, 4)), 1.0),
        "masked": (numpy.ma.array([1.0, 2.0, 9.0], mask=[0, 0, 1]), 1.5),
        "objects": (numpy.array([Decimal(1), Decimal(2)], dtype=object), 1.5),
    }
    flat = flatten({name: value for name, (value, _) in good.items()})
    assert flat.numbers == {name: expected for name, (_, expected) in good.items()}
    bad = [
        numpy.array([]),
        numpy.array(["a"]),
        numpy.array(["2026-01-01"], dtype="datetime64[D]"),
        numpy.datetime64("2026-01-01T00:00:00", "ns"),
        numpy.array([1j]),
        numpy.ones(10_000, dtype=complex),
    ]
    for value in bad:
        with pytest.raises(Exception):  # noqa: B017 (whatever it is, flatten drops the value)
            mean(value)
    assert len(flatten(dict(enumerate(bad))).dropped) == len(bad)


@pytest.mark.contract("C15")
def test_bfloat16_and_float8_as_jax_has_them() -> None:
    numpy, ml_dtypes = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    flat = flatten(
        {
            "scalar": ml_dtypes.bfloat16(0.5),
            "zero_d": numpy.array(0.25, dtype=ml_dtypes.bfloat16),
            "short": numpy.array([0.5, 1.5], dtype=ml_dtypes.bfloat16),
            "long": numpy.full(10_000, 0.5, dtype=ml_dtypes.bfloat16),
            "float8": numpy.array([1.0, 2.0], dtype=ml_dtypes.float8_e4m3fn),
            "nan": ml_dtypes.bfloat16("nan"),
        }
    )
    assert math.isnan(flat.numbers.pop("nan"))
    assert flat.numbers == {"scalar": 0.5, "zero_d": 0.25, "short": 1.0, "long": 0.5, "float8": 1.5}
    assert flat.dropped == []


def test_torch_tensors_of_every_kind() -> None:
    torch = pytest.importorskip("torch")
    long_half = torch.full((100_000,), 0.1, dtype=torch.bfloat16)
    good = {
        "grad": (torch.tensor(0.5, requires_grad=True), 0.5),
        "bf16": (torch.tensor([0.5, 1.5], dtype=torch.bfloat16), 1.0),
        "long_bf16": (long_half, pytest.approx(float(long_half[0]), rel=1e-5)),
        "long_ints": (torch.arange(10_000), 4999.5),
        "bools": (torch.tensor([True, False]), 0.5),
        "parameter": (torch.nn.Parameter(torch.ones(5000)), 1.0),
        "list": ([torch.tensor(1.0), torch.tensor(2)], 1.5),
    }
    flat = flatten({name: value for name, (value, _) in good.items()})
    assert flat.numbers == {name: expected for name, (_, expected) in good.items()}
    bad = [torch.tensor([]), torch.tensor([1j]), torch.ones(9000, dtype=torch.complex64)]
    bad += [torch.empty(3, device="meta"), torch.empty(9000, device="meta")]
    assert len(flatten(dict(enumerate(bad))).dropped) == len(bad)


def test_mean_says_what_it_cannot_do() -> None:
    with pytest.raises(NotReducible):
        mean("0.5")


class Config:
    def __init__(self) -> None:
        self.lr, self.name = 0.1, "base"


def test_hparams_of_every_form_become_plain_json() -> None:
    assert plain({"lr": 0.1, "betas": (0.9, 0.95), 3: None}) == {"lr": 0.1, "betas": [0.9, 0.95], "3": None}
    assert plain(SimpleNamespace(lr=0.1)) == {"lr": 0.1}
    assert plain(Config()) == {"lr": 0.1, "name": "base"}
    assert plain(collections.namedtuple("P", "a b")(1, 2)) == {"a": 1, "b": 2}
    assert plain({"f": flatten, "c": Config, "p": sys.path.__class__}) == {
        "f": "tuneplane.report.values.flatten",
        "c": f"{__name__}.Config",
        "p": "builtins.list",
    }
    assert plain({"big": 2**70, "huge": 10**400, "on": True, "red": Colour.RED}) == {
        "big": float(2**70),
        "huge": "an integer of 1329 bits",
        "on": True,
        "red": 3,
    }
    assert plain([1, 2]) == {"hparams": [1, 2]}


def test_hparams_that_cannot_be_written_cost_themselves_alone() -> None:
    loop: dict[str, Any] = {"lr": 1}
    loop["self"] = loop
    assert plain({"ok": 1, "bad": Explosive()}) == {"ok": 1}
    assert plain(loop)["lr"] == 1
    assert len(plain({"text": "x" * 10**6})["text"]) < 5000
    assert len(plain(dict.fromkeys(map(str, range(50_000)), 1))) <= 10_000


@pytest.mark.contract("C11")
def test_secrets_of_the_environment_do_not_reach_the_hparams() -> None:
    secrets = known_secrets({"HF_TOKEN": "hf_abcdefgh", "API_KEY": "short", "HOME": "/root/hf_abcdefgh"})
    shown = plain({"args": {"cmd": "--token hf_abcdefgh"}, "pad_token": "<pad>", "short": "short"}, secrets)
    assert shown == {"args": {"cmd": "--token ***"}, "pad_token": "<pad>", "short": "short"}


@pytest.mark.contract("C11")
def test_reporting_masks_what_submit_takes_for_a_secret() -> None:
    """One rule of names for both: submit refuses the value in a run's parameters, reporting masks it."""
    given = {
        "S3_KEY_ID": "0123456789",
        "DB_PWD": "pass word!",
        "MAX_TOKENS": "1048576000",
        "KEYMAP": "dvorak-de",
    }
    shown = plain({"cmd": list(given.values())}, known_secrets(given))
    assert shown == {"cmd": ["***", "***", "1048576000", "dvorak-de"]}
