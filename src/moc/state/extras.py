"""Extras: the small things beside model and optimizer, exact and without pickle.

Scheduler, loader position, scaler, RNG: whatever has ``state_dict()`` and ``load_state_dict()``.
Their values are written as JSON with type tags, so that each comes back as the type it was; a value
that could not is refused when it is saved, with its key, not weeks later when it is loaded.
Reading evaluates nothing and imports nothing by name.
"""

from __future__ import annotations

import base64
import binascii
import collections
import ctypes
import json
import math
import random
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from moc.core.piece import MAX_PIECE_BYTES
from moc.errors import ConfigError, DamagedError, MismatchError, StateError, UnsupportedValue
from moc.state.tensors import tensor_bytes

__all__ = [
    "ALLOWED",
    "LARGE_BYTES",
    "RNG",
    "Extras",
    "Large",
    "decode",
    "encode",
    "rng_state",
    "set_rng_state",
]

ALLOWED = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict and Counter with"
    " scalar keys, set and frozenset of scalars, torch.Tensor, torch.Size, NumPy scalars and arrays"
)
"""What `encode` takes; listed in its errors."""

RNG = "__rng__"
"""Name under which `Extras` keeps the random number generators."""

LARGE_BYTES = 64 << 10
"""Tensors and arrays above this are pieces of their own, where there is room for them."""

_BY_GROUP = frozenset(
    ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums")
)
"""What torch's schedulers keep as one value for each group of their optimizer."""

_MAX_DEPTH = 100
"""Containers within one another; JSON nests twice as deep, far below the interpreter's limit."""

_NUMPY_KINDS = "biufcSUMm"
"""Kinds of NumPy types whose bytes are all there is: no objects, no records."""


class _Refused(Exception):
    """A value that cannot be written; the keys on the way to it are added as it rises."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.keys: list[str] = []


class Large:
    """Collects the bytes of tensors that are too large for JSON.

    Args:
        room: how many pieces they may make; what comes after that is written as JSON.

    Attributes:
        taken: bytes of each, in order; views of the live values where they are contiguous.
    """

    def __init__(self, room: int) -> None:
        self.taken: list[bytes | memoryview] = []
        self._room = room

    def take(self, nbytes: int, read: Callable[[], bytes | memoryview]) -> int | None:
        """Number under which it is kept; None where it is small, or there is no room."""
        pieces = -(-nbytes // MAX_PIECE_BYTES)
        if nbytes <= LARGE_BYTES or pieces > self._room:
            return None
        self._room -= pieces
        self.taken.append(read())
        return len(self.taken) - 1


# ---------------------------------------------------------------------------------------- encode


def encode(value: object, path: str) -> bytes:
    """Write a value so that `decode` gives an equal one, of the same types.

    Tensors are copied to the CPU and come back there, without ``requires_grad``. Floats are kept
    bit for bit. An object that is referenced twice comes back as two.

    Args:
        value: of the types in `ALLOWED`; subclasses of them are refused too.
        path: name of the value for errors, like ``extras['loader']``.

    Raises:
        UnsupportedValue: something within it is of another type, or contains itself.
    """
    return _dump(_tag(value, path))


def _dump(tagged: object) -> bytes:
    return json.dumps(
        tagged, ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
    ).encode()


def _tag(value: object, path: str, large: Large | None = None) -> object:
    try:
        return _Encoder(large or Large(0)).any(value)
    except _Refused as refused:
        where = path + "".join(reversed(refused.keys))
        raise UnsupportedValue(f"{where} {refused}; allowed are {ALLOWED}") from None


class _Encoder:
    """One encoding. Every JSON object it makes is a tag: ``{type: content}``."""

    def __init__(self, large: Large) -> None:
        self._large = large
        self._open: set[int] = set()
        self._by_type: dict[type, Callable[[Any], object]] = {
            type(None): _same,
            bool: _same,
            **_SCALARS,
            list: self._items,
            tuple: lambda v: {"tuple": self._items(v)},
            dict: lambda v: {"dict": self._pairs(v)},
            collections.OrderedDict: lambda v: {"ordered": self._pairs(v)},
            collections.Counter: lambda v: {"counter": self._pairs(v)},
            set: lambda v: {"set": self._scalars(v)},
            frozenset: lambda v: {"frozenset": self._scalars(v)},
            torch.Size: lambda v: {"size": list(v)},
            torch.Tensor: lambda v: _tag_tensor(v, large),
        }

    def any(self, value: object) -> object:
        make = self._by_type.get(type(value))
        return make(value) if make else _tag_numpy(value, self._large)

    def _enter(self, value: object) -> int:
        mark = id(value)
        if mark in self._open:
            raise _Refused("contains itself")
        if len(self._open) == _MAX_DEPTH:
            raise _Refused(f"is nested deeper than {_MAX_DEPTH} containers")
        self._open.add(mark)
        return mark

    def _items(self, value: Iterable[object]) -> list[object]:
        mark = self._enter(value)
        made: list[object] = []
        try:
            for item in value:
                made.append(self.any(item))  # noqa: PERF401 - its length is the index of a failure
        except _Refused as refused:
            refused.keys.append(f"[{len(made)}]")
            raise
        self._open.remove(mark)
        return made

    def _pairs(self, value: Mapping[object, object]) -> list[object]:
        mark = self._enter(value)
        made: list[object] = []
        for key, item in value.items():
            made.append(self._scalar(key, "key"))
            try:
                made.append(self.any(item))
            except _Refused as refused:
                plain = isinstance(key, str) and key.isidentifier()
                refused.keys.append(f".{key}" if plain else f"[{key!r}]")
                raise
        self._open.remove(mark)
        return made

    def _scalars(self, value: Iterable[object]) -> list[object]:
        # sorted, so that equal sets have equal bytes
        return sorted((self._scalar(item, "element") for item in value), key=_dump)

    def _scalar(self, value: object, what: str) -> object:
        if type(value) in self._by_type and type(value) not in _SCALARS:
            if value is not None and type(value) is not bool:
                raise _Refused(f"has the {what} {value!r:.60}, a {_name(value)} and no scalar")
            return value
        try:
            return self.any(value)
        except _Refused as refused:
            raise _Refused(f"has the {what} {value!r:.60}, which {refused}") from None


def _same(value: object) -> object:
    return value


def _tag_int(value: int) -> object:
    # beyond 64 bits in hex: Python reads decimals of 4300 digits at most
    return value if -(1 << 63) <= value < 1 << 63 else {"int": hex(value)}


def _tag_float(value: float) -> object:
    # repr is exact for what is finite, -0.0 included; JSON has no word for the rest
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _tag_str(value: str) -> object:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON would join
        return {"str": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_SCALARS: dict[type, Callable[[Any], object]] = {
    int: _tag_int,
    float: _tag_float,
    str: _tag_str,
    bytes: lambda v: {"bytes": _base64(v)},
    complex: lambda v: {"complex": struct.pack(">dd", v.real, v.imag).hex()},
}


def _tag_tensor(value: torch.Tensor, large: Large) -> object:
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise _Refused(f"is a tensor that is not plain ({value.layout}, {value.dtype})")
    if value.is_meta:
        raise _Refused("is a tensor on the meta device, without values")
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    dtype = str(plain.dtype).removeprefix("torch.")
    number = large.take(plain.nbytes, lambda: tensor_bytes(plain))
    if number is not None:
        return {"large_tensor": [dtype, list(plain.shape), number]}
    data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
    return {"tensor": [dtype, list(plain.shape), _base64(data)]}


def _tag_numpy(value: object, large: Large) -> object:
    """The last resort: a NumPy value, if NumPy is loaded at all."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        _refuse(value)
    array, scalar = type(value) is numpy.ndarray, isinstance(value, numpy.generic)
    if not array and not scalar:
        _refuse(value)
    dtype = value.dtype  # type: ignore[attr-defined]
    if dtype.kind not in _NUMPY_KINDS:
        raise _Refused(f"is a NumPy value of dtype {dtype}, which is more than its bytes")
    if array:
        number = large.take(value.nbytes, value.tobytes)  # type: ignore[attr-defined]
        if number is not None:
            return {"large_array": [dtype.str, list(value.shape), number]}  # type: ignore[attr-defined]
        return {"array": [dtype.str, list(value.shape), _base64(value.tobytes())]}  # type: ignore[attr-defined]
    zero_d = numpy.asarray(value)
    # two C types may have one size, and so one `str`: then the letter tells them apart
    name = zero_d.dtype.str if numpy.dtype(dtype.str).type is type(value) else dtype.char
    if numpy.dtype(name).type is not type(value):
        _refuse(value)
    if dtype.kind in "SU" and zero_d[()] != value:
        raise _Refused(f"is a {_name(value)} that ends in zeros, which NumPy drops")
    return {"scalar": [name, _base64(zero_d.tobytes())]}


def _refuse(value: object) -> NoReturn:
    raise _Refused(f"is a {_name(value)}, which has no exact form on disk")


def _name(value: object) -> str:
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


# ---------------------------------------------------------------------------------------- decode


def decode(
    data: bytes | bytearray | memoryview, large: Sequence[bytes | bytearray | memoryview] = ()
) -> object:
    """Read what `encode` wrote.

    Args:
        data: the bytes.
        large: bytes of the values that `Large` took.

    Raises:
        DamagedError: the bytes are not such a value.
        StateError: it holds NumPy values and NumPy is not installed.
    """
    try:
        return json.loads(
            bytes(data).decode(),
            object_hook=lambda tagged: _untag(tagged, large),
            parse_constant=_no_constant,
        )
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        struct.error,
    ) as error:
        raise DamagedError(f"extras are damaged: {error}") from error


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no tagged value")


def _untag(tagged: dict[str, Any], large: Sequence[bytes | bytearray | memoryview]) -> object:
    """Turn ``{type: content}`` back; called from the inside out, so content is done already."""
    if len(tagged) != 1:
        raise ValueError(f"{len(tagged)} tags in one value")
    ((tag, content),) = tagged.items()
    if tag in _LARGE_READERS:
        name, shape, number = content
        return _LARGE_READERS[tag](name, shape, bytearray(large[number]))
    if tag not in _READERS:
        raise ValueError(f"unknown tag {tag!r}")
    return _READERS[tag](content)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"bad base64: {error}") from error


def _dict(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _counter(flat: list[Any]) -> collections.Counter[Any]:
    return collections.Counter(_dict(flat))


def _complex(text: str) -> complex:
    real, imag = struct.unpack(">dd", bytes.fromhex(text))
    return complex(real, imag)


def _float(text: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def _tensor(content: list[Any]) -> torch.Tensor:
    name, shape, text = content
    return _tensor_of(name, shape, bytearray(_bytes(text)))


def _tensor_of(name: str, shape: list[int], data: bytearray) -> torch.Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {name} tensor of shape {shape}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape).clone()


def _array(content: list[Any]) -> Any:
    name, shape, text = content
    return _array_of(name, shape, _bytes(text))


def _array_of(name: str, shape: Sequence[int], data: bytes | bytearray) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise StateError("extras hold NumPy values and NumPy is not installed") from error
    dtype = np.dtype(str(name))
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"dtype {name!r} is not a plain one")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {name} array of shape {shape}")
    made = np.empty(shape, dtype=dtype)
    if data:
        made.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
    return made


def _scalar(content: list[Any]) -> Any:
    name, text = content
    return _array([name, (), text])[()]


_READERS: dict[str, Callable[[Any], object]] = {
    "int": lambda text: int(text, 16),
    "float": _float,
    "complex": _complex,
    "str": lambda text: _bytes(text).decode("utf-8", "surrogatepass"),
    "bytes": _bytes,
    "tuple": tuple,
    "dict": _dict,
    "ordered": lambda flat: collections.OrderedDict(_dict(flat)),
    "counter": _counter,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "tensor": _tensor,
    "array": _array,
    "scalar": _scalar,
}

_LARGE_READERS: dict[str, Callable[[str, list[int], bytearray], object]] = {
    "large_tensor": _tensor_of,
    "large_array": _array_of,
}


# ------------------------------------------------------------------------------------------- RNG


def rng_state() -> dict[str, Any]:
    """State of the global generators of this process: torch, CUDA, Python, NumPy.

    CUDA only once it is initialised, NumPy only once ``numpy.random`` is imported: what nobody
    used has no state worth keeping.
    """
    version, words, gauss = random.getstate()
    # 625 words as one tensor: as single numbers they cost 2 ms in every save.
    python = (version, torch.tensor(words, dtype=torch.int64), gauss)
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        state["numpy"] = numpy_random.get_state(legacy=False)
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back to what `rng_state` returned.

    CUDA generators that have no device here are left out, with a warning.
    """
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    cuda = state.get("cuda", [])
    devices = torch.cuda.device_count() if cuda else 0
    for device, generator in enumerate(cuda[:devices]):
        torch.cuda.set_rng_state(generator, device)
    if len(cuda) > devices:
        warnings.warn(
            f"RNG state of {len(cuda)} CUDA devices was saved, {devices} are here", stacklevel=2
        )
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])


# ---------------------------------------------------------------------------------------- extras


class Extras:
    """The user's stateful objects by name, captured and restored as one value.

    Args:
        objects: by name; each has ``state_dict()`` and ``load_state_dict()``, or is a list or
            tuple of such.
        rng: whether the global random number generators belong to it.

    Raises:
        ConfigError: a name is empty or reserved, or an object lacks a method.
    """

    def __init__(self, objects: Mapping[str, object], *, rng: bool = True) -> None:
        self._parts: dict[str, list[Any]] = {}
        self._paths: dict[str, list[str]] = {}
        self._rng = rng
        if not isinstance(objects, Mapping):
            raise ConfigError(
                f"extras={_name(objects)}: give a dict of objects by name, such as "
                '{"scheduler": scheduler}'
            )
        for name, given in objects.items():
            if type(name) is not str or name in ("", RNG):
                raise ConfigError(
                    f"extras: {name!r} cannot be a name; give a text that is neither empty nor "
                    f"{RNG!r}"
                )
            many = isinstance(given, list | tuple)
            parts = list(given) if isinstance(given, list | tuple) else [given]
            path = f"extras[{name!r}]"
            self._parts[name] = parts
            self._paths[name] = [f"{path}[{i}]" if many else path for i in range(len(parts))]
            for part, where in zip(parts, self._paths[name], strict=True):
                _check(part, where)

    def capture(self, large: Large | None = None) -> bytes:
        """The state of everything, now. What it returns shares no memory with the objects.

        Args:
            large: takes the bytes of large tensors, which may be views of the live ones.

        Raises:
            UnsupportedValue: a state holds a value that has no exact form; see `encode`.
        """
        flat: list[object] = []
        for name, parts in self._parts.items():
            states = [
                _tag(part.state_dict(), where, large)
                for part, where in zip(parts, self._paths[name], strict=True)
            ]
            flat += [_tag_str(name), states]
        if self._rng:
            flat += [RNG, [_tag(rng_state(), f"extras[{RNG!r}]")]]
        return _dump({"dict": flat})

    def check(
        self,
        data: bytes | bytearray | memoryview,
        large: Sequence[bytes | bytearray | memoryview] = (),
    ) -> None:
        """Compare names and lengths with what `capture` returned; load nothing.

        Raises:
            MismatchError: they differ.
            DamagedError: the bytes are not from `capture`.
        """
        saved = _table(data, large)
        saved.pop(RNG, None)
        self._compare(saved)

    def restore(
        self,
        data: bytes | bytearray | memoryview,
        large: Sequence[bytes | bytearray | memoryview] = (),
        *,
        strict: bool = True,
        group_orders: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """Load what `capture` returned: schedulers first, the rest in the order given, RNG last.

        Loading may itself draw random numbers, hence the RNG last. Names are compared before
        anything is loaded.

        Args:
            data: the bytes.
            large: what was taken from it at the capture.
            strict: whether the names must be the same on both sides; otherwise what is on one
                side only is left alone.
            group_orders: for the id of an optimizer, the saved index of each of its groups: what a
                scheduler keeps for each group goes with the group.

        Raises:
            MismatchError: names or the lengths of lists differ.
            StateError: an object refused its state; those before it are loaded already.
            DamagedError: the bytes are not from `capture`.
        """
        saved = _table(data, large)
        rng = saved.pop(RNG, None)
        common = [name for name in self._parts if name in saved]
        if strict:
            self._compare(saved)
        ready = [name for name in common if len(saved[name]) == len(self._parts[name])]
        ready.sort(key=lambda name: not any(map(_is_scheduler, self._parts[name])))
        for name in ready:
            for part, state, where in zip(
                self._parts[name], saved[name], self._paths[name], strict=True
            ):
                order = (group_orders or {}).get(id(getattr(part, "optimizer", None)))
                try:
                    part.load_state_dict(_reordered(state, order) if order else state)
                except Exception as error:
                    raise StateError(f"{where} does not load its state: {error}") from error
        if self._rng and rng is not None:
            set_rng_state(rng[0])

    def _compare(self, saved: Mapping[str, list[object]]) -> None:
        missing = tuple(name for name in self._parts if name not in saved)
        unexpected = tuple(name for name in saved if name not in self._parts)
        lengths = tuple(
            f"extras[{name!r}]: {len(saved[name])} saved, {len(self._parts[name])} here"
            for name in self._parts
            if name in saved and len(saved[name]) != len(self._parts[name])
        )
        if missing or unexpected or lengths:
            raise MismatchError(
                f"extras differ: not in the checkpoint {list(missing)}, not here"
                f" {list(unexpected)}, of other lengths {list(lengths)}; give the extras"
                " that were saved, or restore(strict=False) for those that both have",
                missing=missing,
                unexpected=unexpected,
                differing=lengths,
            )


def _table(
    data: bytes | bytearray | memoryview, large: Sequence[bytes | bytearray | memoryview]
) -> dict[str, list[Any]]:
    saved = decode(data, large)
    if not isinstance(saved, dict) or not all(isinstance(v, list) for v in saved.values()):
        raise DamagedError("extras are damaged: not a table of states")
    return saved


def _check(part: object, where: str) -> None:
    for method in ("state_dict", "load_state_dict"):
        if isinstance(part, type) or not callable(getattr(part, method, None)):
            kind = f"the class {part.__name__}" if isinstance(part, type) else _name(part)
            raise ConfigError(
                f"{where} ({kind}) has no {method}(); an extra is an object with state_dict()"
                " and load_state_dict(), or a list of such"
            )


def _reordered(state: Any, order: Sequence[int]) -> Any:
    """A scheduler's state with its lists of one value for each group in the order of the groups."""
    if not isinstance(state, dict):
        return state
    changed = dict(state)
    for key, value in state.items():
        if key in _BY_GROUP and isinstance(value, list) and len(value) == len(order):
            changed[key] = [value[i] for i in order]
        elif key == "_schedulers":  # of ChainedScheduler and SequentialLR
            changed[key] = [_reordered(inner, order) for inner in value]
    return changed


def _is_scheduler(part: object) -> bool:
    scheduler = torch.optim.lr_scheduler.LRScheduler
    return isinstance(part, scheduler) or "scheduler" in type(part).__name__.lower()
