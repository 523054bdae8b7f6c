"""Fitted scikit-learn estimators as JSON and bytes, without pickle.

The JSON describes how to rebuild the objects, and the bytes are those of all arrays. The data name
no functions: an object is created from its class and then given its attributes. The allowed classes
are defined by this code and by the estimator itself, not by the file (see ``_estimator_types``)."""

from __future__ import annotations

import copyreg
import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from sklearn.utils import check_array

from thrifty.core import CheckpointError, TaskError, error_text, plain_text

from ._estimator_types import CALLED, KnownTypes, RefusedTypeError, check_native


FORMAT = 2
"""Version of the format, raised when earlier states become unreadable."""

_NEW = vars(copyreg)["__newobj__"]
"""The function that ``__reduce_ex__`` returns for an object created without arguments."""
_PLAIN = (bool, int, str, type(None))
_SPARSE = ("csr_matrix", "csc_matrix", "csr_array", "csc_array")
_STREAMS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_SEQUENCES: Mapping[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}

Node = Any
"""A value in JSON: a plain value, or a dict whose ``is`` names its kind."""


class EstimatorState:
    """Converts fitted estimators to plain values and back.

    Args:
        kinds: The classes of the estimators, and of those within them.

    >>> from sklearn.linear_model import SGDClassifier
    >>> codec = EstimatorState([SGDClassifier])
    >>> codec.read(codec.write([SGDClassifier(alpha=0.5)]))[0].alpha
    0.5
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._types = KnownTypes(kinds)

    def write(self, estimators: list[Any]) -> dict[str, Any]:
        """Return the state of fitted estimators: plain values and a tensor.

        Raises:
            TaskError: The state contains something that cannot be written or read back.
        """
        writer = _Writer(self._types)
        try:
            tree = json.dumps([writer.node(each) for each in estimators])
        except Exception as error:
            names = ", ".join(sorted({type(each).__name__ for each in estimators}))
            raise TaskError(f"the state of {names} cannot be kept: {error_text(error)}") from error
        data = torch.frombuffer(writer.data or bytearray(1), dtype=torch.uint8)
        return {"format": FORMAT, "tree": tree, "data": data}

    def read(self, state: Mapping[str, Any]) -> list[Any]:
        """Return the estimators that ``write`` took.

        Raises:
            CheckpointError: The state is something else, or another version wrote it.
        """
        try:
            if state["format"] != FORMAT:
                raise ValueError(f"its format is {plain_text(state['format'])}, not {FORMAT}")
            nodes = json.loads(state["tree"])
            if not isinstance(nodes, list):
                raise ValueError("it must be a list")
            reader = _Reader(self._types, state["data"].numpy().tobytes())
            with warnings.catch_warnings():
                # A warning means another version of scikit-learn, whose state must not be resumed.
                warnings.simplefilter("error")
                return [reader.value(node) for node in nodes]
        except Exception as error:
            raise CheckpointError(
                f"this is not the state of an estimator: {error_text(error)}"
            ) from error


def classes_in(*estimators: Any) -> set[type]:
    """Return the classes of estimators and of those within them, by their parameters."""
    kinds: set[type] = set()
    found = list(estimators)
    while found:
        one = found.pop()
        if hasattr(one, "get_params") and not isinstance(one, type):
            kinds.add(type(one))
            found.extend(one.get_params(deep=True).values())
        elif isinstance(one, list | tuple):
            found.extend(one)
    return kinds


class _Writer:
    """Converts values to nodes.

    A value that occurs twice is written once, so that it is a single object again after reading.
    """

    def __init__(self, types: KnownTypes) -> None:
        self.data = bytearray()
        self._types = types
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        """Numbered values, kept alive so that no other value gets the id of one of them."""

    def node(self, value: Any) -> Node:
        """Return the node of any value."""
        if type(value) in _PLAIN:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"is": "float", "text": repr(value)}
        if isinstance(value, np.generic):
            return {"is": "scalar", **self._array(np.asarray(value))}
        if isinstance(value, type):
            return {"is": "type", "of": self._types.name_of_value(value)}
        if id(value) in self._numbers:
            return {"is": "again", "number": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._alive)
        self._alive.append(value)
        return {"number": number, **self._composite(value)}

    def _composite(self, value: Any) -> dict[str, Node]:
        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            return {"is": kind.__name__, "items": [self.node(each) for each in value]}
        if kind is dict:
            pairs = [[self.node(key), self.node(each)] for key, each in value.items()]
            return {"is": "dict", "items": pairs}
        if kind in (bytes, complex, slice, range, np.dtype) or isinstance(value, np.dtype):
            return _small(value)
        if isinstance(value, np.ndarray):
            return self._ndarray(value)
        if kind in (np.random.RandomState, np.random.Generator, np.random.SeedSequence):
            return self._random(value)
        if scipy.sparse.issparse(value):
            return self._sparse(value)
        if kind is functools.partial and value.func is check_array and not value.args:
            # Gradient boosting with categories keeps one.
            return {"is": "check array", "options": self.node(dict(value.keywords))}
        return self._object(value)

    def _ndarray(self, value: np.ndarray) -> dict[str, Node]:
        if type(value) not in (np.ndarray, np.memmap):
            raise RefusedTypeError(type(value))
        if value.dtype.hasobject:
            if value.dtype != object:
                raise TypeError("an array with objects among other fields")
            items = [self.node(each) for each in value.ravel()]
            return {"is": "objects", "shape": list(value.shape), "items": items}
        return {"is": "array", **self._array(value)}

    def _array(self, value: np.ndarray) -> dict[str, Node]:
        order: Literal["C", "F"]
        order = "C" if value.flags.c_contiguous or not value.flags.f_contiguous else "F"
        begin = len(self.data)
        if value.dtype.names is not None:
            value = _without_gaps(value)
        self.data += value.tobytes(order=order)
        return {
            "dtype": _dtype_node(value.dtype),
            "shape": list(value.shape),
            "order": order,
            "begin": begin,
        }

    def _random(self, value: Any) -> dict[str, Node]:
        if isinstance(value, np.random.SeedSequence):
            return {"is": "seeds", "state": self.node(dict(value.state))}
        if isinstance(value, np.random.RandomState):
            state: Any = value.get_state(legacy=False)
            return {"is": "random state", "state": self.node(state)}
        stream = value.bit_generator
        seeds = getattr(stream, "seed_seq", None)
        return {
            "is": "generator",
            "state": self.node(stream.state),
            "seeds": self.node(seeds if isinstance(seeds, np.random.SeedSequence) else None),
        }

    def _sparse(self, value: Any) -> dict[str, Node]:
        name = type(value).__name__
        if name not in _SPARSE or type(value) is not getattr(scipy.sparse, name):
            raise RefusedTypeError(type(value))
        parts = [self.node(part) for part in (value.data, value.indices, value.indptr)]
        return {"is": "sparse", "of": name, "shape": list(value.shape), "parts": parts}

    def _object(self, value: Any) -> dict[str, Node]:
        """Write an object by its class and the attributes that ``__reduce_ex__`` returns."""
        name = self._types.name_of(type(value))
        made: Any = value.__reduce_ex__(4)
        if isinstance(made, str) or any(part is not None for part in made[3:5]):
            raise RefusedTypeError(type(value))
        state = made[2] if len(made) > 2 else None
        if name in CALLED:
            # An extension class: `class(*arguments)`, or its own function and no state.
            arguments = made[1] if made[0] is type(value) else ()
            return {
                "is": "called",
                "of": name,
                "arguments": [self.node(each) for each in arguments],
                "state": self.node(state),
            }
        if made[0] is not _NEW or made[1] != (type(value),):
            raise RefusedTypeError(type(value))
        return {"is": "object", "of": name, "state": self.node(state)}


class _Reader:
    """Converts nodes to values."""

    def __init__(self, types: KnownTypes, data: bytes) -> None:
        self._types = types
        self._data = data
        self._values: dict[int, Any] = {}
        self._make: Mapping[str, Callable[[Mapping[str, Node]], Any]] = {
            "float": lambda node: float(_text(node["text"])),
            "scalar": lambda node: self._array(node)[()],
            "type": lambda node: self._types.value_of(_text(node["of"])),
            "again": lambda node: self._values[node["number"]],
            "list": self._list,
            "dict": self._dict,
            "small": _read_small,
            "array": self._array,
            "objects": self._objects,
            "seeds": self._seeds,
            "random state": self._random_state,
            "generator": self._generator,
            "sparse": self._sparse,
            "check array": self._check_array,
            "object": self._object,
            "called": self._called,
            **dict.fromkeys(_SEQUENCES, self._sequence),
        }

    def value(self, node: Node) -> Any:
        """Return the value of any node."""
        if type(node) in (*_PLAIN, float):
            return node
        made = self._make[node["is"]](node)
        if "number" in node and node["is"] != "again":
            self._values[node["number"]] = made
        return made

    def _list(self, node: Mapping[str, Node]) -> Any:
        made: list[Any] = []
        self._values[node["number"]] = made
        made.extend(self.value(each) for each in node["items"])
        return made

    def _dict(self, node: Mapping[str, Node]) -> Any:
        made: dict[Any, Any] = {}
        self._values[node["number"]] = made
        made.update((self.value(key), self.value(each)) for key, each in node["items"])
        return made

    def _sequence(self, node: Mapping[str, Node]) -> Any:
        return _SEQUENCES[node["is"]](self.value(each) for each in node["items"])

    def _array(self, node: Mapping[str, Node]) -> np.ndarray:
        dtype, shape = _dtype_of(node["dtype"]), _shape(node["shape"])
        num = math.prod(shape)
        if num * dtype.itemsize > len(self._data):
            raise ValueError("an array that is larger than all data")
        flat = np.frombuffer(self._data, dtype, count=num, offset=int(node["begin"]))
        return flat.reshape(shape, order="F" if node["order"] == "F" else "C").copy(order="K")

    def _objects(self, node: Mapping[str, Node]) -> Any:
        made = np.empty(len(node["items"]), dtype=object)
        for place, each in enumerate(node["items"]):
            made[place] = self.value(each)
        return made.reshape(_shape(node["shape"]))

    def _seeds(self, node: Mapping[str, Node]) -> Any:
        return np.random.SeedSequence(**self.value(node["state"]))

    def _random_state(self, node: Mapping[str, Node]) -> Any:
        state = self.value(node["state"])
        made = np.random.RandomState(_stream(state["bit_generator"], None))
        made.set_state(state)
        return made

    def _generator(self, node: Mapping[str, Node]) -> Any:
        state, seeds = self.value(node["state"]), self.value(node["seeds"])
        if seeds is not None and not isinstance(seeds, np.random.SeedSequence):
            raise TypeError("no seeds")
        stream = _stream(state["bit_generator"], seeds)
        stream.state = state
        return np.random.Generator(stream)

    def _sparse(self, node: Mapping[str, Node]) -> Any:
        if node["of"] not in _SPARSE:
            raise ValueError(f"no sparse matrix: {plain_text(node['of'])}")
        parts = tuple(self.value(part) for part in node["parts"])
        made = getattr(scipy.sparse, node["of"])(parts, shape=_shape(node["shape"]))
        made.check_format(full_check=True)  # an index out of range would read arbitrary memory
        return made

    def _check_array(self, node: Mapping[str, Node]) -> Any:
        return functools.partial(check_array, **self.value(node["options"]))

    def _object(self, node: Mapping[str, Node]) -> Any:
        name = _text(node["of"])
        if name in CALLED:
            raise RefusedTypeError(name)
        kind = self._types.find(name)
        made = kind.__new__(kind)
        self._values[node["number"]] = made
        state = self.value(node["state"])
        check_native(name, (), state)
        _set_state(made, state)
        return made

    def _called(self, node: Mapping[str, Node]) -> Any:
        name = _text(node["of"])
        if name not in CALLED:
            raise RefusedTypeError(name)
        arguments = [self.value(each) for each in node["arguments"]]
        state = self.value(node["state"])
        check_native(name, arguments, state)
        made = self._types.find(name)(*arguments)
        _set_state(made, state)
        return made


def _without_gaps(value: np.ndarray) -> np.ndarray:
    """Return a copy with zeros in the padding between its fields.

    Padding may contain anything; with zeros, equal states have equal bytes.
    """
    out = np.zeros(value.shape, value.dtype, order="C" if value.flags.c_contiguous else "F")
    for name in value.dtype.names or ():
        out[name] = value[name]
    return out


def _set_state(made: Any, state: Any) -> None:
    """Set an object's attributes, as copying does."""
    if state is None:
        return
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    # The state of a class with slots is a pair: attributes and slots.
    parts = state if isinstance(state, tuple) else (state,)
    for part in parts:
        for name, value in (part or {}).items():
            object.__setattr__(made, _text(name), value)


def _small(value: Any) -> dict[str, Node]:
    if isinstance(value, bytes):
        return {"is": "small", "of": "bytes", "parts": [value.hex()]}
    if isinstance(value, complex):
        return {"is": "small", "of": "complex", "parts": [repr(value.real), repr(value.imag)]}
    if isinstance(value, np.dtype):
        return {"is": "small", "of": "dtype", "parts": [_dtype_node(value)]}
    parts = [value.start, value.stop, value.step]
    if not all(part is None or isinstance(part, int) for part in parts):
        raise TypeError(f"a {type(value).__name__} of other things than integers")
    return {"is": "small", "of": type(value).__name__, "parts": parts}


def _read_small(node: Mapping[str, Node]) -> Any:
    parts = node["parts"]
    made: Mapping[str, Callable[[], Any]] = {
        "bytes": lambda: bytes.fromhex(parts[0]),
        "complex": lambda: complex(float(parts[0]), float(parts[1])),
        "dtype": lambda: _dtype_of(parts[0]),
        "slice": lambda: slice(*parts),
        "range": lambda: range(*parts),
    }
    return made[node["of"]]()


def _stream(name: object, seeds: np.random.SeedSequence | None) -> Any:
    if name not in _STREAMS:
        raise ValueError(f"no stream of random numbers: {plain_text(name)}")
    return getattr(np.random, str(name))(seeds)


def _dtype_node(dtype: np.dtype) -> Node:
    if dtype.hasobject:
        raise TypeError(f"a type with objects: {dtype}")
    if dtype.names is None:
        if dtype.subdtype is not None:
            base, shape = dtype.subdtype
            return {"base": _dtype_node(base), "shape": list(shape)}
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields else []
    return {
        "names": list(dtype.names),
        "formats": [_dtype_node(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _dtype_of(node: Node) -> np.dtype:
    if isinstance(node, str):
        dtype = np.dtype(node)
    elif "base" in node:
        dtype = np.dtype((_dtype_of(node["base"]), _shape(node["shape"])))
    else:
        fields: Any = {**node, "formats": [_dtype_of(each) for each in node["formats"]]}
        dtype = np.dtype(fields)
    if dtype.hasobject:
        raise TypeError("an array of addresses")
    return dtype


def _shape(node: Node) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in node):
        raise ValueError("an invalid shape of an array")
    return tuple(node)


def _text(node: Node) -> str:
    if not isinstance(node, str):
        raise TypeError("no name")
    return node
