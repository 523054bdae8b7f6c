"""Tasks whose trainer is somebody else's, made anew for each epoch: what is kept from one to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from thrifty.core import DivergedError, TaskError
from thrifty.pack import HyperParameters, Trainable


class KeptTrainable(Trainable):
    """Between epochs there is only what the last one left: ``_kept``, with its ``metrics``."""

    def __init__(self, *, version: str) -> None:
        self.version = version
        self._kept: dict[str, Any] = {}

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Forgets the last trial."""
        self._hp, self._seed, self._device = hp, seed, device
        self._kept = {}

    def evaluate(self) -> Mapping[str, float]:
        """What was measured in the last epoch.

        Raises:
            TaskError: there was none.
        """
        if not self._kept:
            raise TaskError(
                f"nothing has been trained yet: {type(self).__name__} has no metrics"
            )
        metrics: Mapping[str, float] = self._kept["metrics"]
        return metrics

    def state(self) -> Any:
        """Weights, optimisers, schedulers, and how far the trainer is."""
        return self._kept

    def load_state(self, state: Any) -> None:
        """Goes back to what ``state`` returned."""
        self._kept = state


def check_loss(loss: float, *, epoch: int, clipping: str) -> None:
    """Whether training still makes sense; ``clipping`` is what the trainer calls it.

    Raises:
        DivergedError: the loss is not finite.
    """
    if not math.isfinite(loss):
        raise DivergedError(
            f"the training loss of epoch {epoch + 1} is {loss}; a smaller learning rate, a warm-up or {clipping} may help"
        )
