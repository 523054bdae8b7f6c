"""One trial, alone, from the beginning: what every shared or packed trial has to equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from thrifty.pack import (
    Backend,
    EpochPlan,
    Member,
    SoloBackend,
    State,
    Task,
    Trainable,
    borrowed_streams,
)
from thrifty.space import Timeline


def train_alone(
    task: Task | Trainable,
    timeline: Timeline,
    *,
    seed: int,
    epochs: int,
    device: str = "cpu",
    state: tuple[int, State] | None = None,
    threads: int | None = None,
) -> tuple[SoloBackend, list[Mapping[str, float]]]:
    """Trains one configuration up to ``epochs``; the back-end that holds it, and the metrics of each epoch.

    ``state`` is ``(epoch, state)`` to start from instead of the beginning; ``threads`` the CPU threads to use.
    """
    backend = SoloBackend(task, device=device)
    first, known = (0, None) if state is None else state
    metrics: list[Mapping[str, float]] = []
    with borrowed_streams(), cpu_threads(threads):
        values = timeline.at(min(first, timeline.epochs - 1))
        backend.stack(0, Member(values=values, seed=seed, epoch=first, state=known))
        for epoch in range(first, epochs):
            outcome = backend.step({0: epoch_plan(backend, timeline, epoch=epoch, slot=0)})[0]
            if isinstance(outcome, Exception):
                raise outcome
            metrics.append(outcome)
    return backend, metrics


def epoch_plan(backend: Backend, timeline: Timeline, *, epoch: int, slot: int) -> EpochPlan:
    """The values of all hyper-parameters in one epoch, at each step for those that move within it."""
    values = timeline.at(epoch)
    num_steps = backend.num_steps(slot, values)
    moving = {
        name: now
        for name in timeline.config
        if isinstance(now := timeline.values(name, epoch, num_steps=num_steps), list)
    }
    return EpochPlan(epoch=epoch, values=values, moving=moving)


def model_of(backend: SoloBackend) -> torch.nn.Module:
    """The trained model, on the CPU, in evaluation mode."""
    return backend.model.cpu().eval()


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Within, PyTorch uses so many CPU threads; None: as many as before."""
    before = torch.get_num_threads()
    if threads not in (None, before):
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
