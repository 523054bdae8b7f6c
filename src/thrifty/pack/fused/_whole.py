"""Whole batches: objects that all trials of a group see at once, such as a sampled subgraph.

Their shapes change from step to step, so nothing is recorded. Instead, the user's code runs on
packed tensors under autograd at each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from thrifty.pack.task._data import Source
from thrifty.pack.task._metrics import MetricSums

from ._feed import Feed, IteratorFeed
from ._member import FusedTrial
from ._randomness import Randomness
from ._row_state import RowState
from ._structure import Structure


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
    for batch, num in source.valid_batches(batch_size=structure.task.eval_batch_size):
        for rows, total in zip(parts, sums, strict=True):
            found = structure.metrics(batch, state=state.of_rows(rows), size=len(rows))
            total.add(found, num=num)
    return [
        means
        for rows, total in zip(parts, sums, strict=True)
        for means in total.rows(len(rows))
    ]


def _parts(rows: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))
