"""The objects of a training function whose state is kept between epochs."""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader, Sampler

from thrifty.core import TaskError, error_text
from thrifty.pack._frozen import checksums
from thrifty.pack.identity._arrays import parts_of
from thrifty.pack.trial._left_gradients import is_dense, is_used, is_zero
from thrifty.pack.trial._networks import NetworkFlags

from ._used_gradients import UsedGradient


_WHOLE = "state"
"""The key of a single object that was given instead of a dict."""


class Kept:
    """What a function has given to ``trial.epochs``, with one state for all of it.

    Objects with ``state_dict`` and ``load_state_dict`` keep their state, as do generators of torch,
    NumPy and Python, and estimators of scikit-learn. Of a network, that includes which parameters
    are trained, which parts are in training mode, and gradients that no optimizer has used yet.
    Anything else is a plain value (number, text, tensor, list or dict). Values that can change get
    their state in place, others are replaced in the dict.

    Args:
        given: One object, or a dict of objects and plain values; None for nothing.
        keep_gradients: Whether gradients that an optimizer has used are part of the state, too.

    Raises:
        TaskError: It is neither, or one in it cannot be kept.
    """

    def __init__(self, given: Any, *, keep_gradients: bool = False) -> None:
        self._keep_gradients = keep_gradients
        self._reads: list[str] = []
        """Messages about used gradients that the loop has read."""
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            if not _is_object(given):
                raise TaskError(
                    f"trial.epochs() got {_kind(given)}; give a dict such as "
                    '{"model": model, "optimizer": optimizer}'
                )
            given = {_WHOLE: given}
        for name, value in given.items():
            if not isinstance(name, str):
                raise TaskError(f"trial.epochs(): the key {name!r} is no text; name what it is")
            if not _is_object(value) and not _is_plain(value):
                give = (
                    "give an object with state_dict and load_state_dict, a generator, an estimator "
                    "of scikit-learn, or numbers, texts, tensors, lists and dicts"
                )
                if isinstance(value, DataLoader | Sampler | Iterator):
                    give = how_to_keep(name, value)
                raise TaskError(
                    f"trial.epochs(): {name!r} is {_kind(value)}, whose state cannot be kept; "
                    f"{give}"
                )
        self._given: Mapping[str, Any] = given
        self._objects = {name: value for name, value in given.items() if _is_object(value)}
        self._names = set(given)

    @property
    def values(self) -> Mapping[str | None, Any]:
        """All objects and values by their names, and under None the dict that holds them."""
        found: dict[str | None, Any] = {None: self._given}
        found.update(self._given)
        return found

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The networks."""
        return [each for each in self._objects.values() if isinstance(each, torch.nn.Module)]

    @property
    def model(self) -> torch.nn.Module | None:
        """The network: what is called ``model``, or the only module."""
        if isinstance(self._given.get("model"), torch.nn.Module):
            return self._given["model"]  # type: ignore[no-any-return]
        return self.modules[0] if len(self.modules) == 1 else None

    def check(self) -> None:
        """Make certain that the dict still holds what it held at first, and no more is needed.

        Raises:
            TaskError: It has other keys, or another object under a key, or the loop has read
                gradients that are not in the state.
        """
        if self._reads:
            raise TaskError(self._reads[0])
        if set(self._given) != self._names:
            raise TaskError(
                f"the dict that trial.epochs() got had {_listed(self._names)}, and has "
                f"{_listed(self._given)} now; put everything into it before the loop (None stands "
                "for a value that comes later)"
            )
        for name, value in self._objects.items():
            if self._given[name] is not value:
                raise TaskError(
                    f"{name!r} in the dict that trial.epochs() got is another object now; change "
                    "it in place, such as with load_state_dict"
                )
        self._check_memory()

    def _check_memory(self) -> None:
        """Check that no value lies in the memory of another object.

        Each gets its own state back, so the two would part. Networks may have parameters and
        buffers in common: each loads equal values into the same tensor.

        Raises:
            TaskError: A tensor does.
        """
        owners: dict[int, str] = {}
        in_networks: dict[int, int] = {}
        for name, value in self._given.items():
            is_network = isinstance(value, torch.nn.Module)
            held = value.state_dict(keep_vars=True) if is_network else value
            for tensor in _tensors_in(held):
                at = tensor.untyped_storage().data_ptr()
                owner = owners.setdefault(at, name)
                is_same = is_network and in_networks.setdefault(at, id(tensor)) == id(tensor)
                if at and owner != name and not is_same:
                    raise TaskError(
                        f"trial.epochs(): {name!r} has a tensor in the memory of {owner!r}, and "
                        "changes with it; keep a copy, such as "
                        "{k: v.clone() for k, v in model.state_dict().items()}"
                    )

    def state(self) -> dict[str, Any]:
        """Return the state of all objects, of tensors and plain values; values are copied."""
        return {name: self._state_of(value) for name, value in self._given.items()}

    def _state_of(self, value: Any) -> Any:
        found = _state_of(value)
        if isinstance(value, torch.nn.Module):
            found |= self._gradients_of(value.named_parameters())
        elif flags := self._flags_in(value):
            gradients = self._gradients_of(flags.parameters())
            found = {_OBJECT: found, _FLAGS: {**flags.flags(), **gradients}}
        return _storable(found)

    def _flags_in(self, value: Any) -> NetworkFlags | None:
        """Return the networks that an object of the user's own holds beside the other values."""
        if not _is_holder(value):
            return None
        flags = NetworkFlags({"": value})
        known = {
            id(part) for each in self.modules for part in (*each.modules(), *each.parameters())
        }
        flags.leave_out(known | {id(tensor) for _, tensor in self._tensors()})
        return flags if flags.modules or flags.tensors else None

    def held(self) -> list[Any]:
        """Return networks, tensors and optimizers within objects of the user's own."""
        found: list[Any] = []
        for value in filter(_is_holder, self._objects.values()):
            flags = NetworkFlags({"": value})
            found += [*(part for _, part in flags.parts()), *flags.tensors.values(), *flags.others]
        return found

    def gradients(self) -> dict[str, Any]:
        """Return the gradients of tensors that are plain values, by the names of the tensors."""
        return self._gradients_of(self._tensors())

    def _gradients_of(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Return the gradients that no optimizer has used, and the names of the others."""
        left, zero, used = {}, [], {}
        for name, parameter in named:
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, UsedGradient):
                used[name] = gradient.was_sparse
            elif _is_used(gradient) and not self._keep_gradients:
                used[name] = not is_dense(gradient)
            elif is_zero(gradient):
                if is_dense(gradient):
                    zero.append(name)
            else:
                left[name] = gradient
        # Earlier databases call zeros "used".
        found = {"gradients": left, "used": zero, "used_values": used}
        return {key: each for key, each in found.items() if each}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors among plain values that may have gradients, by name."""
        plain = {n: v for n, v in self._given.items() if n not in self._objects}
        for name, tensor in _named_tensors_in(plain):
            if tensor.is_leaf:
                yield name, tensor

    def load(self, state: Mapping[str, Any], gradients: Mapping[str, Any] | None = None) -> None:
        """Give all objects the state that ``state`` has returned, also in another process.

        Args:
            state: The state.
            gradients: What ``gradients`` has returned.

        Raises:
            TaskError: There are other objects now, or one does not take its state.
        """
        if state.keys() != self._given.keys():
            raise TaskError(
                f"trial.epochs() got {_listed(self._given)}, and the kept state has "
                f"{_listed(state)}; give the same each time"
            )
        with _shared_as_before(self._objects.values()):
            self._load_values(state)
        self._load_gradients(self._tensors(), gradients or {})

    def _load_values(self, state: Mapping[str, Any]) -> None:
        for name, value in self._given.items():
            flags = None
            try:
                found = _as_it_was(state[name])
                if type(found) is dict and found.keys() == {_OBJECT, _FLAGS}:
                    found, flags = found[_OBJECT], found[_FLAGS]
                is_loaded = _load_into(value, found)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise TaskError(
                    f"trial.epochs(): {name!r} does not take the state that it had "
                    f"({error_text(error)}); what is made before the loop must be the same each "
                    "time"
                ) from error
            if is_loaded:
                if isinstance(value, torch.nn.Module):
                    self._load_gradients(value.named_parameters(), found, of=name)
                elif flags is not None and (networks := self._flags_in(value)):
                    networks.load_flags(flags)
                    self._load_gradients(networks.parameters(), flags, of=name)
                continue
            if not isinstance(self._given, MutableMapping):
                raise TaskError(f"trial.epochs(): {name!r} is in a mapping that cannot change")
            self._given[name] = found

    def _load_gradients(
        self, named: Iterable[tuple[str, torch.Tensor]], state: Mapping[str, Any], *, of: str = ""
    ) -> None:
        """Give parameters the gradients that ``_gradients_of`` has returned."""
        left, used = state.get("gradients", {}), state.get("used_values", {})
        for name, parameter in named:
            held = left.get(name)
            parameter.grad = None if held is None else held.to(parameter.device, copy=True)
            if name in state.get("used", ()):
                parameter.grad = torch.zeros_like(parameter)
            elif name in used:
                whole = f"{of}.{name}" if of else name
                parameter.grad = self._unread(parameter, whole, is_sparse=used[name])

    def clear_gradients(self) -> None:
        """Forget the values of the gradients that optimizers have used: they are not in the state.

        A loop that reads them is refused. They do not become None: a loop may set them to zero,
        and with momentum, a gradient of zero still moves a weight.
        """
        for name, parameter in self._parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if _is_used(gradient) and not self._keep_gradients:
                is_sparse = not is_dense(gradient)
                parameter.grad = self._unread(parameter, name, is_sparse=is_sparse)
            elif not is_dense(gradient) and is_zero(gradient):
                parameter.grad = None  # it is not in the state

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors that may have gradients, by name."""
        for name, value in self._objects.items():
            if isinstance(value, torch.nn.Module):
                for path, parameter in value.named_parameters():
                    yield f"{name}.{path}", parameter
            elif flags := self._flags_in(value):
                yield from ((f"{name}.{path}", each) for path, each in flags.parameters())
        yield from self._tensors()

    def _unread(
        self, parameter: torch.Tensor, name: str, *, is_sparse: bool
    ) -> torch.Tensor | None:
        """Return what stands in for a gradient that an optimizer has used."""
        if is_traceable_wrapper_subclass(parameter):  # such as a part of a sharded parameter
            return None if is_sparse else torch.zeros_like(parameter)
        return UsedGradient(parameter, name=name, is_sparse=is_sparse, reads=self._reads)

    def marks(self) -> tuple[Any, ...]:
        """Return numbers and texts that change with nearly any change of the state."""
        return tuple(_marks([self.state(), self.gradients()]))


def _is_used(gradient: torch.Tensor) -> bool:
    """Return whether an optimizer has used a gradient, in this epoch, and it is as it was then."""
    return not isinstance(gradient, UsedGradient) and is_used(gradient)


def how_to_keep(name: str, value: Any) -> str:
    """Return what to do with a variable that a loop changes, as a sentence that works as it stands.

    Args:
        name: The variable.
        value: Its value.
    """
    if isinstance(value, torch.nn.Module):
        return (
            f"Put it into the dict that trial.epochs() gets, as {name!r}: {name}, and what changes "
            "in it into buffers (register_buffer)"
        )
    if isinstance(value, DataLoader):
        if isinstance(value.generator, torch.Generator):
            return (
                "A loader has no state that can be kept, but its generator has: put "
                f'"{name}_generator": {name}.generator into the dict that trial.epochs() gets'
            )
        without = " without persistent_workers" if value.persistent_workers else ""
        return f"A loader has no state that can be kept: make it in each epoch{without}"
    if isinstance(value, Sampler):
        return "A sampler has no state that can be kept: make it and its loader in each epoch"
    if isinstance(value, Iterator):
        return "An iterator has no state that can be kept: begin it in each epoch"
    if _is_object(value) or _is_plain(value):
        return f"Keep it in the dict that trial.epochs() gets, as state[{name!r}]"
    if isinstance(value, type | FunctionType | MethodType | partial):
        return "Keep the values that it changes in the dict that trial.epochs() gets"
    return (
        f"{type(value).__name__} has no state that can be kept: make it a torch.nn.Module with "
        "what changes in buffers (register_buffer), or give it state_dict() and load_state_dict(), "
        f"and put {name!r}: {name} into the dict that trial.epochs() gets"
    )


def _is_object(value: Any) -> bool:
    streams = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
    if isinstance(value, streams) or _is_estimator(value):
        return True
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_holder(value: Any) -> bool:
    """Return whether an object has a state of its own, and may hold networks."""
    if not _is_object(value) or _is_estimator(value):
        return False
    streams = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
    return not isinstance(value, streams | torch.nn.Module | torch.optim.Optimizer)


def content_mark(value: Any) -> str:
    """Return a text that tells the state of an object, the same in all processes."""
    marks = list(_marks(_storable(_state_of(value))))
    return hashlib.sha256(repr(marks).encode()).hexdigest()


def _is_estimator(value: Any) -> bool:
    sklearn = sys.modules.get("sklearn.base")  # an estimator has imported it
    return sklearn is not None and isinstance(value, sklearn.BaseEstimator)


def _codec(estimator: Any) -> Any:
    state = import_module("thrifty.integrations.sklearn._estimator_state")
    return state.EstimatorState(state.classes_in(estimator))


def _is_plain(value: Any) -> bool:
    # other kinds of dicts and tuples would come back as plain ones
    if type(value) in (dict, OrderedDict):
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype in _DTYPES
    plain = bool | int | float | str | torch.Tensor
    return value is None or isinstance(value, plain)


_DTYPES = frozenset(
    map(np.dtype, ("b", "h", "i", "l", "B", "H", "I", "L", "e", "f", "d", "?", "q", "Q"))
)
"""Types of numbers that tensors have, too."""


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return {
            "values": value.state_dict(),
            "frozen": [name for name, p in value.named_parameters() if not p.requires_grad],
            "evaluating": [name for name, part in value.named_modules() if not part.training],
        }
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return copy.deepcopy(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        version, numbers, gauss = value.getstate()
        return [version, list(numbers), gauss]
    if _is_estimator(value):
        return _codec(value).write([value])
    if inner_optimizers(value):
        return _of_wrapper(value)
    return value.state_dict() if _is_object(value) else _copied(value)


def inner_optimizers(value: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers that an optimizer wraps, by attribute, as those of SAM do."""
    if not isinstance(value, torch.optim.Optimizer):
        return {}
    return {n: v for n, v in vars(value).items() if isinstance(v, torch.optim.Optimizer)}


def _of_wrapper(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer, and of those that it wraps unless they share it."""
    inner = {
        name: None if each.state is optimizer.state else each.state_dict()
        for name, each in inner_optimizers(optimizer).items()
    }
    return {_OUTER: optimizer.state_dict(), _INNER: inner}


def _load_wrapper(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what ``_of_wrapper`` has returned."""
    optimizer.load_state_dict(state[_OUTER])
    for name, each in inner_optimizers(optimizer).items():
        held = state[_INNER].get(name)
        if held is not None:
            each.load_state_dict(held)


@contextmanager
def _shared_as_before(values: Iterable[Any]) -> Iterator[None]:
    """Let optimizers share with those that they wrap what they share now; loading gives copies."""
    shared = [
        (outer, inner, key)
        for outer in values
        for inner in inner_optimizers(outer).values()
        for key in ("state", "param_groups")
        if getattr(inner, key) is getattr(outer, key)
    ]
    yield
    for outer, inner, key in shared:
        setattr(inner, key, getattr(outer, key))


_OUTER, _INNER = "an optimizer", "wrapped optimizers"
_OBJECT, _FLAGS = "an object", "flags of networks"


def _copied(value: Any) -> Any:
    """Return a deep copy, in which tensors that training has computed have no graph."""
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        return value.detach().clone()
    if isinstance(value, torch.Tensor) and value.grad is not None:  # kept apart
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


def _named_tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a plain value, each with a name such as ``w['a'][0]``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named_tensors_in(each, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _named_tensors_in(each, f"{name}[{number}]")


_ARRAY, _NUMBER, _TUPLE = "an array of NumPy", "a number of NumPy", "a tuple"
"""Keys that stand for what a checkpoint cannot hold as it is."""


def _storable(value: Any) -> Any:
    """Return a value with tensors for arrays and lists for tuples, marked as such."""
    if isinstance(value, np.generic):
        is_number = value.dtype in _DTYPES
        return {_NUMBER: torch.from_numpy(np.array(value))} if is_number else value.item()
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value.copy())}
    if isinstance(value, tuple) and type(value) is tuple:
        return {_TUPLE: [_storable(each) for each in value]}
    if isinstance(value, list):
        return [_storable(each) for each in value]
    if type(value) is dict:
        return {key: _storable(each) for key, each in value.items()}
    return value


def _as_it_was(value: Any) -> Any:
    """Return what ``_storable`` was given."""
    if isinstance(value, list):
        return [_as_it_was(each) for each in value]
    if type(value) is not dict:
        return value
    if value.keys() == {_ARRAY}:
        return value[_ARRAY].numpy()
    if value.keys() == {_NUMBER}:
        return value[_NUMBER].numpy()[()]
    found = {key: _as_it_was(each) for key, each in value.items()}
    return tuple(found[_TUPLE]) if found.keys() == {_TUPLE} else found


def _load_into(value: Any, state: Any) -> bool:
    """Give an object its state in place; return False if it cannot change."""
    if isinstance(value, torch.nn.Module):
        _load_module(value, state)
    elif isinstance(value, torch.Generator):
        value.set_state(state.cpu())
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, random.Random):
        version, numbers, gauss = state
        value.setstate((version, tuple(numbers), gauss))
    elif _is_estimator(value):
        (found,) = _codec(value).read(state)
        vars(value).clear()
        vars(value).update(vars(found))
    elif isinstance(value, torch.optim.Optimizer) and _INNER in state:
        _load_wrapper(value, state)
    elif _is_object(value):
        value.load_state_dict(state)
    else:
        return _filled(value, state)
    return True


def _load_module(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    module.load_state_dict(state["values"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])
    for name, part in module.named_modules():
        part.training = name not in state["evaluating"]


def _filled(value: Any, state: Any) -> bool:
    """Replace the contents of a plain value, so that other names of it see them."""
    if isinstance(value, torch.Tensor) and isinstance(state, torch.Tensor):
        if (value.shape, value.dtype) != (state.shape, state.dtype):
            return False
        with torch.no_grad():
            value.copy_(state)
        return True
    if isinstance(value, np.ndarray) and isinstance(state, np.ndarray):
        if (value.shape, value.dtype) != (state.shape, state.dtype):
            return False
        value[...] = state
        return True
    if isinstance(value, list) and isinstance(state, list):
        value[:] = state
        return True
    if isinstance(value, MutableMapping) and isinstance(state, Mapping):
        value.clear()
        value.update(state)
        return True
    return False


def _marks(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield (*value.shape, str(value.dtype))
        for part in parts_of(value):
            yield tuple(checksums(part.detach().contiguous()).tolist())
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _marks(each)
    elif isinstance(value, list | tuple):
        yield len(value)
        for each in value:
            yield from _marks(each)
    else:
        yield type(value), repr(value)
