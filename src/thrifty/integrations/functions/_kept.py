"""The objects of a training function whose state is kept between epochs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError
from thrifty.pack._frozen import checksums


_WHOLE = "state"
"""The key of a single object that was given instead of a dict."""


class Kept:
    """What a function has given to ``trial.epochs``, with one state for all of it.

    Objects with ``state_dict`` and ``load_state_dict`` keep their state, as do generators of torch
    and NumPy. Anything else is a plain value (number, text, tensor, list or dict), which is
    replaced in the dict.

    Args:
        given: One object, or a dict of objects and plain values; None for nothing.

    Raises:
        TaskError: It is neither, or one in it cannot be kept.
    """

    def __init__(self, given: Any) -> None:
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
                raise TaskError(
                    f"trial.epochs(): {name!r} is {_kind(value)}, whose state cannot be kept; give "
                    "an object with state_dict and load_state_dict, a generator, or numbers, "
                    "texts, tensors, lists and dicts"
                )
        self._given: Mapping[str, Any] = given

    @property
    def model(self) -> torch.nn.Module | None:
        """The network: what is called ``model``, or the only module."""
        if isinstance(self._given.get("model"), torch.nn.Module):
            return self._given["model"]  # type: ignore[no-any-return]
        found = [each for each in self._given.values() if isinstance(each, torch.nn.Module)]
        return found[0] if len(found) == 1 else None

    def state(self) -> dict[str, Any]:
        """Return the state of all objects; plain values are copied."""
        return {name: _state_of(value) for name, value in self._given.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Give all objects the state that ``state`` has returned, also in another process.

        Raises:
            TaskError: There are other objects now.
        """
        if state.keys() != self._given.keys():
            raise TaskError(
                f"trial.epochs() got {', '.join(sorted(self._given)) or 'nothing'}, and the kept "
                f"state has {', '.join(sorted(state)) or 'nothing'}; give the same each time"
            )
        for name, value in self._given.items():
            if not _load_into(value, state[name]):
                if not isinstance(self._given, MutableMapping):
                    raise TaskError(f"trial.epochs(): {name!r} is in a mapping that cannot change")
                self._given[name] = state[name]

    def marks(self) -> tuple[Any, ...]:
        """Return numbers and texts that change with nearly any change of the state."""
        return tuple(_marks(self.state()))


def _is_object(value: Any) -> bool:
    if isinstance(value, torch.Generator | np.random.Generator):
        return True
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    plain = bool | int | float | str | torch.Tensor | np.ndarray | np.generic
    return value is None or isinstance(value, plain)


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    return value.state_dict() if _is_object(value) else copy.deepcopy(value)


def _load_into(value: Any, state: Any) -> bool:
    """Give an object its state; return False for a plain value, which cannot take one."""
    if isinstance(value, torch.Generator):
        value.set_state(state.cpu())
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif _is_object(value):
        value.load_state_dict(state)
    else:
        return False
    return True


def _marks(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield (*value.shape, str(value.dtype), *checksums(value.detach().contiguous()).tolist())
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
