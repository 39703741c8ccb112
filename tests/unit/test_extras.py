"""Extras: the same values and types come back; anything else is refused with its key."""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import json
import math
import pathlib
import random
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moc.errors import ConfigError, DamagedError, MismatchError, StateError, UnsupportedValue
from moc.state.extras import Extras, decode, encode, rng_state, set_rng_state

np = pytest.importorskip("numpy")

FLOATS = st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0]
) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 0.1])
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**40)
    | FLOATS
    | TEXT
    | st.binary(max_size=8)
    | st.builds(complex, FLOATS, FLOATS)
)
TENSORS = st.sampled_from(
    [
        torch.tensor([1.5, math.nan, -0.0], dtype=torch.bfloat16),
        torch.tensor([[True, False]]),
        torch.tensor(16_777_217),
        torch.empty(0, 3, dtype=torch.float16),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1 + 2j]).conj(),
    ]
)
ARRAYS = st.sampled_from(
    [
        np.float32(0.1),
        np.int64(-3),
        np.longlong(5),
        np.bool_(True),
        np.str_("é"),
        np.str_(""),
        np.datetime64("2025-01-01"),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.array(2.5),
        np.zeros((0, 2), np.uint8),
        np.array(["a", "bc"]),
    ]
)
VALUES = st.recursive(
    SCALARS | TENSORS | ARRAYS | st.just(torch.Size([2, 3])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(SCALARS, inner, max_size=4)
        | st.dictionaries(TEXT, inner, max_size=4).map(collections.OrderedDict)
        | st.lists(st.integers(0, 3)).map(collections.Counter)
        | st.sets(SCALARS, max_size=4)
        | st.frozensets(SCALARS, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type, bit for bit, order of keys included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        a, b = a.resolve_conj().contiguous(), b.contiguous()
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and bytes(a.view(-1).view(torch.uint8)) == bytes(b.view(-1).view(torch.uint8))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return sorted(encode(v, "") for v in a) == sorted(encode(v, "") for v in b)
    return bool(a == b)


@given(VALUES)
def test_every_allowed_value_comes_back_the_same(value: Any) -> None:
    data = encode(value, "x")
    assert same(value, decode(data))
    assert encode(decode(data), "x") == data


@given(st.sets(st.integers() | TEXT))
def test_equal_sets_have_equal_bytes(values: set[Any]) -> None:
    assert encode(values, "x") == encode(set(reversed(list(values))), "x")


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "uint16", "int8", "complex64"])
def test_every_dtype(dtype: str) -> None:
    tensor = torch.tensor([1.0, 2.0, 3.0]).to(getattr(torch, dtype))
    back = decode(encode(tensor, "x"))
    assert same(tensor, back)


def test_decoded_tensors_and_arrays_are_their_own() -> None:
    tensor, array = torch.ones(3, requires_grad=True), np.ones(3)
    back: Any = decode(encode([tensor, array], "x"))
    back[0].add_(1)
    back[1] += 1
    assert tensor.tolist() == array.tolist() == [1.0, 1.0, 1.0]
    assert not back[0].requires_grad


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (argparse.Namespace(a=1), "argparse.Namespace"),
        (pathlib.PurePosixPath("a"), "pathlib.PurePosixPath"),
        (Color.RED, "Color"),
        (Point(1, 2), "Point"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (bytearray(b"a"), "bytearray"),
        (object(), "object"),
        (len, "builtin_function_or_method"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (torch.ones(2).to_sparse(), "not plain"),
        (torch.ones(2, device="meta"), "meta device"),
        (np.array([object()]), "dtype object"),
        (np.zeros(1, dtype="i4,f4"), "more than its bytes"),
        (np.str_("a\0"), "ends in zeros"),
        (np.ma.masked_array([1]), "MaskedArray"),
        ({(1, 2): 3}, r"has the key \(1, 2\), a tuple"),
        ({Color.RED: 3}, "has the key .*Color"),
        ({(1, 2)}, "has the element"),
    ],
)
def test_anything_else_is_refused_with_its_path(value: Any, named: str) -> None:
    with pytest.raises(UnsupportedValue, match=named) as caught:
        encode({"pos": [0, {"x": value, "y z": 1}]}, "extras['loader']")
    assert str(caught.value).startswith("extras['loader'].pos[1].x ")
    assert "allowed are None, bool" in str(caught.value)
    with pytest.raises(UnsupportedValue, match=r"^e\['y z'\]\[3\]\[1\] "):
        encode({"y z": {3: (0, value)}}, "e")


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(UnsupportedValue, match=r"x\[1\]\.again contains itself"):
        encode(loop, "x")
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnsupportedValue, match="deeper than 100"):
        encode(deep, "x")
    shared = [1]
    assert decode(encode([shared, shared], "x")) == [[1], [1]]


def test_the_deepest_value_that_is_taken_can_be_read() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {1: deep}
    assert decode(encode(deep, "x")) == deep


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1",
        "NaN",
        '{"pickle":"x"}',
        '{"tuple":[],"list":[]}',
        "{}",
        '{"bytes":"***"}',
        '{"float":"00"}',
        '{"dict":[1]}',
        '{"dict":[[],1]}',
        '{"tensor":["float32",[2],"AAAA"]}',
        '{"tensor":["load",[0],""]}',
        '{"tensor":1}',
        '{"array":["O",[1],"AAAAAAAAAAA="]}',
        '{"array":["<f4",[-1],""]}',
        '{"scalar":["<f4"]}',
        "[" * 100_000,
    ],
)
def test_damaged_bytes_are_named_so(text: str) -> None:
    with pytest.raises(DamagedError, match="extras are damaged"):
        decode(text.encode())


@given(VALUES, st.data())
def test_cut_bytes_never_pass_silently(value: Any, data: st.DataObject) -> None:
    written = encode([value], "x")
    cut = data.draw(st.integers(0, len(written) - 1))
    with pytest.raises(DamagedError):
        decode(written[:cut])


@given(VALUES, st.data())
def test_changed_bytes_give_a_value_or_damage(value: Any, data: st.DataObject) -> None:
    written = bytearray(encode([value], "x"))
    written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.sampled_from(b'0"[{}],:a'))
    with contextlib.suppress(DamagedError):
        decode(written)


# ---------------------------------------------------------------------------------------- RNG


def draws() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(3).tolist(),
    ]


def test_all_generators_go_on_where_they_were() -> None:
    draws()
    state = decode(encode(rng_state(), "rng"))
    assert isinstance(state, dict)
    first = draws()
    assert draws() != first
    set_rng_state(state)
    assert draws() == first


def test_generators_of_absent_devices_are_told() -> None:
    devices = torch.cuda.device_count()
    state = rng_state() | {"cuda": [torch.cuda.get_rng_state(i) for i in range(devices)]}
    state["cuda"].append(torch.get_rng_state())
    with pytest.warns(UserWarning, match=f"of {devices + 1} CUDA devices"):
        set_rng_state(state)


# ------------------------------------------------------------------------------------- Extras


class Counting:
    """A loader with a position; writes what happens to it into a list."""

    def __init__(self, at: Any = 0, log: list[str] | None = None, name: str = "") -> None:
        self.at, self.log, self.name = at, log, name

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        torch.rand(5)  # like a loader that seeds its workers
        if self.log is not None:
            self.log.append(self.name)


def schedulers() -> list[Any]:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)

    kinds = torch.optim.lr_scheduler
    return [
        kinds.MultiStepLR(optimizer(), [2, 5, 5]),
        kinds.CyclicLR(optimizer(), 0.1, 0.2),
        kinds.OneCycleLR(optimizer(), 0.1, 10),
        kinds.ReduceLROnPlateau(optimizer()),
        kinds.LambdaLR(optimizer(), lambda step: 0.9**step),
        kinds.CosineAnnealingWarmRestarts(optimizer(), 3),
    ]


@pytest.mark.parametrize("number", range(6))
def test_schedulers_of_torch(number: int) -> None:
    before = schedulers()[number]
    args = (1.0,) if isinstance(before, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
    before.optimizer.step()
    before.step(*args)
    after = schedulers()[number]
    Extras({"scheduler": after}).restore(Extras({"scheduler": before}).capture())
    assert same(after.state_dict(), before.state_dict())


class WarmupScheduler(Counting):
    pass


def test_schedulers_come_first_and_rng_last() -> None:
    def objects(at: int) -> dict[str, Any]:
        return {
            "loader": Counting(at, log, "loader"),
            "pair": (Counting(at + 1, log, "first"), Counting(at + 2, log, "second")),
            "warmup": WarmupScheduler(at, log, "warmup"),
        }

    log: list[str] = []
    data = Extras(objects(3)).capture()
    expected = torch.rand(4).tolist()
    target = objects(0)
    Extras(target).restore(data)
    assert log == ["warmup", "loader", "first", "second"]
    assert [target["loader"].at, *(p.at for p in target["pair"]), target["warmup"].at] == [
        3,
        4,
        5,
        3,
    ]
    assert torch.rand(4).tolist() == expected


def test_without_rng() -> None:
    with_rng = Extras({"a": Counting(1)}).capture()
    without = Extras({"a": Counting(2)}, rng=False)
    assert b"__rng__" not in without.capture()
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    torch.rand(5)  # what loading draws
    after_load = torch.get_rng_state()
    torch.set_rng_state(expected)
    without.restore(with_rng)
    assert torch.equal(torch.get_rng_state(), after_load)


def test_names_are_compared_before_anything_is_loaded() -> None:
    data = Extras({"a": Counting(1), "old": Counting(1), "many": [Counting(1)]}).capture()
    a, many = Counting(0), [Counting(0), Counting(0)]
    extras = Extras({"a": a, "new": Counting(0), "many": many})
    with pytest.raises(MismatchError, match="extras differ") as caught:
        extras.restore(data)
    assert caught.value.missing == ("new",)
    assert caught.value.unexpected == ("old",)
    assert caught.value.differing == ("extras['many']: 1 saved, 2 here",)
    assert a.at == 0
    extras.restore(data, strict=False)
    assert (a.at, many[0].at) == (1, 0)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"loader": 3}, r"extras\['loader'\] \(int\) has no state_dict\(\)"),
        ({"loader": Counting}, "the class Counting"),
        ({"opt": [Counting(), {}]}, r"extras\['opt'\]\[1\] \(dict\)"),
        ({"__rng__": Counting()}, "cannot be a name"),
        ({"": Counting()}, "cannot be a name"),
    ],
)
def test_objects_without_state_are_refused_at_once(extras: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Extras(extras)


def test_refusals_name_the_extra() -> None:
    with pytest.raises(UnsupportedValue, match=r"extras\['l'\]\[1\]\.at is a pathlib"):
        Extras({"l": [Counting(1), Counting(pathlib.PurePosixPath("a"))]}).capture()
    data = Extras({"l": Counting(1)}).capture().replace(b'"at"', b'"to"')
    with pytest.raises(StateError, match=r"extras\['l'\] does not load its state: 'at'"):
        Extras({"l": Counting(0)}).restore(data)
    with pytest.raises(DamagedError, match="not a table"):
        Extras({}).restore(json.dumps([1]).encode())
