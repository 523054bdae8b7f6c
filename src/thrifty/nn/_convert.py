"""Turns the dropout of a model into gyro dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core import LayerError

from ._gyro import BlockGyroDropout, GyroDropout
from ._masks import unit_dim
from ._schedule import GyroSchedule, Order


_PLAIN = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def gyro_(  # noqa: PLR0913 -- what a schedule takes; all are keywords
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
    """Replaces every ``nn.Dropout`` of a model by gyro dropout, in place, tied to one schedule.

    The model runs once on ``inputs``, in evaluation and without gradients, to see how many units each dropout has. Dropout inside functions (``F.dropout``, the ``dropout`` of
    ``nn.MultiheadAttention``) stays as it is.

    Args:
        model: has dropout layers that are reached by the inputs.
        inputs: one batch, or a few samples, as the model takes it.
        subnetworks: how many are drawn (sigma).
        concurrent: how many are trained at a time (tau).
        total_steps: optimiser steps of the whole training.
        p: instead of each layer's own.
        group_size: drop groups of so many units (``BlockGyroDropout``).
        order: ``"partition"`` or ``"legacy"``, see ``GyroSchedule``.
        cycles: how often each subnetwork has its turn.
        shared: one schedule for all layers, so that a subnetwork is one mask in each; otherwise each layer has its own.
        where: which layers, by ``where(path, layer)``; all by default. Leave out dropout of attention weights: their last dimension is no row of units.
        generator: what masks and orders are drawn from.

    Returns:
        The schedules: one, or one for each layer. In a loop that is not thrifty's let them ``follow`` the optimiser.

    Raises:
        LayerError: there is no dropout to replace, the inputs do not reach one, it sees units in several numbers, or an argument makes no sense.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    >>> (schedule,) = gyro_(model, torch.zeros(1, 4), subnetworks=16, concurrent=4, total_steps=1000)
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
            f"{type(model).__name__} has no dropout layer inside to replace; gyro_ looks for nn.Dropout and its kin"
        )
    places = _units(model, set(found.values()), inputs)
    schedules: list[GyroSchedule] = []
    made: dict[nn.Module, nn.Module] = {}
    for path, layer in found.items():
        if layer not in made:
            if not (shared and schedules):
                own = GyroSchedule(
                    subnetworks=subnetworks,
                    concurrent=concurrent,
                    total_steps=total_steps,
                    order=order,
                    cycles=cycles,
                    generator=generator,
                )
                schedules.append(own)
            if layer not in places:
                raise LayerError(
                    f"the inputs never reach the dropout layer {path!r}; give inputs that do, or leave it out with where="
                )
            num_features, dim, device = places[layer]
            options = {
                "num_features": num_features,
                "dim": dim,
                "schedule": schedules[-1],
                "generator": generator,
            }
            rate = layer.p if p is None else p
            new = (
                GyroDropout(rate, **options)
                if group_size is None
                else BlockGyroDropout(rate, group_size=group_size, **options)
            )
            made[layer] = new.to(device).train(layer.training)
        model.set_submodule(path, made[layer])
    return schedules


def _units(
    model: nn.Module, layers: set[nn.Module], inputs: tuple[Any, ...]
) -> dict[nn.Module, tuple[int, int | None, torch.device]]:
    """How many units each layer has, in which dimension if it is not the usual one, and where."""
    seen: dict[nn.Module, tuple[int, int | None, torch.device]] = {}

    def look(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        (x,) = args[:1]
        # of channels whole ones are dropped, whatever the rank
        dim = 1 if not isinstance(layer, nn.Dropout) else None
        num = x.shape[unit_dim(x) if dim is None else dim]
        place = (num, dim, x.device)
        if seen.setdefault(layer, place) != place:
            raise LayerError(
                f"a dropout layer is used for {seen[layer][0]} units and for {num}; give each place a layer of its own"
            )

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return seen
