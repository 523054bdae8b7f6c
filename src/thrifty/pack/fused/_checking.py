"""Checks of a block's steps, in which a trial also takes the step alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.pack.verify import (
    Difference,
    StepTaken,
    compare_step,
    gradients_alone,
    is_rounding,
    own_tensors,
    step_alone,
)

from ._member import FusedTrial
from ._row_state import RowState
from ._second_opinion import agrees_in_double
from ._structure import Structure


class StepCheck:
    """One trial's check of one step.

    Create it before the step, call ``note_gradients`` when the gradients are computed, then
    ``judge``.

    Attributes:
        before: The trial's state before the step.
        seconds: Seconds that the check has taken so far.
        solo_s: Seconds that the step took alone. None before ``judge``, and for a first step, which
            takes longer than others because its optimizer has no state yet.
        tie: Whether single precision differed and double precision agreed.
    """

    def __init__(self, trial: FusedTrial, rows: RowState, row: int) -> None:
        began = time.perf_counter()
        self.trial = trial
        self.solo_s: float | None = None
        self.tie = False
        self._rows = rows
        self._row = row
        self.before = rows.own_state(trial, row)
        self._gradients: dict[str, torch.Tensor | None] = {}
        self.seconds = time.perf_counter() - began

    def note_gradients(self) -> None:
        """Copy the block's gradients, since clipping and optimizers change them in place."""
        began = time.perf_counter()
        self._gradients = self._rows.own_gradients(self.trial, self._row)
        self.seconds += time.perf_counter() - began

    def judge(
        self,
        loss: torch.Tensor,
        *,
        structure: Structure,
        is_current: Callable[[], bool] | None,
    ) -> Difference | None:
        """Take the step alone and compare, before the trial moves on to its next step.

        Args:
            loss: The trial's loss in the block.
            structure: The structure that the block runs.
            is_current: Returns whether recording the step again gives the program that the block
                runs; None where nothing is recorded.

        Returns:
            A difference that rounding does not explain; None if the check passes.
        """
        began = time.perf_counter()
        try:
            return self._judge(loss, structure=structure, is_current=is_current)
        finally:
            self.seconds += time.perf_counter() - began

    def _judge(
        self,
        loss: torch.Tensor,
        *,
        structure: Structure,
        is_current: Callable[[], bool] | None,
    ) -> Difference | None:
        trial = self.trial
        packed = StepTaken(
            loss=loss.detach().clone(),
            gradients=self._gradients,
            tensors=own_tensors(trial.model),
        )
        trial.apply_options()
        batch: Any = None

        def compute_loss() -> torch.Tensor:
            nonlocal batch
            batch = trial.batch_alone(structure.batch_spec)
            trial.seed_alone()
            return trial.task.loss(trial.model, batch)

        alone = step_alone(
            trial.model,
            trial.optimizer,
            self.before.copied(),
            compute_loss=compute_loss,
            gradients=self._gradients,
            clip_norm=trial.options()[1],
        )
        self.solo_s = None if alone.is_first else alone.seconds
        num_terms = _num_numbers(batch)
        found = compare_step(packed, alone, before=self.before.tensors, num_terms=num_terms)
        if changed := trial.look_again():
            return Difference(
                what=f"{changed.name}, which computing the loss changes,",
                found=math.inf,
                allowed=0.0,
                is_rounding_possible=False,
            )
        if found is None or not found.is_rounding_possible:
            return found
        self.tie = agrees_in_double(
            structure, trial, self.before.tensors, is_current=is_current
        ) and is_rounding(
            packed,
            alone,
            tensors=self.before.tensors,
            step=partial(gradients_alone, trial.model, compute_loss=compute_loss),
            num_terms=num_terms,
        )
        return None if self.tie else found


def _num_numbers(batch: Any) -> int:
    """Return the count of numbers in a batch, at least 1."""
    leaves = pytree.tree_leaves(batch)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) or 1
