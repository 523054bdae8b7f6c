"""Ensembles of subnetworks at inference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core import LayerError, check_integers

from ._gyro import GyroLayer


class SubnetworkEnsemble(nn.Module):
    """An ensemble that averages the outputs of some subnetworks of a trained model.

    It replaces one pass through all units, and costs one forward pass for each subnetwork.

    Args:
        model: model whose gyro dropout layers share one schedule.
        num: number of subnetworks to average.
        transform: function applied to each output before averaging; for probabilities, pass
            ``functools.partial(torch.softmax, dim=-1)``.
        generator: source of the subnetworks, which are drawn without replacement.

    Raises:
        LayerError: the model has no gyro dropout, its layers have several schedules, or it has
            fewer subnetworks.

    >>> from thrifty.nn import GyroDropout
    >>> dropout = GyroDropout(0.5, num_features=8, subnetworks=4, concurrent=2, total_steps=100)
    >>> model = nn.Sequential(nn.Linear(3, 8), dropout, nn.Linear(8, 1))
    >>> SubnetworkEnsemble(model, num=4)(torch.zeros(2, 3)).shape
    torch.Size([2, 1])
    """

    chosen: Tensor

    def __init__(
        self,
        model: nn.Module,
        *,
        num: int,
        transform: Callable[[Tensor], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_integers(LayerError, 1, num=num)
        layers = [layer for layer in model.modules() if isinstance(layer, GyroLayer)]
        if not layers:
            raise LayerError(f"{type(model).__name__} has no gyro dropout, so no subnetworks")
        if len({id(layer.schedule) for layer in layers}) > 1:
            raise LayerError(
                "the model's layers have several schedules, so a subnetwork is no combination "
                "of masks; give them one schedule="
            )
        there = layers[0].schedule.subnetworks
        if num > there:
            raise LayerError(f"num={num}, and the model has {there} subnetworks")
        self.model = model
        self.transform = transform
        drawn = torch.randperm(there, generator=generator)[:num]
        self.register_buffer("chosen", drawn)

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return the mean over the chosen subnetworks; inputs are those of the model."""
        total: Tensor | None = None
        for number in self.chosen.tolist():
            with subnetwork(self.model, number):
                out = self.model(*inputs, **options)
            out = out if self.transform is None else self.transform(out)
            total = out if total is None else total + out
        assert total is not None
        return total / len(self.chosen)


@contextmanager
def subnetwork(model: nn.Module, number: int) -> Iterator[None]:
    """Send all samples through one subnetwork, also in evaluation mode.

    Args:
        model: model with gyro dropout.
        number: number of the subnetwork, from 0.

    Raises:
        LayerError: the subnetwork does not exist.

    >>> from thrifty.nn import GyroDropout
    >>> layer = GyroDropout(
    ...     0.5, num_features=8, subnetworks=4, concurrent=2, total_steps=100
    ... ).eval()
    >>> with subnetwork(layer, 3):
    ...     out = layer(torch.ones(1, 8))
    >>> bool((out[0] > 0).equal(layer.masks[3]))
    True
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GyroLayer)]
    for layer in layers:
        if not 0 <= number < layer.schedule.subnetworks:
            raise LayerError(
                f"subnetwork {number} does not exist: there are {layer.schedule.subnetworks}, "
                "counted from 0"
            )
    before = [layer.subnetwork for layer in layers]
    try:
        for layer in layers:
            layer.subnetwork = number
        yield
    finally:
        for layer, number_before in zip(layers, before, strict=True):
            layer.subnetwork = number_before
