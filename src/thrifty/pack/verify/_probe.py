"""Whether a checkpoint holds the whole state of a trial: a restored trial and the live one take the same step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thrifty.pack.identity import vars_of

from ._same import same
from ._watch import token


FIRST_BATCH = "the first batch of the epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one step and one evaluation of a trial came to.

    Attributes:
        loss: Of the step.
        batch: A stand-in for what the step was made on.
        tensors: The model's state afterwards, by name.
        moments: The optimizer's state afterwards, by parameter name.
        metrics: Of the first validation batch after the step.
    """

    loss: torch.Tensor
    batch: Any
    tensors: Mapping[str, torch.Tensor]
    moments: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, Any]


def probes_differ(live: Probe, restored: Probe) -> str:
    """Say what differs between two probes; "" if they are equal to the last bit."""
    if not same(live.batch, restored.batch):
        return FIRST_BATCH
    if not same(live.loss, restored.loss):
        return "the loss of the next step"
    for name in dict.fromkeys((*live.tensors, *restored.tensors)):
        if not same(live.tensors.get(name), restored.tensors.get(name)):
            return f"{name!r} after the next step"
    for name in dict.fromkeys((*live.moments, *restored.moments)):
        if not same(live.moments.get(name), restored.moments.get(name)):
            return f"the optimizer's state of {name!r} after the next step"
    for name in dict.fromkeys((*live.metrics, *restored.metrics)):
        if not same(live.metrics.get(name), restored.metrics.get(name)):
            return f"the metric {name!r}"
    return ""


def outside_of_state(
    live: Mapping[str, Any],
    restored: Mapping[str, Any],
    *,
    meant: Collection[str] = (),
) -> list[str]:
    """Name the attributes that differ between a live trial and a restored one.

    Args:
        live: Tasks, modules and the like of the live trial, by name.
        restored: The same of the restored one.
        meant: Names of attributes that are meant not to be part of the state.
    """
    found = []
    for name, mine, theirs in _pairs(live, restored):
        inside, other = vars_of(mine), vars_of(theirs)
        for key in dict.fromkeys((*inside, *other)):
            if key in _NOT_STATE or key in meant or str(key).endswith("_hooks"):
                continue
            if _content(inside.get(key)) != _content(other.get(key)):
                found.append(f"{name}.{key}" if name else str(key))
        if isinstance(mine, torch.nn.Module) and isinstance(theirs, torch.nn.Module):
            found += [
                f"{name}.{key} (a buffer that is not persistent)"
                for key in sorted(mine._non_persistent_buffers_set - set(meant))
                if not same(mine._buffers.get(key), theirs._buffers.get(key))
            ]
    return found


def how_far_apart(one: Probe, other: Probe) -> float:
    """The largest relative difference of two probes; infinite where they cannot be compared.

    >>> a = Probe(loss=torch.tensor(2.0), batch=None, tensors={}, moments={}, metrics={"loss": 2.0})
    >>> b = Probe(loss=torch.tensor(2.0), batch=None, tensors={}, moments={}, metrics={"loss": 1.0})
    >>> how_far_apart(a, a), how_far_apart(a, b)
    (0.0, 0.5)
    """
    if not same(one.batch, other.batch):
        return math.inf
    return max(
        _apart(one.loss, other.loss),
        _apart(one.tensors, other.tensors),
        _apart(one.moments, other.moments),
        _apart(one.metrics, other.metrics),
    )


def _apart(one: Any, other: Any) -> float:
    if same(one, other):
        return 0.0
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        return max(_apart(one[key], other[key]) for key in one)
    try:
        first, second = torch.as_tensor(one).double(), torch.as_tensor(other).double()
        scale = torch.maximum(first.abs().max(), second.abs().max())
        found = float((first - second).abs().max() / scale)
    except (RuntimeError, TypeError, ValueError):  # no numbers, or shapes that differ
        return math.inf
    return found if math.isfinite(found) else math.inf


def stand_in(batch: Any) -> Any:
    """A copy of the tensors of a batch, to compare with another one."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone()
    if isinstance(batch, Mapping):
        return {key: stand_in(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [stand_in(value) for value in batch]
    return batch if isinstance(batch, str | int | float) else None


def _pairs(
    live: Mapping[str, Any], restored: Mapping[str, Any]
) -> Sequence[tuple[str, Any, Any]]:
    """Objects that stand in the same place: each root, and each module in it."""
    out: list[tuple[str, Any, Any]] = []
    for name, mine in live.items():
        theirs = restored[name]
        out.append((name, mine, theirs))
        if isinstance(mine, torch.nn.Module) and isinstance(theirs, torch.nn.Module):
            others = dict(theirs.named_modules())
            out += [
                (f"{name}.{path}", module, others[path])
                for path, module in mine.named_modules()
                if path and path in others
            ]
    return out


def _content(value: Any, depth: int = 0) -> Any:
    """A stand-in for the content of a value; equal for what cannot be compared."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return (tuple(tensor.shape), str(tensor.dtype), tensor.reshape(-1).tolist()[:1024])
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return (value.shape, str(value.dtype), value.reshape(-1)[:1024].tobytes())
    make = _CONTAINERS.get(type(value))
    if make is not None and depth < 4:
        return make(value, depth)
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    found = token(value)
    # other objects differ in identity alone: their own attributes are looked at where they are known
    return (
        found if type(value).__module__ == "numpy" or "random" in type(value).__name__ else None
    )


def _of_sequence(value: Any, depth: int) -> Any:
    return [len(value), *[_content(each, depth + 1) for each in list(value)[:256]]]


def _of_mapping(value: Any, depth: int) -> Any:
    items = list(value.items())[:256]
    return [len(value), *[(repr(k), _content(v, depth + 1)) for k, v in items]]


_CONTAINERS: Mapping[type, Callable[[Any, int], Any]] = {
    list: _of_sequence,
    tuple: _of_sequence,
    dict: _of_mapping,
}

_NOT_STATE = frozenset({
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training",
    "_backward_hooks", "_forward_hooks", "_is_full_backward_hook",
})  # fmt: skip
"""What every module keeps, and what is state anyway."""
