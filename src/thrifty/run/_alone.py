"""Training of one trial alone, the reference for shared and packed ones, and what it uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from thrifty.core import DeviceUse, replica_seed
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
    """Train one configuration up to ``epochs`` and return its back-end and each epoch's metrics.

    ``state`` is ``(epoch, state)`` to start from; None starts at epoch 0. ``threads`` is the number
    of CPU threads to use.
    """
    backend = SoloBackend(task, device=device)
    start, known = (0, None) if state is None else state
    metrics: list[Mapping[str, float]] = []
    with borrowed_streams(), cpu_threads(threads):
        member = member_at(
            timeline, seed=seed, epoch=min(start, timeline.epochs - 1), stop=epochs, state=known
        )
        if start < epochs:
            backend.put(0, member)
        else:
            backend.restore(replace(member, values=timeline.at(max(start - 1, 0))))
        for epoch in range(start, epochs):
            outcome = backend.step({0: epoch_plan(backend, timeline, epoch=epoch, slot=0)})[0]
            if isinstance(outcome, Exception):
                raise outcome
            metrics.append(outcome)
    return backend, metrics


def member_at(
    timeline: Timeline,
    *,
    seed: int,
    epoch: int,
    stop: int,
    state: State | None = None,
    alone: bool = False,
) -> Member:
    """Return a trial that starts at ``epoch`` of a timeline and trains at least until ``stop``.

    ``seed`` is the study's. The trial is trained with the seed of the timeline's replica.
    """
    return Member(
        values=timeline.at(epoch),
        seed=replica_seed(seed, timeline.replica),
        epoch=epoch,
        state=state,
        first=timeline.at(0),
        moving=timeline.moving(stop=stop),
        alone=alone,
        stop=stop,
    )


def epoch_plan(
    backend: Backend,
    timeline: Timeline,
    *,
    epoch: int,
    slot: int,
    verify: bool = True,
    stop: int | None = None,
) -> EpochPlan:
    """Return the hyper-parameter values of one epoch, per step for those that change within it.

    ``verify`` and ``stop`` are passed on to ``EpochPlan``.
    """
    plan = plan_of(partial(backend.num_steps, slot), timeline, epoch=epoch)
    return replace(plan, verify=verify, stop=stop)


def plan_of(
    num_steps: Callable[[Mapping[str, Any]], int], timeline: Timeline, *, epoch: int
) -> EpochPlan:
    """Return the ``epoch_plan`` of a trial that is in no back-end, given its ``num_steps``."""
    values = timeline.at(epoch)
    steps = num_steps(values)
    moving = {
        name: now
        for name in timeline.config
        if isinstance(now := timeline.values(name, epoch, num_steps=steps), list)
    }
    return EpochPlan(epoch=epoch, values=values, moving=moving)


FINISH = "__thrifty_finished__"
"""The method of a task that takes out of a trained model what only training needs."""


def model_of(backend: SoloBackend, *, average: str | None = None) -> torch.nn.Module:
    """Return the trained model, on the CPU and in evaluation mode.

    Args:
        backend: The back-end that trained it.
        average: Which average of its weights to take; None for the weights themselves.

    Raises:
        TaskError: There is no such average.
    """
    model = backend.model if average is None else backend.averaged_model(average)
    finish = getattr(backend.trial.task, FINISH, None)
    return (model if finish is None else finish(model)).cpu().eval()


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Set the number of PyTorch's CPU threads within the context; None leaves it unchanged."""
    before = torch.get_num_threads()
    if threads not in (None, before):
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def device_use(device: torch.device) -> DeviceUse:
    """Return the device of a worker and the peak memory of its process so far.

    On a GPU, this is what PyTorch has allocated there. Elsewhere, it is the resident memory of the
    process, with everything else that the process holds. The peak is never reset, as user code may
    read it, too, so it is one of the worker and not of a stage.

    >>> device_use(torch.device("cpu")).device
    'cpu'
    """
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        name = f"{device} ({torch.cuda.get_device_name(device)})"
        return DeviceUse(device=name, peak_bytes=torch.cuda.max_memory_allocated(device))
    is_cpu = device.type == "cpu"
    return DeviceUse(device=str(device), peak_bytes=_peak_resident_bytes() if is_cpu else None)


def _peak_resident_bytes() -> int | None:
    """Return the peak resident memory of this process; None if the system does not say it."""
    try:
        resource = importlib.import_module("resource")  # which Windows lacks
    except ImportError:
        return None
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024
