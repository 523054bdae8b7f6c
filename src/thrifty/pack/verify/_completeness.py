"""Whether a checkpoint holds the whole state of a trial: a restored trial and the live one take the same step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thrifty.pack.identity import vars_of

from ._reference import own_tensors
from ._watch import token


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one step and one evaluation of a trial came to.

    Attributes:
        loss: Of the step.
        batch: A stand-in for what the step was made on.
        tensors: Parameters and buffers afterwards, by name.
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
    if not _same(live.batch, restored.batch):
        return "the first batch of the epoch"
    if not _same(live.loss, restored.loss):
        return "the loss of the next step"
    for name in dict.fromkeys((*live.tensors, *restored.tensors)):
        if not _same(live.tensors.get(name), restored.tensors.get(name)):
            return f"{name!r} after the next step"
    for name in dict.fromkeys((*live.moments, *restored.moments)):
        if not _same(live.moments.get(name), restored.moments.get(name)):
            return f"the optimizer's state of {name!r} after the next step"
    for name in dict.fromkeys((*live.metrics, *restored.metrics)):
        if not _same(live.metrics.get(name), restored.metrics.get(name)):
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
                if not _same(mine._buffers.get(key), theirs._buffers.get(key))
            ]
    return found


def as_before(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module) -> bool:
    """Whether a module has the given tensors, bit for bit."""
    own = own_tensors(model)
    return own.keys() == tensors.keys() and all(_same(own[n], tensors[n]) for n in own)


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
    make = _CONTAINERS.get(type(value))
    if make is not None and depth < 4:
        return make(value, depth)
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    found = token(value)
    # other objects differ in identity alone: their own attributes are looked at where they are known
    return found if type(value).__module__ == "numpy" or "random" in type(value).__name__ else None


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


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors to the last bit; not a number equals itself."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if one.dtype.is_floating_point or one.dtype.is_complex:
            nan = torch.isnan(one) & torch.isnan(other)
            return bool(((one == other) | nan).all())
        return bool(torch.equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other or one != one)  # noqa: PLR0124
