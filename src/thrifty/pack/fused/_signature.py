"""What two trials must have in common to be one pack: everything about their models but the numbers in them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import torch

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


def signature(model: torch.nn.Module, *, attributes: Mapping[str, Any]) -> Hashable:
    """Equal for models that do the same: classes, settings, shapes; ``attributes`` are the task's own.

    Dropout rates do not count, they may differ from trial to trial.

    Raises:
        UnfusableError: the model has hooks, which may do anything.
    """
    parts: list[Hashable] = [_value(dict(attributes), 0)]
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
            (name, tuple(t.shape), str(t.dtype), t.requires_grad)
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
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu()
        return (
            "tensor",
            tuple(value.shape),
            content.contiguous().view(-1).tolist().__repr__()
            if value.numel() <= 64
            else id(value),
        )
    if depth > _MAX_DEPTH:
        return ("object", id(value))
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        return _container(value, depth)
    if isinstance(value, torch.nn.Module):
        return ("module", f"{type(value).__module__}.{type(value).__qualname__}")
    if (
        isinstance(value, type)
        or callable(getattr(value, "__code__", None))
        or hasattr(value, "__qualname__")
    ):
        module, name = getattr(value, "__module__", ""), value.__qualname__
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        # one that cannot be found by its name is not known by it, either
        return ("named", module, name, None if found is value else id(value))
    inside = getattr(value, "__dict__", None)
    if inside is not None:
        return ("object", type(value).__qualname__, _value(inside, depth + 1))
    return ("object", id(value))


def _container(value: Any, depth: int) -> Hashable:
    if isinstance(value, Mapping):
        return ("dict", tuple((str(k), _value(v, depth + 1)) for k, v in value.items()))
    inside = [_value(v, depth + 1) for v in value]
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(inside))
    return ("set", frozenset(inside))
