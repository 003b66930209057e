import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sizewise.common.structure import Bytes, build, format_bytes, nearest, parse_bytes, plain
from sizewise.errors import ConfigError
from sizewise.exchange.plan import Plan, TrainingStage, read_plan
from sizewise.methods.fedepth.blocks import Blocks, Run, TakenApart

UNITS = {"": 1, "B": 1, "k": 10**3, "KB": 10**3, "MB": 10**6, "mb": 10**6, "GB": 10**9}
BINARY = {"KiB": 2**10, "MiB": 2**20, "mib": 2**20, "GiB": 2**30}


@given(st.integers(1, 10**9), st.sampled_from(sorted(UNITS | BINARY)), st.sampled_from(["", " "]))
def test_bytes_are_a_number_times_a_unit(number: int, unit: str, space: str) -> None:
    expected = number * (UNITS | BINARY)[unit]
    assert parse_bytes(f" {number}{space}{unit} ") == expected


@given(st.integers(1, 10**7))
@example(1001)
def test_decimal_bytes_lose_nothing_to_rounding(thousandths: int) -> None:
    assert parse_bytes(f"{Decimal(thousandths).scaleb(-3):f}kB") == thousandths
    assert parse_bytes(f"{Decimal(thousandths).scaleb(-3):f}MB") == thousandths * 1000


@given(st.integers(1, 2**63))
def test_bytes_as_a_number_are_themselves(number: int) -> None:
    assert parse_bytes(number) == number


@pytest.mark.parametrize(
    "value",
    [
        *("", "MB", "-3MB", "0", "0.9", 0, -1, 0.5, float("nan"), float("inf"), "nan", "5."),
        *("20 TB", "1e6", "20MBit", True, None, [20], "2 0MB"),
    ],
)
def test_other_bytes_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r'fleet\.x must be .* such as 20000000, "20MB"'):
        parse_bytes(value, "fleet.x")


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        *[(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_234_567, "1.23 MB"), (20e6, "20 MB")],
        *[(999_499, "999 kB"), (999_999, "1 MB"), (999_999_999, "1 GB"), (1234e9, "1,234 GB")],
        *[(999.9e9, "1,000 GB")],
    ],
)
def test_bytes_for_people(amount: float, text: str) -> None:
    assert format_bytes(amount) == text


def test_nearest_word_is_offered_or_all_of_them() -> None:
    assert nearest("epoch", ["lr", "epochs"]) == "did you mean 'epochs'?"
    assert nearest("zzz", ["lr", "epochs"]) == "choose one of epochs, lr"
    assert nearest("zzz", []) == "it takes no keys"


@dataclass(frozen=True)
class Inner:
    name: str
    flag: bool = False


@dataclass(frozen=True)
class Outer:
    count: int = 1
    rate: float = 0.5
    memory: Bytes | None = None
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    rates: tuple[float, ...] = ()
    free: dict[str, Any] = field(default_factory=dict)
    made: int = field(init=False, default=7)


def test_mapping_becomes_nested_dataclasses() -> None:
    values = {
        "rate": 2,
        "memory": "2kB",
        "inner": {"name": "x"},
        "many": [{"name": "y", "flag": True}],
        "rates": [1, 0.5],
        "free": {"z": [1]},
    }
    built = build(Outer, values)
    expected = Outer(1, 2.0, 2000, "a", Inner("x"), (Inner("y", True),), (1.0, 0.5), {"z": [1]})
    assert built == expected
    assert isinstance(built.rate, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, r"unknown key 'top\.cuont'; did you mean 'count'\?"),
        ({"made": 1}, r"unknown key 'top\.made'"),
        ({"inner": {}}, r"'top\.inner\.name' is missing; give it a value"),
        ({"inner": {"name": "x", "flog": True}}, r"'top\.inner\.flog'; did you mean 'flag'\?"),
        ({"inner": 3}, r"top\.inner must be a table, not 3"),
        ({"many": [{"name": 5}]}, r"top\.many\[0\]\.name must be text in quotes, not 5"),
        ({"many": "x"}, r"top\.many must be a list, not 'x'"),
        ({"rates": [1, "x"]}, r"top\.rates\[1\] must be a number, not 'x'"),
        ({"count": True}, r"top\.count must be a whole number, not True"),
        ({"count": 1.5}, r"top\.count must be a whole number, not 1\.5"),
        ({"rate": True}, r"top\.rate must be a number, not True"),
        ({"inner": {"name": "x", "flag": 1}}, r"top\.inner\.flag must be true or false, not 1"),
        ({"kind": "c"}, r"top\.kind cannot be 'c'; choose one of a, b"),
        ({"kind": ["a"]}, r"top\.kind cannot be \['a'\]"),
        ({"memory": "x"}, r"top\.memory must be a positive amount of memory"),
        ({"free": 3}, r"top\.free must be a table, not 3"),
    ],
)
def test_bad_value_is_named_with_its_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Outer, values, "top")


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a table"):
        build(Outer, [1], "top")  # type: ignore[arg-type]


def test_plain_leaves_out_none_and_init_false_comes_back() -> None:
    assert plain(Inner("x")) == {"name": "x", "flag": False}
    assert "inner" not in plain(Outer())
    assert plain({1: (Inner("x"), None)}) == {"1": [{"name": "x", "flag": False}, None]}


numbers = st.lists(st.integers(0, 9), max_size=3).map(tuple)
blocks = st.builds(Blocks, numbers, numbers, st.booleans(), st.booleans(), st.none() | st.just(4))
stages = st.builds(
    TrainingStage,
    st.floats(0, 1),
    st.integers(1, 9),
    st.none() | st.lists(st.text(max_size=4), max_size=3).map(tuple),
    st.builds(Run, st.none() | blocks, st.lists(blocks, max_size=2).map(tuple)),
)
plans = st.builds(
    Plan,
    st.integers(0),
    st.integers(0),
    st.text(),
    st.builds(TakenApart, st.booleans(), numbers, st.integers(0, 3), st.text()),
    st.lists(stages, max_size=3).map(tuple),
    st.none() | st.integers(1),
    st.none() | st.integers(1),
)


@given(plans)
def test_plan_survives_json(plan: Plan) -> None:
    assert read_plan(json.loads(json.dumps(plain(plan))), TakenApart, Run) == plan
