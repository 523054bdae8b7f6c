"""What a study found, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One trial.

    Attributes:
        number: in the order of being proposed.
        config: its hyper-parameters; schedules are schedules.
        state: ``"done"`` (went all the way), ``"running"``, ``"paused"``, ``"stopped"`` or ``"failed"``.
        epochs: how far it was trained.
        value: the study's metric there (None before the first report).
        curve: the study's metric after epochs 1, 2, ...
        error: what made it fail, with the traceback of the task's code.
        parent: the trial it branched off, and at which epoch.
    """

    number: int
    config: Mapping[str, Any]
    state: Literal["done", "running", "paused", "stopped", "failed"]
    epochs: int
    value: float | None
    curve: tuple[float, ...]
    error: str = ""
    parent: tuple[int, int] | None = None
    _load: Callable[[], torch.nn.Module] | None = field(default=None, repr=False, compare=False)

    def load_model(self) -> torch.nn.Module:
        """The trained model at ``epochs``, on the CPU, in evaluation mode.

        From its checkpoint; if that is gone or damaged the model is trained again, with the same result.
        """
        assert self._load is not None
        return self._load()


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What sharing (and packing) saved.

    ``trial_epochs`` and ``seconds_alone`` are what the trials would have cost one by one; ``unique_epochs`` and
    ``seconds_shared`` what is left when equal prefixes are trained once; ``seconds`` what was really
    spent in training, packing included.
    """

    trial_epochs: int
    unique_epochs: int
    seconds_alone: float
    seconds_shared: float
    seconds: float

    @property
    def epochs(self) -> int:
        """Epochs saved."""
        return self.trial_epochs - self.unique_epochs

    @property
    def shared_factor(self) -> float:
        """How many times less work sharing made of it."""
        return self.seconds_alone / self.seconds_shared if self.seconds_shared else 1.0

    @property
    def packed_factor(self) -> float:
        """How many times faster joint training made what was left."""
        return self.seconds_shared / self.seconds if self.seconds else 1.0

    def __str__(self) -> str:
        return (
            f"{self.unique_epochs:,} epochs trained for {self.trial_epochs:,} trial-epochs: "
            f"{self.epochs:,} saved; training {self.seconds:,.1f} s instead of {self.seconds_alone:,.1f} s "
            f"({self.shared_factor:.2f}x by sharing, {self.packed_factor:.2f}x by packing)"
        )
