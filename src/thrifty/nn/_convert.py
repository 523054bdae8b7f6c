"""Conversion of a model's dropout layers to gyro dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core import LayerError

from ._gyro import BlockGyroDropout, GyroDropout, GyroLayer
from ._masks import GyroSchedule, Order, unit_dim
from ._sliced import is_plain


_PLAIN = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

_Dropout = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d
"""A layer of one of these types."""
_Place = tuple[int, int | None, torch.device]
"""A layer's number of units, their dimension if it is not the usual one, and the device."""


def gyro_(  # noqa: PLR0913 -- the options of a schedule; all are keywords
    model: nn.Module,
    *inputs: Any,
    subnetworks: int,
    concurrent: int,
    total_steps: int,
    p: float | None = None,
    group_size: int | None = None,
    order: Order = "partition",
    cycles: int = 1,
    shared: bool = True,
    where: Callable[[str, nn.Module], bool] | None = None,
    generator: torch.Generator | None = None,
) -> list[GyroSchedule]:
    """Replace every ``nn.Dropout`` of a model by gyro dropout, in place, tied to one schedule.

    The model runs on ``inputs``, in evaluation mode and without gradients, to find how many units
    each dropout has, and once more to check that the new layers are called. If anything is wrong,
    the model stays as it was. Dropout inside functions (``F.dropout``, the ``dropout`` of
    ``nn.MultiheadAttention``) is not replaced.

    Args:
        model: Model with dropout layers that the inputs reach.
        inputs: One batch, or a few samples, as the model takes it.
        subnetworks: Number of subnetworks to draw (sigma).
        concurrent: Number of subnetworks to train at a time (tau).
        total_steps: Optimizer steps of the whole training.
        p: Drop probability; None keeps that of each layer.
        group_size: Number of units to drop together (``BlockGyroDropout``); None drops single
            units.
        order: ``"partition"`` or ``"legacy"``, see ``GyroSchedule``.
        cycles: How often each subnetwork has its turn.
        shared: Whether all layers share one schedule, so that a subnetwork is one mask in each;
            otherwise each layer has its own.
        where: ``where(path, layer)`` selects the layers to replace; None selects all. Leave out
            dropout of attention weights, whose last dimension is not a row of units.
        generator: Source of the masks and orders.

    Returns:
        The schedules: one, or one for each layer. In a loop that is not thrifty's, let them
        ``follow`` the optimizer.

    Raises:
        LayerError: There is no dropout to replace; the inputs do not reach a dropout layer; a layer
            gets different numbers of units; a layer is more than a dropout (a subclass with its
            own forward, a layer with hooks); the model calls a layer in a way that cannot be
            changed; or an argument is wrong.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    >>> (schedule,) = gyro_(
    ...     model, torch.zeros(1, 4), subnetworks=16, concurrent=4, total_steps=1000
    ... )
    >>> model[2]
    GyroDropout(
      p=0.3, num_features=8
      (schedule): GyroSchedule(subnetworks=16, concurrent=4, total_steps=1000)
    )
    """
    found = {
        path: layer
        for path, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, _PLAIN) and (where is None or where(path, layer))
    }
    if "" in found or not found:
        raise LayerError(
            f"{type(model).__name__} has no dropout layer inside to replace; gyro_ looks for "
            "nn.Dropout and its kin"
        )
    for path, layer in found.items():
        _check_plain(path, layer)
    places = _units(model, set(found.values()), inputs)
    for path, layer in found.items():
        if layer not in places:
            raise LayerError(
                f"the inputs never reach the dropout layer {path!r}; give inputs that do, or "
                "leave it out with where="
            )
    make_schedule = partial(
        GyroSchedule,
        subnetworks=subnetworks,
        concurrent=concurrent,
        total_steps=total_steps,
        order=order,
        cycles=cycles,
        generator=generator,
    )
    layers = list(dict.fromkeys(found.values()))
    schedules = [make_schedule() for _ in layers[: 1 if shared else None]]
    made: dict[nn.Module, nn.Module] = {
        layer: _gyro(
            layer,
            places[layer],
            p=p,
            group_size=group_size,
            schedule=schedules[0 if shared else at],
            generator=generator,
        )
        for at, layer in enumerate(layers)
    }
    _replace(model, found, made, inputs=inputs)
    return schedules


def _gyro(
    layer: _Dropout,
    place: _Place,
    *,
    p: float | None,
    group_size: int | None,
    schedule: GyroSchedule,
    generator: torch.Generator | None,
) -> nn.Module:
    """Return the layer that replaces a dropout."""
    num_features, dim, device = place
    rate = layer.p if p is None else p
    options: dict[str, Any] = {
        "num_features": num_features,
        "dim": dim,
        "schedule": schedule,
        "generator": generator,
    }
    new: GyroLayer = (
        GyroDropout(rate, **options)
        if group_size is None
        else BlockGyroDropout(rate, group_size=group_size, **options)
    )
    new.inplace = layer.inplace
    return new.to(device).train(layer.training)


def _check_plain(path: str, layer: nn.Module) -> None:
    """Check that replacing a layer loses nothing.

    Raises:
        LayerError: The layer is more than a dropout.
    """
    kind = type(layer)
    if kind not in _PLAIN and kind.forward not in {each.forward for each in _PLAIN}:
        raise LayerError(
            f"the dropout layer {path!r} is a {kind.__name__} with a forward of its own; leave it "
            "out with where=, or put an nn.Dropout in its place first"
        )
    if not is_plain(layer):
        raise LayerError(
            f"the dropout layer {path!r} has hooks or a forward of its own, which would be lost; "
            "leave it out with where=, or remove them first"
        )


def _replace(
    model: nn.Module,
    found: Mapping[str, nn.Module],
    made: Mapping[nn.Module, nn.Module],
    *,
    inputs: tuple[Any, ...],
) -> None:
    """Put the new layers in their places, or leave the model as it was.

    Raises:
        LayerError: The model does not call a new layer, or still calls an old one.
    """
    for path, layer in found.items():
        model.set_submodule(path, made[layer])
    try:
        called = set(_units(model, {*made.values(), *made}, inputs))
        # A layer may be in several places, of which `where` has selected only some.
        called -= set(model.modules()) & set(made)
        for path, layer in found.items():
            if layer in called or made[layer] not in called:
                raise LayerError(
                    f"the model calls the dropout layer {path!r} by something else than the "
                    "attribute, such as a list or a closure; leave it out with where=, or call it "
                    "by the attribute"
                )
    except BaseException:
        for path, layer in found.items():
            model.set_submodule(path, layer)
        raise


def _units(
    model: nn.Module, layers: set[nn.Module], inputs: tuple[Any, ...]
) -> dict[nn.Module, _Place]:
    """Return the places of the layers that the model calls."""
    seen: dict[nn.Module, _Place] = {}

    def look(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        (x,) = args[:1]
        # Channel dropout drops whole channels, whatever the rank of the input.
        dim = 1 if isinstance(layer, _PLAIN) and not isinstance(layer, nn.Dropout) else None
        if isinstance(layer, GyroLayer):
            dim = layer.dim
        num = x.shape[unit_dim(x) if dim is None else dim]
        place = (num, dim, x.device)
        if seen.setdefault(layer, place) != place:
            raise LayerError(
                f"a dropout layer is used for {seen[layer][0]} units and for {num}; give each "
                "place a layer of its own"
            )

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
        for buffer, before in buffers:
            buffer.copy_(before)
    return seen
