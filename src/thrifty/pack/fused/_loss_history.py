"""Training losses of a block's steps, kept until their epochs end."""

from __future__ import annotations

import torch


class LossHistory:
    """A ring buffer of the losses of each step; ``tick`` counts all steps ever added."""

    def __init__(self, capacity: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._steps = torch.zeros(0, capacity, dtype=dtype, device=device)
        self.tick = 0

    def make_room(self, num_steps: int) -> None:
        """Make room for the steps of an epoch that begins now."""
        steps = self._steps
        if num_steps <= len(steps):
            return
        longer = steps.new_zeros(2 * num_steps, steps.shape[1])
        for tick in range(max(0, self.tick - len(steps)), self.tick):
            longer[tick % len(longer)] = steps[tick % len(steps)]
        self._steps = longer

    def note(self, losses: torch.Tensor) -> None:
        """Add the losses of one more step."""
        self._steps[self.tick % len(self._steps), : len(losses)].copy_(losses)
        self.tick += 1

    def move(self, source: int, target: int) -> None:
        """Move a trial's losses from one row to another."""
        self._steps[:, target].copy_(self._steps[:, source])

    def mean(self, row: int, *, since: int) -> float:
        """Return the mean loss of the trial in a row over all steps from tick ``since`` on."""
        ticks = torch.arange(since, self.tick, device=self._steps.device)
        return float(self._steps[ticks % len(self._steps), row].mean())

    def last(self, num: int) -> torch.Tensor:
        """Return a copy of the losses of the first rows in the last step, ``[num]``."""
        return self._steps[(self.tick - 1) % len(self._steps), :num].clone()
