"""Branches: a trial that goes on differently from some epoch on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrifty.core import plain_text
from thrifty.space import Branched, TimeUnit
from thrifty.space._units import EPOCHS

from ._reader import KnownEpoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A trial that is to go on differently from some epoch on, and what that costs.

    ``Study.branch`` makes it; ``Study.enqueue_trial`` takes it. ``str()`` describes it.

    Attributes:
        trial: The number of the trial that it branches off.
        epoch: The last epoch that both have in common.
        config: Its hyper-parameters.
        known_epochs: How many of its first epochs are known.
        kept_epoch: The last of these epochs whose state is kept; 0 if none is.
        epochs_again: Known epochs that are trained again, because no later state is kept.
        epochs_to_train: All epochs that are trained for it, those again included; of all seeds.
    """

    trial: int
    epoch: int
    config: Mapping[str, Any]
    known_epochs: int
    kept_epoch: int
    epochs_again: int
    epochs_to_train: int
    unit: TimeUnit = EPOCHS

    def __str__(self) -> str:
        changes = [
            f"  {name} = {plain_text(value)}"
            for name, value in self.config.items()
            if isinstance(value, Branched) and value.at == self.epoch
        ]
        text = self.unit.text
        lines = [
            f"branch of trial {self.trial} after {text(self.epoch)}:",
            *changes,
            f"{text(self.known_epochs)} known, {text(self.epochs_to_train)} to train",
        ]
        if self.epochs_again:
            since = f"after {text(self.kept_epoch)}" if self.kept_epoch else "kept"
            state = f"the last state is {since}" if self.kept_epoch else "no state is kept"
            lines.append(f"{state}, so {text(self.epochs_again)} of these are trained again")
        return "\n".join(lines)


def cost_of(
    known: Sequence[KnownEpoch], *, horizon: int, num_seeds: int
) -> tuple[int, int, int, int]:
    """Return the known epochs, the last kept one, those to train again, and all to train."""
    num = len(known)
    if num >= horizon:
        return num, num, 0, 0
    kept = max((each.epoch for each in known if each.kept), default=0)
    return num, kept, num - kept, num_seeds * (horizon - kept)
