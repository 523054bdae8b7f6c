"""Checks during training whether a faster computation may replace layers."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from thrifty.core import plain_logger


logger = plain_logger(__name__)

_EVERY = 1000
"""Batches between two checks of a group of layers, on average.

A check costs about two batches.
"""

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class Split(Protocol):
    """A batch in parts."""

    x: Tensor

    def whole(self) -> Tensor:
        """Return the whole batch."""
        ...


S = TypeVar("S", bound=Any)


@dataclass(slots=True)
class _Record:
    """What the checks know about one group of layers."""

    layers: tuple[weakref.ref[nn.Module], ...]
    rng: random.Random
    left: int = 0
    differs: bool = False

    def is_of(self, group: Sequence[nn.Module]) -> bool:
        return all(ref() is layer for ref, layer in zip(self.layers, group, strict=True))


@dataclass(slots=True)
class _Records:
    """Records by position and kind of input."""

    known: dict[tuple[Any, ...], _Record] = field(default_factory=dict)


# Not an attribute: models that differ in it alone are equal, and copies do not contain it.
_records: weakref.WeakKeyDictionary[nn.Module, _Records] = weakref.WeakKeyDictionary()


def is_plain(layer: nn.Module) -> bool:
    """Return whether calling the layer does what its class says and nothing else."""
    own = vars(layer)
    return not (
        any(own.get(name) for name in _HOOKS)
        or "forward" in own
        or torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def is_transformed(x: Tensor) -> bool:
    """Return whether values cannot be compared: on the meta device, or inside ``torch.func``."""
    if x.is_meta:
        return True
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_trusted(
    owner: nn.Module,
    group: Sequence[nn.Module],
    *,
    position: int,
    now: S,
    quick: Callable[[S], S],
) -> bool:
    """Return whether ``quick`` may replace the layers of a group; compare both now and then.

    Args:
        owner: model that contains the layers.
        group: layers to replace.
        position: position of the first layer.
        now: input of the layers.
        quick: computation that replaces them.
    """
    if torch.compiler.is_compiling() or _is_captured(now.x):
        return True
    known = _records.setdefault(owner, _Records()).known
    key = (
        position,
        len(group),
        now.x.dim(),
        now.x.dtype,
        torch.is_autocast_enabled(now.x.device.type),
    )
    record = known.get(key)
    if record is None or not record.is_of(group):
        record = known[key] = _Record(tuple(map(weakref.ref, group)), random.Random(position))
    if record.differs:
        return False
    if record.left:
        record.left -= 1
        return True
    difference = _difference(group, now, quick)
    if difference == "":
        return True  # values that are not finite tell nothing: check the next batch
    record.left = record.rng.randrange(1, 2 * _EVERY)
    if difference is not None:
        record.differs = True
        names = ", ".join(type(layer).__name__ for layer in group)
        logger.warning(
            "layers %d to %d (%s) run as they are from now on: without what is dropped, %s",
            position, position + len(group) - 1, names, difference,
        )  # fmt: skip
    return difference is None


def _difference(group: Sequence[nn.Module], now: S, quick: Callable[[S], S]) -> str | None:
    """Describe what differs between the layers and their replacement.

    Returns:
        None if nothing differs; an empty text if that cannot be told.
    """
    parameters = [p for layer in group for p in layer.parameters() if _is_followed(p)]
    results = []
    # Checkpointing counts the tensors that are saved within it; those of a comparison must not
    # count.
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        for run in (quick, None):
            x = now.x.detach().requires_grad_(now.x.requires_grad)
            split = replace(now, x=x)
            out = split.whole() if run is None else run(split).whole()
            for layer in group if run is None else ():
                out = layer(out)
            results.append((out.detach(), *_gradients(out, [x, *parameters])))
    if not results[1][0].isfinite().all():
        return ""
    names = [
        "the output",
        "the gradient of the input",
        *["the gradient of a parameter"] * len(parameters),
    ]
    eps = torch.finfo(results[0][0].dtype).eps
    for name, ours, theirs in zip(names, *results, strict=False):
        gap = _relative_gap(ours, theirs)
        if not gap <= math.sqrt(eps):
            return f"{name} differs by {gap:.2g} of its size"
    return None


def _gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    wanted = [each for each in inputs if each.requires_grad]
    if not wanted or not out.requires_grad:
        return [None] * len(inputs)
    # A direction that no symmetry hides, and that takes no number from a random stream.
    towards = torch.arange(out.numel(), device=out.device).cos().to(out.dtype).view_as(out)
    found = iter(torch.autograd.grad(out, wanted, towards, allow_unused=True))
    return [next(found) if each.requires_grad else None for each in inputs]


def _relative_gap(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    if ours.shape != theirs.shape:
        return math.inf
    if not theirs.numel() or torch.equal(ours, theirs):
        return 0.0
    gap, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
    return gap / size if size else math.inf


def _is_followed(parameter: nn.Parameter) -> bool:
    """Return whether the gradient can be requested without calling the user's code."""
    return parameter.requires_grad and not parameter._backward_hooks


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _same(x: Any) -> Any:
    return x
