"""Checks of a step, and the second opinion in double precision."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.core import freed_at_once
from thrifty.pack._frozen import cheap_copy, copy_of
from thrifty.pack.task._data import valid_batches
from thrifty.pack.verify import (
    Difference,
    OwnState,
    StepTaken,
    compare_metrics,
    exchanged,
    gradients_alone,
    is_rounding,
    moment_tensors,
    own_tensors,
    rounds_to_tf32,
    step_alone,
    step_differences,
    worst,
)

from ._fusable import UnfusableError
from ._member import FusedTrial
from ._row_state import RowState
from ._shared_operations import SharedOperations
from ._step import Experiment, check_same, evaluate_alone, run_packed, train_alone
from ._structure import Structure, doubled, upcast
from .rules._layers import computing_products


TOLERANCE = 1e-8
MAX_ROWS = 16
"""Maximum number of rows of the step's batch that a second opinion uses."""


def agrees_in_double(
    structure: Structure,
    trial: FusedTrial,
    state: Mapping[str, torch.Tensor],
    *,
    is_current: Callable[[], bool] | None,
) -> bool:
    """Return whether a trial's step is the same in a block and alone, in double precision.

    Args:
        structure: The structure that the block runs; it may have been recorded from another trial.
        trial: The trial, with its own task and module, before it moves on from the step.
        state: Its tensors before the step.
        is_current: Returns whether recording the step again gives the program that the block runs.
            If it does not, a second opinion would be about another program. None where nothing is
            recorded.
    """
    try:
        with freed_at_once(sum(t.nbytes for t in state.values())), torch.enable_grad():
            if is_current is None:
                return _agrees_whole(structure, trial, state)
            return _agrees(structure, trial, state, is_current=is_current)
    except (UnfusableError, RuntimeError, TypeError, ValueError):
        return False


def metrics_agree_in_double(
    structure: Structure, trial: FusedTrial, *, is_current: Callable[[], bool]
) -> bool:
    """Return whether a trial's metrics agree in a block and alone, in double precision.

    Every validation batch is compared. The result is False for structures with whole batches.

    Args:
        structure: The structure that the block runs.
        trial: The trial, with its own task and module.
        is_current: Returns whether recording the metrics again gives the programs that the block
            runs.
    """
    if structure.whole:
        return False
    try:
        return is_current() and _metrics_agree(structure, trial)
    except (UnfusableError, RuntimeError, TypeError, ValueError):
        return False


def _metrics_agree(structure: Structure, trial: FusedTrial) -> bool:
    double = _in_double(structure)
    batches = valid_batches(trial.source, batch_size=structure.task.eval_batch_size)
    state = own_tensors(trial.model)
    with _in_double_for_a_while(trial.model, state, lower=double.lower) as model:
        for batch, _ in batches:
            leaves, spec = pytree.tree_flatten(batch)
            rows = _double(leaves)
            experiment = Experiment(
                structure=double, models=[model], batches=[rows], tolerance=TOLERANCE, shared=True
            )
            packed = experiment.packed_metrics()[0]
            own = pytree.tree_unflatten([row.clone() for row in rows], spec)
            try:
                found = evaluate_alone(trial.task, model, own, lower=double.lower)
            except UnfusableError:
                return False
            alone = {n: float(v) for n, v in found.items()}
            if compare_metrics(packed, alone, tolerance=TOLERANCE) is not None:
                return False
    return True


def _agrees(
    structure: Structure,
    trial: FusedTrial,
    state: Mapping[str, torch.Tensor],
    *,
    is_current: Callable[[], bool],
) -> bool:
    leaves = [leaf[:MAX_ROWS] for leaf in _double(trial.feed.batch(trial.step_index))]
    known = structure.in_double.get(len(leaves[0]))
    double = _in_double(structure) if known is None else known[0]
    with _in_double_for_a_while(trial.model, state, lower=double.lower) as model:
        experiment = Experiment(
            structure=double, models=[model], batches=[leaves], tolerance=TOLERANCE
        )
        if known is None:
            # From here on, the two programs count as equivalent: neither is recorded again.
            if not is_current():
                return False
            known = structure.in_double[len(leaves[0])] = (double, experiment.record())
        packed = experiment.packed(known[1])[0]
        batch = pytree.tree_unflatten([leaf.clone() for leaf in leaves], double.batch_spec)
        alone = train_alone(trial.task, model, batch, seed=0, lower=double.lower)
        check_same(packed, alone, tolerance=TOLERANCE)
    return True


def _agrees_whole(
    structure: Structure, trial: FusedTrial, state: Mapping[str, torch.Tensor]
) -> bool:
    batch = trial.batch_alone(None).double()
    with _in_double_for_a_while(trial.model, state) as model:
        packed = run_packed(_in_double(structure), [model], batch)[0]
        alone = train_alone(trial.task, model, batch, seed=0)
        check_same(packed, alone, tolerance=TOLERANCE)
    return True


@contextmanager
def _in_double_for_a_while(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], *, lower: Collection[str] = ()
) -> Iterator[torch.nn.Module]:
    """Give a module the given tensors in double precision, besides ``lower``, within the context.

    It is the module itself, since a copy may compute something else (hooks, object identities).
    """
    with exchanged(model, _doubled_state(state, lower=lower)), computing_products(model):
        yield model


def _doubled_state(
    state: Mapping[str, torch.Tensor], *, lower: Collection[str]
) -> dict[str, torch.Tensor]:
    return {
        name: cheap_copy(tensor) if name in lower else _double([tensor])[0]
        for name, tensor in state.items()
    }


def _in_double(structure: Structure) -> Structure:
    out = Structure(
        structure.task,
        doubled(copy_of(structure.model), besides=structure.held),
        batch_spec=structure.batch_spec,
        trained=structure.trained,
        held=structure.held,
        numbers=structure.numbers,
    )
    out.whole = structure.whole
    out.lower = frozenset() if structure.whole else structure.held
    return out


def _double(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf.double() if leaf.dtype.is_floating_point else leaf.clone() for leaf in leaves]


class StepCheck:
    """One trial's check of one step.

    Create it before the step, call ``note_gradients`` when the gradients are computed, then
    ``judge``, and ``release`` when the state before the step is no longer needed.

    Attributes:
        before: The trial's state before the step, its moments from ``note_gradients`` on; empty
            after ``release``.
        seconds: Seconds that the check has taken so far.
        solo_s: Seconds that the step took alone. None before ``judge``, if operations were shared,
            and for a first step, which takes longer than others because its optimizer has no state
            yet.
    """

    def __init__(self, trial: FusedTrial, rows: RowState, row: int) -> None:
        began = time.perf_counter()
        self.trial = trial
        self.solo_s: float | None = None
        self._rows = rows
        self._row = row
        self.before = OwnState(tensors=rows.copied_tensors(trial, row), moments={})
        self._gradients: dict[str, torch.Tensor] = {}
        self._alone: StepTaken | None = None
        self._num_numbers = 1
        self.seconds = time.perf_counter() - began

    def note_gradients(self) -> None:
        """Copy the block's gradients, since clipping and optimizers change them in place.

        Moments are copied now, too: computing gradients leaves them alone, and needs much memory.
        """
        began = time.perf_counter()
        moments = self._rows.copied_moments(self.trial, self._row)
        self.before = replace(self.before, moments=moments)
        self._gradients = self._rows.own_gradients(self.trial, self._row)
        self.seconds += time.perf_counter() - began

    def judge(
        self,
        loss: torch.Tensor,
        *,
        structure: Structure,
        is_current: Callable[[], bool] | None,
        operations: SharedOperations | None = None,
        keeps: bool = False,
    ) -> Difference | None:
        """Take the step alone and compare, before the trial moves on to its next step.

        Args:
            loss: The trial's loss in the block.
            structure: The structure that the block runs.
            is_current: Returns whether recording the step again gives the program that the block
                runs; None where nothing is recorded.
            operations: What other trials have computed alone, to be taken over. The step is not
                timed then.
            keeps: Whether to keep the step alone for ``repeats``.

        Returns:
            A difference that rounding does not explain; None if the check passes.
        """
        began = time.perf_counter()
        try:
            return self._judge(
                loss, structure=structure, is_current=is_current, operations=operations
            )
        finally:
            if not keeps:
                self._alone = None
            self.seconds += time.perf_counter() - began

    def release(self) -> None:
        """Free the copies of state and gradients; a check cannot be judged after this."""
        self.before = OwnState(tensors={}, moments={})
        self._gradients = {}
        self._alone = None

    def repeats(self, structure: Structure, operations: SharedOperations) -> bool:
        """Return whether the step alone is the same, to the last bit, with shared operations."""
        if self._alone is None:
            return False
        began = time.perf_counter()
        again = gradients_alone(
            self.trial.model,
            self.before.copied().tensors,
            compute_loss=partial(self._loss_alone, structure, operations),
        )
        self.seconds += time.perf_counter() - began
        return again.loss.equal(self._alone.loss) and all(
            (gradient is None) is (other is None)
            and (gradient is None or other is None or gradient.equal(other))
            for gradient, other in (
                (gradient, again.gradients.get(name))
                for name, gradient in self._alone.gradients.items()
            )
        )

    def _loss_alone(
        self, structure: Structure, operations: SharedOperations | None = None
    ) -> torch.Tensor:
        """Compute the loss of the trial's batch by its own module."""
        batch = self.trial.batch_alone(structure.batch_spec)
        leaves, spec = pytree.tree_flatten(batch)
        self._num_numbers = _num_numbers(leaves)
        self.trial.seed_alone()
        if operations is None:
            return self.trial.task.loss(self.trial.model, batch)
        shared = pytree.tree_unflatten(operations.lend(leaves), spec)
        try:
            with operations:
                return self.trial.task.loss(self.trial.model, shared)
        except RuntimeError:  # such as of memory that PyTorch cannot copy on a write
            self.trial.seed_alone()
            return self.trial.task.loss(self.trial.model, batch)

    def _judge(
        self,
        loss: torch.Tensor,
        *,
        structure: Structure,
        is_current: Callable[[], bool] | None,
        operations: SharedOperations | None,
    ) -> Difference | None:
        """Compare the trial's row of a packed step with the same step taken alone.

        Where both differ by no more than rounding may, or by as much as the trial alone differs
        from itself in double precision, they count as equal.

        Args:
            loss: The loss of the row.
            structure: The structure that was packed.
            is_current: Whether a comparison in double precision is still wanted; None: it is.
            operations: Results of the pack that the step alone may take over.

        Returns:
            The worst difference; None if there is none beyond rounding.
        """
        trial = self.trial
        packed = self._step_packed(loss)
        alone = self._alone = self._step_alone(structure, operations)
        left = step_differences(
            packed, alone, before=self.before.tensors, num_terms=self._num_numbers
        )
        is_tf32 = rounds_to_tf32(alone.tensors.values())
        if is_tf32 and trial.is_step_verified:
            left = [each for each in left if not structure.rounding.covers(each)]
        found = worst(left)
        if changed := trial.look_again():
            return Difference(
                what=f"{changed.name}, which computing the loss changes,",
                found=math.inf,
                allowed=0.0,
                is_rounding_possible=False,
            )
        if found is not None and not found.is_rounding_possible:
            return found
        in_double = partial(
            agrees_in_double, structure, trial, self.before.tensors, is_current=is_current
        )
        if found is None:
            # TF32 rounds so much that a small error of the pack could hide in it
            if trial.is_step_verified or not is_tf32 or in_double():
                return None
            return Difference(what="the step in double precision", found=math.inf, allowed=0.0)
        if not (in_double() and self._is_rounding(packed, alone, structure)):
            return found
        if is_tf32:
            structure.rounding.note(left)
        return None

    def _step_packed(self, loss: torch.Tensor) -> StepTaken:
        """Return what the trial's row of the packed step has left.

        Args:
            loss: The loss of the row.
        """
        return StepTaken(
            loss=loss.detach().clone(),
            gradients=self._gradients,
            tensors=own_tensors(self.trial.model),
            moments=moment_tensors(self._rows.moments(self.trial, self._row)),
        )

    def _step_alone(self, structure: Structure, operations: SharedOperations | None) -> StepTaken:
        """Take the step alone, from the state before it.

        Args:
            structure: The structure that was packed.
            operations: Results of the pack that the step may take over.
        """
        trial = self.trial
        trial.apply_options()
        alone = step_alone(
            trial.model,
            trial.optimizer,
            self.before.copied(),
            compute_loss=partial(self._loss_alone, structure, operations),
            gradients=self._gradients,
            clip=trial.options()[1].apply,
        )
        self.solo_s = None if alone.is_first or operations is not None else alone.seconds
        return alone

    def _is_rounding(self, packed: StepTaken, alone: StepTaken, structure: Structure) -> bool:
        """Return whether rounding explains all differences of the two steps."""
        model, before = self.trial.model, self.before.tensors
        return is_rounding(
            packed,
            alone,
            tensors=before,
            step=partial(gradients_alone, model, compute_loss=partial(self._loss_alone, structure)),
            in_double=partial(_in_double_alone, self.trial, before, structure=structure),
            num_terms=self._num_numbers,
        )


def _in_double_alone(
    trial: FusedTrial, state: Mapping[str, torch.Tensor], *, structure: Structure
) -> StepTaken:
    """Compute loss and gradients of a trial's current step alone, in double precision."""

    def compute_loss() -> torch.Tensor:
        batch = trial.batch_alone(structure.batch_spec)
        if structure.whole:
            batch = batch.double()
        else:
            leaves, spec = pytree.tree_flatten(batch)
            batch = pytree.tree_unflatten(_double(leaves), spec)
        trial.seed_alone()
        return trial.task.loss(trial.model, batch)

    lower = frozenset() if structure.whole else structure.held
    tensors = _doubled_state(state, lower=lower)
    stored = [tensor for name, tensor in tensors.items() if name in lower]
    with (
        computing_products(trial.model),
        upcast(stored),
        torch.autograd.set_multithreading_enabled(not stored),
    ):
        return gradients_alone(trial.model, tensors, compute_loss=compute_loss)


def _num_numbers(leaves: Sequence[Any]) -> int:
    """Return the count of numbers in a batch, at least 1."""
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) or 1
