"""Epochs of a number of optimizer steps: which batches of which passes over the data they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Protocol, runtime_checkable

import torch

from thrifty.core import TaskError

from ._data import (
    Batch,
    PassPart,
    PassSource,
    Source,
    epoch_order,
    is_ours,
    steps_of,
    train_batches,
)


@runtime_checkable
class StepSource(Protocol):
    """A source of thrifty that makes the batches of an epoch by their numbers of steps."""

    def epoch_length(self, *, seed: int, batch_size: int, num_steps: int | None) -> int:
        """Return how many steps an epoch has."""
        ...

    def epoch_batches(
        self, *, seed: int, epoch: int, batch_size: int, num_steps: int | None
    ) -> Iterator[Batch]:
        """Return the training batches of an epoch."""
        ...


def epoch_length(source: Source, *, seed: int, batch_size: int, num_steps: int | None) -> int:
    """Return how many steps an epoch has. The arguments are those of ``epoch_batches``.

    Raises:
        TaskError: It has none, because no batch is full, or the data say no length.
    """
    if is_ours(source) and isinstance(source, StepSource):
        return source.epoch_length(seed=seed, batch_size=batch_size, num_steps=num_steps)
    per_pass = steps_of(source, batch_size)
    return num_steps or per_pass


def parts_of_epoch(epoch: int, *, num_steps: int, steps_per_pass: int) -> list[PassPart]:
    """Return the parts of passes that an epoch of ``num_steps`` batches has.

    Step ``s`` of a run is batch ``s % steps_per_pass`` of pass ``s // steps_per_pass``, so the
    answer depends on nothing that earlier epochs did.

    >>> [(p.number, p.start, p.stop) for p in parts_of_epoch(1, num_steps=4, steps_per_pass=3)]
    [(1, 1, 3), (2, 0, 2)]
    """
    parts = []
    step, end = epoch * num_steps, (epoch + 1) * num_steps
    while step < end:
        number, start = divmod(step, steps_per_pass)
        stop = min(steps_per_pass, start + end - step)
        parts.append(PassPart(number=number, start=start, stop=stop, is_end=stop == steps_per_pass))
        step += stop - start
    return parts


def epoch_batches(
    source: Source, *, seed: int, epoch: int, batch_size: int, num_steps: int | None
) -> Iterator[Batch]:
    """Return the training batches of an epoch; changing one changes nothing in the source.

    Args:
        source: The data.
        seed: The seed of the trial.
        epoch: The epoch, from 0.
        batch_size: The number of rows of a batch.
        num_steps: How many steps an epoch has; None if it is a pass over the data.
    """
    if is_ours(source) and isinstance(source, StepSource):
        return source.epoch_batches(
            seed=seed, epoch=epoch, batch_size=batch_size, num_steps=num_steps
        )
    if num_steps is None:
        return train_batches(source, seed=seed, epoch=epoch, batch_size=batch_size)
    per_pass = steps_of(source, batch_size)
    parts = parts_of_epoch(epoch, num_steps=num_steps, steps_per_pass=per_pass)
    if is_ours(source) and isinstance(source, PassSource):
        return source.batches_of(parts, seed=seed, batch_size=batch_size)
    return _read(source, parts, seed=seed, batch_size=batch_size)


def _read(
    source: Source, parts: Sequence[PassPart], *, seed: int, batch_size: int
) -> Iterator[Batch]:
    """Yield the batches of parts of passes that have to be read from their beginnings.

    Raises:
        TaskError: A pass has fewer or more batches than the source says.
    """
    for part in parts:
        batches = train_batches(source, seed=seed, epoch=part.number, batch_size=batch_size)
        num = sum(1 for _ in islice(batches, part.start))
        for batch in islice(batches, part.stop - part.start):
            num += 1
            yield batch
        if num < part.stop or (part.is_end and next(batches, None) is not None):
            has = "fewer" if num < part.stop else "more"
            raise TaskError(
                f"steps_per_epoch: a pass over the data has {has} than the "
                f"{steps_of(source, batch_size)} batches that num_train={source.num_train} and "
                f"batch_size={batch_size} say, so epochs cannot be counted in steps; let "
                f"{type(source).__name__} yield as many, or leave steps_per_epoch out"
            )


def order_of_epoch(
    source: Source, *, seed: int, epoch: int, batch_size: int, num_steps: int | None
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the order of an epoch's rows, and how many of them each batch has.

    The arguments are those of ``epoch_batches``; the source has its arrays in memory.
    """
    num = source.num_train
    per_pass = steps_of(source, batch_size)
    last = num - (per_pass - 1) * batch_size
    if num_steps is None:
        return epoch_order(num, seed=seed, epoch=epoch), (*[batch_size] * (per_pass - 1), last)
    rows: list[torch.Tensor] = []
    sizes: list[int] = []
    for part in parts_of_epoch(epoch, num_steps=num_steps, steps_per_pass=per_pass):
        order = epoch_order(num, seed=seed, epoch=part.number)
        rows.append(order[part.start * batch_size : part.stop * batch_size])
        sizes += [batch_size] * (part.stop - part.start)
        if part.is_end:
            sizes[-1] = last
    return torch.cat(rows), tuple(sizes)


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Return where each batch begins in the order of an epoch's rows.

    >>> offsets_of([8, 8, 4])
    [0, 8, 16, 20]
    """
    return [0, *accumulate(sizes)]
