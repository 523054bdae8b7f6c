"""Evaluation of the trials of a block, and structures that run on whole batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from thrifty.core import plain_logger
from thrifty.pack._backend import Outcome, UnverifiedError, guarded
from thrifty.pack._state import Streams, borrowed_streams, seed_everything
from thrifty.pack.task._data import Source, num_valid_of, samples_of, valid_batches
from thrifty.pack.task._data_contents import Samples
from thrifty.pack.trial._plain_evaluation import MetricSums, has_weights, weight_of
from thrifty.pack.verify import (
    CheckBudget,
    SoloTimes,
    are_metrics_rounding,
    compare_metrics,
    exchanged,
    own_tensors,
    relative_tolerance,
    rounds_to_tf32,
)

from ._checking import metrics_agree_in_double
from ._fusable import UnfusableError
from ._member import Feed, FusedTrial, IteratorFeed
from ._padding import reads_outputs_alone
from ._programs import Programs
from ._randomness import Randomness
from ._row_state import RowState
from ._shared_operations import SharedOperations
from ._structure import Structure


logger = plain_logger(__name__)


def whole_step(
    structure: Structure, state: RowState, trials: Sequence[FusedTrial], *, at_once: int
) -> torch.Tensor:
    """Compute the gradients of the trials in the first rows.

    Trials that see the same batch are computed together, ``at_once`` trials at a time.

    Returns:
        Losses of the trials, ``[number of trials]``.
    """
    for trial in trials:
        trial.fetch()
    rows_of: dict[Feed, list[int]] = {}
    for row, trial in enumerate(trials):
        rows_of.setdefault(trial.feed, []).append(row)
    losses = torch.empty(len(trials), dtype=structure.layout.dtype, device=trials[0].device)
    for same in rows_of.values():
        for rows in _parts(same, at_once):
            losses[rows] = _step_of(structure, state, rows, [trials[row] for row in rows])
    return losses


def _step_of(
    structure: Structure, state: RowState, rows: Sequence[int], trials: Sequence[FusedTrial]
) -> torch.Tensor:
    """Compute the gradients of trials that see the same batch and return their losses."""
    feed = trials[0].feed
    assert isinstance(feed, IteratorFeed)
    (batch,) = feed.batch(trials[0].step_index)
    for trial in trials:
        trial.seed_step()
    randomness = Randomness([t.generator for t in trials], rates=[t.rates for t in trials])
    tensors = state.of_rows(rows)
    losses, *gradients = structure.run(batch, state=tensors, randomness=randomness)
    assert losses is not None
    state.take_gradients(rows, gradients)
    state.take_untrained(rows, tensors[len(gradients) :])
    return losses


def evaluate_whole(
    structure: Structure, state: RowState, source: Source, *, size: int, at_once: int
) -> Sequence[Mapping[str, float]]:
    """Return the metrics of the first ``size`` rows, computed ``at_once`` trials at a time."""
    parts = list(_parts(range(size), at_once))
    sums = [MetricSums() for _ in parts]
    for batch, num in valid_batches(source, batch_size=structure.task.eval_batch_size):
        weight = weight_of(structure.task, batch, num=num)
        for rows, total in zip(parts, sums, strict=True):
            found = structure.metrics(batch, state=state.of_rows(rows), size=len(rows))
            total.add(found, weight=weight)
    return [
        means for rows, total in zip(parts, sums, strict=True) for means in total.rows(len(rows))
    ]


def _parts(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))


MAX_ELEMENTS = 2**22
"""Elements of packed validation batches beyond which trials are evaluated one by one.

Beyond this size, evaluating all at once gains nothing.
"""

MAX_HEAD_ELEMENTS = 2**26
"""Elements of the largest value behind a kept trunk beyond which trials are evaluated one by one.

One by one, each trial computes the trunk again, so this pays up to a size that memory allows.
"""


MIN_IN_TURN = 3
"""The fewest trials that take turns, since one of them is also evaluated by itself."""


class Evaluation:
    """Evaluation of the trials of a block.

    Args:
        structure: The structure that the block runs.
        rows: The block's state.
        programs: Programs of the structure, bound to the rows.
        budget: Time budget of checks.
        solo_times: Collects the times of evaluations alone.
        at_once: Number of trials that are evaluated at once on whole batches.
    """

    def __init__(
        self,
        structure: Structure,
        rows: RowState,
        programs: Programs,
        *,
        budget: CheckBudget,
        solo_times: SoloTimes,
        at_once: int,
    ) -> None:
        self._structure = structure
        self._rows = rows
        self._programs = programs
        self._budget = budget
        self._solo_times = solo_times
        self._at_once = at_once

    def evaluate(
        self, trials: Sequence[FusedTrial], block: Sequence[FusedTrial]
    ) -> Mapping[FusedTrial, Outcome]:
        """Return the metrics of some trials of a block, or the error of each.

        Trials are evaluated all at once if the structure allows that and they make up most of the
        block, otherwise one by one. So are padded trials whose metrics may see the padding.
        """
        found = None
        together = [trial for trial in trials if not self._may_see_padding(trial)]
        if self._structure.fused_metrics and 2 * len(together) > len(block):
            verify = any(self._is_due(trial) for trial in together)
            found = self._together(together, block, verify=verify)

        alone: Mapping[FusedTrial, Outcome] = {}

        def outcome(trial: FusedTrial) -> Outcome:
            if found is None or trial not in together:
                return self._alone(trial)
            return self._checked(trial, found[block.index(trial)], block, alone.get(trial))

        goes_alone = found is None or any(t not in together or self._is_due(t) for t in trials)
        makes_room = goes_alone and not self._is_small(trials[0])
        with self._programs.without_buffers() if makes_room else nullcontext():
            if found is not None and self._programs.keeps_activations:
                alone = self._alone_in_turn([t for t in together if not t.is_evaluation_verified])
            return {trial: outcome(trial) for trial in trials}

    def _is_small(self, trial: FusedTrial) -> bool:
        """Return whether evaluating a trial alone takes far less memory than a step alone.

        Without gradients, as many samples as in a training batch do. Freeing the buffers of
        programs would take longer than such an evaluation: the system clears them when they return.
        """
        num = num_valid_of(trial.source)
        at_once = self._structure.task.eval_batch_size
        return num is not None and min(num, at_once) <= trial.batch_size(trial.plan_values)

    def _may_see_padding(self, trial: FusedTrial) -> bool:
        """Return whether metrics may depend on the zeros that a narrower trial is padded with.

        What reads outputs alone is proved not to before such a trial is put into a wider block
        (``fits_inside``).
        """
        return trial.is_narrow and not reads_outputs_alone(trial.task)

    def _is_due(self, trial: FusedTrial) -> bool:
        """Return whether to compare the metrics of a trial with those it has alone."""
        return not trial.is_evaluation_verified or self._budget.allows(trial.solo_evaluation_s)

    def _together(
        self, trials: Sequence[FusedTrial], block: Sequence[FusedTrial], *, verify: bool
    ) -> Sequence[Mapping[str, float]] | None:
        """Return the metrics of all rows of a block; None if they must be computed one by one."""
        one = trials[0]
        source = one.source
        if any(t.source is not source for t in block):
            return None
        if source.arrays is None and len({t.evaluation_seed for t in trials}) > 1:
            return None  # datasets may draw random numbers, and each trial has its own seed
        seed_everything(one.evaluation_seed)
        size = len(block)
        try:
            if self._structure.whole:
                return evaluate_whole(
                    self._structure, self._rows, source, size=size, at_once=self._at_once
                )
            return evaluate_packed(
                self._programs,
                source,
                size=size,
                batch_size=self._structure.task.eval_batch_size,
                weigh=self._weight if has_weights(self._structure.task) else None,
                verify=verify,
            )
        except UnfusableError as error:
            self._give_up(str(error))
            return None

    def _weight(self, leaves: Sequence[torch.Tensor]) -> float:
        """Return how much a validation batch counts, given its tensors."""
        task, spec = self._structure.task, self._structure.batch_spec
        return weight_of(task, pytree.tree_unflatten(list(leaves), spec), num=len(leaves[0]))

    def _checked(
        self,
        trial: FusedTrial,
        found: Mapping[str, float],
        block: Sequence[FusedTrial],
        alone: Outcome | None,
    ) -> Outcome:
        """Return a trial's metrics in the block, compared with those alone if a check is due.

        Args:
            trial: The trial.
            found: Its metrics in the block.
            block: The trials of the block.
            alone: Its metrics alone, if they are known already.
        """
        if not self._is_due(trial):
            return found
        began = time.perf_counter()
        if alone is None:
            alone = self._alone(trial)
        if isinstance(alone, Exception):
            return alone
        difference = self._difference(trial, found, alone)
        self._budget.spend(time.perf_counter() - began)
        if not difference:
            trial.is_evaluation_verified = True
            return alone
        self._give_up(difference)
        if not trial.is_evaluation_verified:
            # its first evaluation, so no earlier one can be wrong; in turn, this one might be
            return self._alone(trial)
        for other in block:
            other.is_evaluation_verified = False
        return UnverifiedError(difference, mismatch=False)

    def _difference(
        self, trial: FusedTrial, found: Mapping[str, float], alone: Mapping[str, float]
    ) -> str:
        """Return how a trial's metrics in the block differ from those alone; "" if they do not."""
        tf32 = rounds_to_tf32(trial.model.parameters())
        tolerance = relative_tolerance(
            self._structure.layout.dtype, num_terms=trial.source.num_train, tf32=tf32
        )
        difference = compare_metrics(found, alone, tolerance=tolerance)
        if difference is not None:
            return "" if self._is_tie(trial, found, alone, tolerance=tolerance) else str(difference)
        # TF32 rounds so much that a small error of the pack could hide in it
        if tf32 and not trial.is_evaluation_verified and not self._agree_in_double(trial):
            return "they differ in double precision"
        return ""

    def _agree_in_double(self, trial: FusedTrial) -> bool:
        return metrics_agree_in_double(
            self._structure, trial, is_current=self._programs.evaluations_are_current
        )

    def _alone(self, trial: FusedTrial) -> Outcome:
        """Evaluate a trial alone, record how long that took, and return its metrics."""
        began = time.perf_counter()
        outcome = guarded(partial(trial.evaluate, trial.plan.epoch))
        if isinstance(outcome, Mapping):
            trial.solo_evaluation_s = time.perf_counter() - began
            self._solo_times.note_evaluation(trial.time_key, trial.solo_evaluation_s)
        return outcome

    def _alone_in_turn(self, trials: Sequence[FusedTrial]) -> Mapping[FusedTrial, Outcome]:
        """Evaluate trials over one trunk alone, but compute the trunk once for all of them.

        The first trial is also evaluated by itself, which times it; if that gives other metrics,
        even by a bit, none of these count. Once it gave the same, it is done again for later trials
        of the structure as often as the budget of checks allows.

        Returns:
            The metrics of the trials that could be evaluated like this.
        """
        if len(trials) < MIN_IN_TURN:
            return {}
        known_s = self._structure.evaluation_s
        watch = trials[0].new_watch()
        first: Outcome | None = None
        if known_s is None or self._budget.allows(known_s):
            first = self._alone(trials[0])
            if watch.changed():
                return {trials[0]: first}  # in turn, trials could see what another one has changed
        began = time.perf_counter()
        found = evaluate_in_turn([*trials[1:], trials[0]])
        self._budget.spend(time.perf_counter() - began)
        if first is None and known_s is not None and not watch.changed():
            for trial in found:
                trial.solo_evaluation_s = known_s
            return found
        again = found.pop(trials[0], None)
        if again is None or not isinstance(first, Mapping) or not _is_same(again, first):
            logger.info("trials over one trunk are evaluated alone, one after the other")
            self._structure.evaluation_s = None
            return {} if first is None else {trials[0]: first}
        self._structure.evaluation_s = trials[0].solo_evaluation_s
        for trial in found:
            trial.solo_evaluation_s = trials[0].solo_evaluation_s
        return {trials[0]: first, **found}

    def _is_tie(
        self,
        trial: FusedTrial,
        found: Mapping[str, float],
        alone: Mapping[str, float],
        *,
        tolerance: float,
    ) -> bool:
        """Return whether only rounding makes metrics differ.

        This happens if two outputs are equal except for their last bits.
        """

        def evaluate(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
            with exchanged(trial.model, tensors):
                return trial.evaluate(trial.plan.epoch)

        return self._agree_in_double(trial) and are_metrics_rounding(
            found, alone, tensors=own_tensors(trial.model), evaluate=evaluate, tolerance=tolerance
        )

    def _give_up(self, reason: str) -> None:
        """Evaluate the trials of this structure one by one from now on, and log why."""
        self._structure.fused_metrics = False
        logger.warning(
            "the metrics of %s are computed for one trial after the other: %s",
            type(self._structure.task).__name__,
            reason,
        )


def evaluate_in_turn(trials: Sequence[FusedTrial]) -> dict[FusedTrial, Mapping[str, float]]:
    """Evaluate trials alone, each batch by all of them, sharing operations.

    Returns:
        The metrics of each trial, without those that raised an error or have averaged weights.
    """
    running = {
        trial: parts
        for trial in trials
        if (parts := trial.evaluating(trial.plan.epoch)) is not None
    }
    streams: dict[FusedTrial, Streams] = {}
    out: dict[FusedTrial, Mapping[str, float]] = {}
    with borrowed_streams():
        while running:
            operations = SharedOperations(trials[0].device)
            for trial, parts in list(running.items()):
                if trial in streams:
                    streams[trial].restore()
                try:
                    leaves, spec = pytree.tree_flatten(next(parts))
                    batch = pytree.tree_unflatten(operations.lend(leaves), spec)
                    with operations:
                        parts.send(batch)
                except StopIteration as end:
                    out[trial] = end.value
                    del running[trial]
                except Exception:  # noqa: BLE001
                    del running[trial]
                streams[trial] = Streams.now()
    return out


def _is_same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(
        float(value).hex() == float(other[name]).hex() for name, value in one.items()
    )


def evaluate_packed(
    programs: Programs,
    source: Source,
    *,
    size: int,
    batch_size: int,
    weigh: Callable[[Sequence[torch.Tensor]], float] | None = None,
    verify: bool = True,
) -> Sequence[Mapping[str, float]] | None:
    """Return the metrics of the first ``size`` rows; None if batches are too large for this to pay.

    Args:
        programs: The programs of the block.
        source: The data.
        size: Number of rows.
        batch_size: Number of samples in a validation batch.
        weigh: Returns how much a batch counts, given its tensors; None: its number of samples.
        verify: Whether to compare kept activations with new ones.

    Raises:
        UnfusableError: The metrics cannot be computed for all trials at once.
    """
    sums = MetricSums()
    _, samples = samples_of(source)
    for batch, num in _batches(source, samples, batch_size=batch_size):
        arrays = batch if samples is None else samples.arrays
        shapes = tuple(
            (tuple(a.shape) if samples is None else (num, *a.shape[1:]), a.dtype) for a in arrays
        )
        is_large = size * sum(math.prod(shape) for shape, _ in shapes) > MAX_ELEMENTS
        if is_large and programs.head_elements(size, num) > MAX_HEAD_ELEMENTS:
            return None
        bound = programs.evaluation(size, shapes)
        if samples is None:
            for leaf, target in zip(arrays, bound.batch, strict=True):
                target.copy_(leaf)
        else:
            bound.gather(samples, batch, verify=verify)
        with torch.no_grad():
            tape = programs.prepare(bound)
            if is_large and bound.trunk is None:
                return None
            bound.run()
        weight: float = num
        if weigh is not None:
            weight = weigh(arrays if samples is None else [a[batch] for a in arrays])
        sums.add(dict(zip(bound.names, tape.outputs, strict=True)), weight=weight)
    return sums.rows(size)


def _batches(source: Source, samples: Samples | None, *, batch_size: int) -> Iterator[Any]:
    """Return the validation batches with their sizes; of samples in memory only which they are."""
    if samples is None:
        for batch, num in valid_batches(source, batch_size=batch_size):
            leaves = pytree.tree_leaves(batch)
            yield [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], num
        return
    all_rows = torch.arange(len(samples), device=samples.arrays[0].device)
    for start in range(0, len(samples), batch_size):
        index = all_rows[start : start + batch_size]
        yield index, len(index)
