"""What two trials must have in common to be one pack: everything about their models but the numbers in them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from thrifty.core import TaskError
from thrifty.pack.identity import content_digest

from ._registry import UnfusableError


# set per trial while training: see Randomness
_DROPOUTS = torch.nn.modules.dropout._DropoutNd
_OWN = frozenset({
    "_parameters",
    "_buffers",
    "_modules",
    "training",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
})
_MAX_DEPTH = 4
_MAX_HASHED_BYTES = 2**20
"""Larger arrays are told apart by being other objects."""


def signature(model: torch.nn.Module, *, attributes: Mapping[str, Any]) -> Hashable:
    """Equal for models that do the same: classes, settings, shapes; ``attributes`` are the task's own.

    Dropout rates do not count, they may differ from trial to trial.

    Raises:
        UnfusableError: the model has hooks, which may do anything.
    """
    parts: list[Hashable] = [_value(dict(attributes), 0)]
    places: dict[int, int] = {}  # tensors that stand in several places are told from equal ones
    for path, module in model.named_modules():
        settings = {}
        for name, value in vars(module).items():
            if name in _OWN:
                continue
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                # those of loading and saving do not act in training
                if value and "state_dict" not in name:
                    raise UnfusableError(f"{path or 'the model'} has hooks")
                continue
            settings[name] = value
        settings.pop(_rate_of(module), None)
        kind = type(module)
        tensors = tuple(
            (
                name,
                tuple(t.shape),
                str(t.dtype),
                t.requires_grad,
                places.setdefault(id(t), len(places)),
            )
            for held in (module._parameters, module._buffers)
            for name, t in held.items()
            if t is not None
        )
        parts.append((
            path,
            f"{kind.__module__}.{kind.__qualname__}",
            _value(settings, 0),
            tensors,
        ))
    return tuple(parts)


def check_memory(models: Sequence[torch.nn.Module]) -> None:
    """Check that each tensor of some models has memory of its own, which can become a row of a pack.

    Raises:
        UnfusableError: two tensors share memory, within a model or between two, or one is sparse.
    """
    owners: dict[int, int] = {}
    for model in models:
        own = {id(t): t for t in (*model.parameters(), *model.buffers())}
        for key, tensor in own.items():
            if tensor.layout is not torch.strided:
                raise UnfusableError("one of its parameters or buffers is sparse")
            if not tensor.numel():
                continue
            memory = tensor.untyped_storage().data_ptr()
            if memory in owners:
                raise UnfusableError("two of its parameters or buffers share memory")
            owners[memory] = key


def settings(attributes: Mapping[str, Any]) -> Hashable:
    """Equal for attributes of tasks that act equally."""
    return _value(dict(attributes), 0)


def family(model: torch.nn.Module) -> Hashable:
    """Equal for models that differ at most in widths; the same parameters are trained."""
    return tuple(
        (
            path,
            type(module),
            tuple(
                (name, p.dim(), p.dtype, p.requires_grad)
                for name, p in module._parameters.items()
                if p is not None
            ),
            tuple(
                (name, tuple(b.shape)) for name, b in module._buffers.items() if b is not None
            ),
        )
        for path, module in model.named_modules()
    )


def kin(model: torch.nn.Module) -> Hashable:
    """Equal for models that cost about the same: their layers with parameters and the shapes of these; activations may differ."""
    return tuple(
        (type(module).__qualname__, tuple((name, tuple(p.shape), p.dtype) for name, p in own))
        for module in model.modules()
        if (own := [(n, p) for n, p in module._parameters.items() if p is not None])
    )


def dropout_rates(model: torch.nn.Module) -> dict[str, float]:
    """The rates of all dropout layers, by path."""
    return {
        path: float(getattr(module, name)) for path, (module, name) in dropouts(model).items()
    }


def dropouts(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """All modules with a dropout rate and the attribute that it is, by path."""
    found = ((path, module, _rate_of(module)) for path, module in model.named_modules())
    return {path: (module, name) for path, module, name in found if name is not None}


def rate_places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """The layers with a dropout rate and the attribute that it is: what trials may differ in."""
    return list(dropouts(model).values())


def follows_rate_itself(module: torch.nn.Module) -> bool:
    """Whether a layer's rate reaches torch's own dropout only; layers that name theirs do more, and know why."""
    return isinstance(module, _DROPOUTS)


def _rate_of(module: torch.nn.Module) -> str | None:
    """The attribute that may differ from trial to trial.

    A subclass may do anything with it, and has to say itself that it does not.
    """
    if isinstance(module, _DROPOUTS):
        return "p"
    return vars(type(module)).get("trial_rate")


def _value(value: Any, depth: int) -> Hashable:
    """A hashable stand-in that is equal only for what acts equally; at worst nothing equals it."""
    if value is None or isinstance(
        value, bool | int | float | str | bytes | complex | torch.dtype | torch.device
    ):
        return (type(value).__name__, value)
    if depth <= _MAX_DEPTH and type(value) in (list, tuple):
        return (type(value).__name__, tuple(_value(v, depth + 1) for v in value))
    if depth <= _MAX_DEPTH and type(value) is dict:
        return (
            "dict",
            tuple((_value(k, depth), _value(v, depth + 1)) for k, v in value.items()),
        )
    if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > _MAX_HASHED_BYTES:
        return ("array", id(value))
    try:
        return ("content", content_digest(value))
    except TaskError:
        return ("object", id(value))
