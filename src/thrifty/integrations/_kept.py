"""Tasks with another library's trainer, created anew for each epoch, and the state they keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from thrifty.core import DivergedError, TaskError
from thrifty.pack import HyperParameters, Trainable


class KeptTrainable(Trainable):
    """A task whose only state between epochs is what the last epoch left.

    That state is ``_kept``. It includes the epoch's ``metrics``.
    """

    def __init__(self, *, version: str) -> None:
        self.version = version
        self._kept: dict[str, Any] = {}

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Discard the state of the previous trial."""
        self._hp, self._seed, self._device = hp, seed, device
        self._kept = {}

    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics of the last epoch.

        Raises:
            TaskError: No epoch has been trained.
        """
        if not self._kept:
            raise TaskError(
                f"nothing has been trained yet: {type(self).__name__} has no metrics"
            )
        metrics: Mapping[str, float] = self._kept["metrics"]
        return metrics

    def state(self) -> Any:
        """Return weights, optimisers, schedulers, and the progress of the trainer."""
        return self._kept

    def load_state(self, state: Any) -> None:
        """Restore what ``state`` returned."""
        self._kept = state


def check_loss(loss: float, *, epoch: int, clipping: str) -> None:
    """Check that the loss is finite.

    Args:
        loss: Training loss of the epoch.
        epoch: The epoch.
        clipping: The trainer's name of the option for gradient clipping, for the message.

    Raises:
        DivergedError: The loss is not finite.
    """
    if not math.isfinite(loss):
        raise DivergedError(
            f"the training loss of epoch {epoch + 1} is {loss}; a smaller learning rate, a warm-up "
            f"or {clipping} may help"
        )
