"""Steps of a task: the options of each, and epochs of a number of steps.

A task says how a step is taken: its precision, the parts of a batch, averages, its own step. If an
epoch is a number of optimizer steps, this module says which batches of which passes it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch.utils import _pytree as pytree

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


Precision = Literal["fp32", "bf16", "bf16-mixed", "fp16-mixed"]


@dataclass(frozen=True, slots=True)
class EMA:
    """An exponential moving average of the weights, updated after each optimizer step.

    Each metric gets a twin, computed with the averaged weights: ``ema_loss`` beside ``loss``. The
    average begins with the weights after the first step. Buffers, such as the running statistics
    of batch normalisation, are those of the model.

    Attributes:
        decay: How much of the average stays in each step, in (0, 1).

    Raises:
        TaskError: ``decay`` is not in (0, 1).

    >>> EMA(0.999)
    EMA(decay=0.999)
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not (isinstance(self.decay, int | float) and 0 < self.decay < 1):
            raise TaskError(f"EMA(decay={self.decay!r}): decay must be a number between 0 and 1")

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics."""
        return "ema_"


@dataclass(frozen=True, slots=True)
class SWA:
    """The mean of the weights at the ends of epochs (stochastic weight averaging).

    Each metric gets a twin, computed with the averaged weights: ``swa_loss`` beside ``loss``. Until
    the first epoch that counts, both are equal. Buffers, such as the running statistics of batch
    normalisation, are those of the model.

    Attributes:
        start: The number of epochs after which the first weights are taken.
        every: How many epochs lie between two weights that are taken.

    Raises:
        TaskError: One of them is not a whole number, 1 or more.

    References:
        Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization",
        UAI 2018.

    >>> [epochs for epochs in range(1, 20) if SWA(start=10, every=4).takes(epochs)]
    [10, 14, 18]
    """

    start: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        for name in ("start", "every"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TaskError(f"SWA({name}={value!r}): {name} must be a whole number, 1 or more")

    @property
    def prefix(self) -> str:
        """The beginning of the names of its metrics."""
        return "swa_"

    def takes(self, epochs: int) -> bool:
        """Return whether the average includes the weights after this number of epochs."""
        return epochs >= self.start and (epochs - self.start) % self.every == 0


Average = EMA | SWA


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The attributes of a task that change how a step is taken.

    Attributes:
        precision: The precision of the forward and backward passes.
        accumulate: The number of parts of a batch, or the name of a hyper-parameter.
        averages: The averages of the weights that are evaluated beside them.
        compile: Whether the model is compiled.
        owns_step: Whether the task takes its steps itself.
        weighs: Whether the task says how much each part of a batch counts.
        steps_per_epoch: How many steps an epoch has; None if it is a pass over the data.
    """

    precision: Precision
    accumulate: int | str
    averages: tuple[Average, ...]
    compile: bool
    owns_step: bool
    weighs: bool
    steps_per_epoch: int | None = None

    @property
    def why_special(self) -> str:
        """Why the step is not the usual one; "" if it is."""
        reasons = (
            (self.owns_step, "the task takes its steps itself (step)"),
            (self.precision != "fp32", f"its precision is {self.precision!r}"),
            (self.accumulate != 1, f"it accumulates gradients (accumulate={self.accumulate!r})"),
            (self.compile, "its model is compiled"),
            (bool(self.averages), "it averages its weights"),
        )
        return next((reason for holds, reason in reasons if holds), "")


def step_options(task: Any, *, owns_step: bool, weighs: bool) -> StepOptions:
    """Return the checked options of a task.

    Raises:
        TaskError: An attribute has a value that is not among its options, or two exclude each
            other.
    """
    name = type(task).__name__
    precision, accumulate = task.precision, task.accumulate
    if precision not in get_args(Precision):
        raise TaskError(
            f"{name}.precision is {precision!r}; it must be one of "
            f"{', '.join(map(repr, get_args(Precision)))}"
        )
    if not isinstance(accumulate, str):
        check_parts(accumulate, task=name)
    if not isinstance(task.compile, bool):
        raise TaskError(f"{name}.compile is {task.compile!r}; it must be True or False")
    if owns_step and precision in ("bf16-mixed", "fp16-mixed"):
        raise TaskError(
            f"{name} has a step of its own and precision={precision!r}; leave precision out, and "
            "use torch.autocast in step around the forward passes"
        )
    if owns_step and accumulate != 1:
        raise TaskError(
            f"{name} has a step of its own and accumulate={accumulate!r}; leave accumulate out, "
            "and split the batch in step"
        )
    return StepOptions(
        precision=precision,
        accumulate=accumulate,
        averages=_averages(task.average, task=name),
        compile=task.compile,
        owns_step=owns_step,
        weighs=weighs,
        steps_per_epoch=check_steps_per_epoch(task.steps_per_epoch, task=name),
    )


def check_steps_per_epoch(steps: Any, *, task: str) -> int | None:
    """Return how many steps an epoch has; None if it is a pass over the data.

    Raises:
        TaskError: It is neither None nor a whole number, 1 or more.
    """
    is_number = isinstance(steps, int | float) and not isinstance(steps, bool)
    if steps is None or (is_number and steps >= 1 and int(steps) == steps):
        return None if steps is None else int(steps)
    raise TaskError(
        f"{task}.steps_per_epoch is {steps!r}; it must be a whole number of optimizer steps, 1 or "
        "more, or None for a pass over the data"
    )


def _averages(given: Any, *, task: str) -> tuple[Average, ...]:
    averages = () if given is None else (given,) if isinstance(given, Average) else given
    found = tuple(averages) if isinstance(averages, list | tuple) else (averages,)
    for each in found:
        if not isinstance(each, Average):
            raise TaskError(
                f"{task}.average is {given!r}; it must be thrifty.EMA(...), thrifty.SWA(...) or a "
                "list of one of each"
            )
    if len({type(each) for each in found}) < len(found):
        raise TaskError(f"{task}.average has two averages of one kind: {given!r}; keep one of them")
    return found


def check_parts(parts: Any, *, task: str) -> int:
    """Return the number of parts of a batch.

    Raises:
        TaskError: It is not a whole number, 1 or more.
    """
    is_number = isinstance(parts, int | float) and not isinstance(parts, bool)
    if not is_number or int(parts) != parts or parts < 1:
        raise TaskError(f"{task}.accumulate is {parts!r}; it must be a whole number, 1 or more")
    return int(parts)


def parts_of_batch(
    task: Any, options: StepOptions, values: Mapping[str, Any], *, batch_size: int
) -> int:
    """Return into how many parts a batch is split.

    Raises:
        TaskError: It is no whole number, does not divide the batch size, or follows an unknown
            hyper-parameter.
    """
    name, parts = type(task).__name__, options.accumulate
    if isinstance(parts, str):
        if parts not in values:
            raise TaskError(
                f"the task's accumulate follows hyper-parameter {parts!r}, which the search space "
                f"does not have (it has: {', '.join(values)}); add it or give accumulate a number"
            )
        parts = values[parts]
    num = check_parts(parts, task=name)
    if batch_size % num:
        fits = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        near = min(fits, key=lambda n: abs(n - num))
        raise TaskError(
            f"{name} has batch_size {batch_size} and accumulate {num}, which does not divide it; "
            f"use {near}, for example (batch_size is the whole batch, which accumulate splits)"
        )
    return num


def split_batch(batch: Any, size: int, *, task: str) -> list[tuple[Any, int]]:
    """Return the parts of a batch, of ``size`` rows each, with their numbers of rows.

    Every tensor in the batch has the rows as its first dimension. The last part may be smaller.

    Raises:
        TaskError: The batch holds no tensors, or tensors with different numbers of rows.
    """
    leaves, tree = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = {len(tensor) for tensor in tensors}
    if len(rows) != 1 or len(tensors) < len(leaves):
        found = f"tensors of {sorted(rows)} rows" if len(rows) > 1 else type(batch).__name__
        raise TaskError(
            f"{task}.accumulate splits a batch by its rows, which needs tensors with the same "
            f"number of rows in tuples, lists or dicts; the batch has {found}. Leave accumulate "
            "out, or give such batches"
        )
    (num,) = rows
    out = []
    for start in range(0, num, size):
        part = [leaf[start : start + size] for leaf in leaves]
        out.append((pytree.tree_unflatten(part, tree), min(size, num - start)))
    return out


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch whose floating-point tensors have a dtype."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch
    )


def with_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return metrics whose names begin with a prefix."""
    return {prefix + name: value for name, value in metrics.items()}


def names_with_averages(names: Iterable[str], options: StepOptions) -> frozenset[str]:
    """Return the names of metrics, and those of their twins with averaged weights."""
    prefixes = ("", *(average.prefix for average in options.averages))
    return frozenset(prefix + name for prefix in prefixes for name in names)


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
