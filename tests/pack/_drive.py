"""A driver that runs back-ends as a worker does, and solo training for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.devices import here
from thrifty.pack import Backend, Member, SoloBackend, State, borrowed_streams
from thrifty.run._alone import epoch_plan
from thrifty.space import Timeline


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial to train.

    ``config`` may have schedules, which span ``run_epochs``, the length of the whole run. Training
    starts at epoch ``start``, from ``state`` if given.
    """

    config: Mapping[str, Any]
    seed: int = 0
    epochs: int = 3
    start: int = 0
    state: State | None = None
    run_epochs: int = 20

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.config, epochs=self.run_epochs)

    @property
    def member(self) -> Member:
        timeline = self.timeline
        return Member(
            values=timeline.at(self.start),
            seed=self.seed,
            epoch=self.start,
            state=self.state,
            first=timeline.at(0),
        )


@dataclass(kw_only=True)
class Result:
    """The result of a trial: its metrics by epoch, and its final state or its error."""

    metrics: list[Mapping[str, float]] = field(default_factory=list)
    state: State | None = None
    error: Exception | None = None


def together(backend: Backend, trials, *, at_once: int | None = None, slots=None):
    """Train trials, ``at_once`` at a time (default: all); the next takes the first free slot."""
    slots = list(range(at_once or len(trials))) if slots is None else list(slots)
    results = [Result() for _ in trials]
    waiting = list(range(len(trials)))
    where: dict[int, int] = {}
    new: dict[int, int] = {}  # slot -> next epoch to start
    with borrowed_streams():
        while waiting or where:
            while waiting and slots:
                slot, number = slots.pop(0), waiting.pop(0)
                backend.put(slot, trials[number].member)
                where[slot], new[slot] = number, trials[number].start
            plans = {
                slot: epoch_plan(backend, trials[where[slot]].timeline, epoch=epoch, slot=slot)
                for slot, epoch in new.items()
            }
            at = {slot: trials[n].start + len(results[n].metrics) for slot, n in where.items()}
            new = {}
            outcomes = backend.step(plans)
            assert outcomes, "no epoch has ended"
            for slot, outcome in outcomes.items():
                result, trial = results[where[slot]], trials[where[slot]]
                if isinstance(outcome, Exception):
                    result.error = outcome
                else:
                    result.metrics.append(outcome)
                    if at[slot] + 1 < trial.epochs:
                        new[slot] = at[slot] + 1
                        continue
                    result.state = backend.state(slot)
                backend.release(slot)
                del where[slot]
                slots.append(slot)
    return results


def alone(task, trials):
    """Train the same trials, each by itself in plain PyTorch."""
    return [together(SoloBackend(task, device=here()), [trial])[0] for trial in trials]


def assert_same(found, wanted, *, tolerance: float = 0.0) -> None:
    """Assert that metrics and states agree; with tolerance 0, bit for bit."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert type(one.error) is type(other.error)
        assert len(one.metrics) == len(other.metrics)
        for a, b in zip(one.metrics, other.metrics, strict=True):
            assert a == (pytest.approx(b, rel=tolerance, abs=tolerance) if tolerance else b)
        assert (one.state is None) == (other.state is None)
        if one.state is not None:
            assert_same_state(one.state, other.state, tolerance=tolerance)


def assert_same_state(found: State, wanted: State, *, tolerance: float = 0.0) -> None:
    assert found.tree == wanted.tree
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        other = found.tensors[name]
        assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype), name
        if not tolerance or not tensor.numel():
            assert torch.equal(other.cpu(), tensor.cpu()), name
            continue
        scale = max(1.0, float(tensor.abs().max())) if tensor.numel() else 1.0
        difference = float((other.cpu().double() - tensor.cpu().double()).abs().max())
        assert difference <= tolerance * scale, f"{name} differs by {difference}"
