"""Hooks of the user's that a Trainer calls once in a run, and what they may change.

thrifty has a run for each epoch, so such hooks are called in each epoch. What they change is kept
out of the epochs that follow, as in one run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from thrifty.core import plain_logger
from thrifty.pack._frozen import checksums
from thrifty.pack._state import state_versions, with_versions
from thrifty.pack.verify import same

from ._model_copies import Digests


logger = plain_logger(__name__)

_said: set[str] = set()
"""Warnings of this process."""

Weights = dict[str, torch.Tensor]
"""Parameters and persistent buffers of a module, by name."""


class Finished(TypedDict):
    """The weights that the hooks at the end of a run have left, if they differ.

    Attributes:
        weights: The weights.
        frozen: Digests of what is left out of them.
    """

    weights: Mapping[str, Any]
    frozen: Digests


def overridden(
    owners: Iterable[Any], hooks: Collection[str], *, bases: Collection[type]
) -> list[str]:
    """Return the names of the hooks that objects have of their own, for messages.

    Args:
        owners: The objects.
        hooks: Names of methods.
        bases: Classes whose methods do nothing of interest.

    >>> class Hooks:
    ...     def on_end(self): ...
    >>> class Mine(Hooks):
    ...     def on_end(self): ...
    >>> overridden([Hooks(), Mine()], ["on_end"], bases=[Hooks])
    ['Mine.on_end']
    """
    found = []
    for owner in owners:
        kind: Any = type(owner)
        for hook in hooks:
            by = next((each for each in kind.__mro__ if hook in vars(each)), None)
            is_own = by is not None and by not in bases
            if is_own or hook in getattr(owner, "__dict__", ()):
                found.append(f"{kind.__name__}.{hook}")
    return list(dict.fromkeys(found))


def copied(value: Any, *, device: torch.device | None = None) -> Any:
    """Return a nested state with copies of all its tensors.

    Args:
        value: The state: dicts, lists, tuples and tensors.
        device: Where the copies are; None: where the tensors are.
    """
    if isinstance(value, torch.Tensor):
        where = value.device if device is None else device
        return value.detach().to(where, copy=True)
    if isinstance(value, Mapping):
        held = {key: copied(inside, device=device) for key, inside in value.items()}
        return with_versions(held, state_versions(value))
    if type(value) in (list, tuple):
        return type(value)(copied(inside, device=device) for inside in value)
    return value


def weights_of(module: torch.nn.Module) -> Weights:
    """Return a module's parameters and its persistent buffers.

    >>> sorted(weights_of(torch.nn.BatchNorm1d(1, affine=False)))
    ['num_batches_tracked', 'running_mean', 'running_var']
    """
    found: Weights = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return {name: tensor.detach() for name, tensor in found.items()}


def put_back(module: torch.nn.Module, before: Weights) -> str | None:
    """Give a module the weights that it had before.

    Returns:
        The name of a weight that was added, removed or has another shape; None if there is none.
    """
    now = weights_of(module)
    for name in (*now, *before):
        if name not in before or name not in now or now[name].shape != before[name].shape:
            return name
    with torch.no_grad():
        for name, tensor in before.items():
            now[name].copy_(tensor)
    return None


def sums_of(weights: Weights) -> dict[str, list[int]]:
    """Return checksums of weights, by name; of those that have some."""
    return {
        name: checksums(tensor.contiguous()).tolist()
        for name, tensor in weights.items()
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    }


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first name whose value differs; None if there is none."""
    names = dict.fromkeys((*one, *other))
    return next((name for name in names if one.get(name) != other.get(name)), None)


def finished(
    after: tuple[Mapping[str, Any], Digests],
    *,
    before: tuple[Mapping[str, Any], Digests],
    hooks: Sequence[str],
) -> Finished | None:
    """Return the weights that hooks at the end of a run have left; None if they changed nothing.

    Args:
        after: The weights after the hooks, and the digests of what they leave out.
        before: The same before them: what training goes on from.
        hooks: The names of the hooks.
    """
    (weights, frozen), (held, held_frozen) = after, before
    changed = {*weights, *frozen} ^ {*held, *held_frozen}
    changed |= {n for n in weights.keys() & held.keys() if _shape(weights[n]) != _shape(held[n])}
    if changed:
        text = (
            f"{' or '.join(hooks)} changes which weights the model has, such as {min(changed)!r}; "
            "load_model() returns the model as it was before that"
        )
        if text not in _said:
            _said.add(text)
            logger.warning("%s", text)
        return None
    cpu = torch.device("cpu")
    weights = copied(weights, device=cpu)
    if frozen.keys() == held_frozen.keys() and same(weights, copied(held, device=cpu)):
        return None
    return {"weights": weights, "frozen": frozen}


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
