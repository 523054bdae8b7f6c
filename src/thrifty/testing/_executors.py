"""What every executor must do, as checks to run on a new one."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thrifty.core import CheckpointRef, EpochDone, Event, StageDone, StageFailed
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, Executor, ExecutorConfig, state_from_arrays, train_alone
from thrifty.space import MultiStep, Timeline
from thrifty.store import CheckpointFolder

from ._tasks import FaultyTask, LineTask


Check = Callable[[ExecutorConfig], None]
Metrics = Mapping[str, float]

POLL_S = 30.0
"""Longer than a worker process takes to start: a silent executor fails the check instead of hanging it."""


def check_metrics_are_those_of_a_trial_alone(config: ExecutorConfig) -> None:
    """Training a chain gives the metrics that the same timeline gives alone."""
    timeline = _timeline({"lr": MultiStep([0.1, 0.01], milestones=[2])})
    _, alone = train_alone(LineTask(), timeline, seed=3, epochs=4)
    with _opened(config, LineTask()) as (executor, _):
        events = _train(executor, _chain(timeline, [(0, 2), (2, 4)]))
    _assert_same([e.metrics for e in events if isinstance(e, EpochDone)], alone)
    assert [(e.start, e.stop) for e in events if isinstance(e, StageDone)] == [(0, 2), (2, 4)]


def check_checkpoints_can_be_resumed(config: ExecutorConfig) -> None:
    """A chain that starts from a checkpoint goes on exactly where the checkpoint was made."""
    timeline = _timeline({"lr": 0.1, "width": 8, "dropout": 0.3})
    _, alone = train_alone(LineTask(), timeline, seed=3, epochs=5)
    with _opened(config, LineTask()) as (executor, folder):
        first = _train(executor, _chain(timeline, [(0, 2)]))
        kept = next(e.checkpoint for e in first if isinstance(e, StageDone))
        assert kept is not None
        assert state_from_arrays(*folder.read(kept)).tensors
        rest = _train(executor, _chain(timeline, [(2, 5)], resume=kept), number=1)
    _assert_same([e.metrics for e in rest if isinstance(e, EpochDone)], alone[2:])


def check_user_errors_become_events(config: ExecutorConfig) -> None:
    """An exception in the task's code fails its stage with a traceback; the worker lives on."""
    faulty = _timeline({"lr": 0.1, "fault": MultiStep(["", "raise"], milestones=[2])})
    with _opened(config, FaultyTask()) as (executor, _):
        events = _train(executor, _chain(faulty, [(0, 1), (1, 4)]))
        again = _train(executor, _chain(_timeline({"lr": 0.1}), [(0, 1)]), number=1)
    (failed,) = [e for e in events if isinstance(e, StageFailed)]
    assert (failed.kind, failed.epoch) == ("error", 2)
    assert "the task's own error" in failed.traceback
    assert [e.stop for e in events if isinstance(e, StageDone)] == [1]
    assert any(isinstance(e, StageDone) for e in again)


def check_divergence_is_an_event(config: ExecutorConfig) -> None:
    """A loss that is not finite fails its stage, as diverged."""
    faulty = _timeline({"lr": 0.1, "fault": MultiStep(["", "nan"], milestones=[1])})
    with _opened(config, FaultyTask()) as (executor, _):
        events = _train(executor, _chain(faulty, [(0, 4)]))
    (failed,) = [e for e in events if isinstance(e, StageFailed)]
    assert (failed.kind, failed.epoch) == ("diverged", 1)


def check_stopping_keeps_the_state(config: ExecutorConfig) -> None:
    """A worker that is asked to stop keeps its state at the end of the epoch and is through."""
    timeline = _timeline({"lr": 0.1}, epochs=100_000)
    with _opened(config, LineTask()) as (executor, folder):
        executor.submit(_assignment(_chain(timeline, [(0, 100_000)])))
        events: list[Event] = []
        while not any(isinstance(e, EpochDone) for e in events):
            events += [r.event for r in executor.poll(POLL_S) if r.event is not None]
        executor.stop()
        events += _rest(executor)
        (done,) = [e for e in events if isinstance(e, StageDone)]
        assert done.checkpoint is not None
        assert done.stop == max(e.epoch for e in events if isinstance(e, EpochDone))
        folder.read(done.checkpoint)


EXECUTOR_CHECKS: tuple[Check, ...] = (
    check_metrics_are_those_of_a_trial_alone,
    check_checkpoints_can_be_resumed,
    check_user_errors_become_events,
    check_divergence_is_an_event,
    check_stopping_keeps_the_state,
)
"""Run each with ``check(YourExecutor(...))``."""


def _assert_same(found: Sequence[Metrics], wanted: Sequence[Metrics]) -> None:
    """Equal up to rounding: an executor may train several trials as one computation."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(math.isclose(one[k], other[k], rel_tol=1e-4, abs_tol=1e-6) for k in one)


class _opened:  # noqa: N801 (used like a function)
    def __init__(self, config: ExecutorConfig, task: LineTask) -> None:
        self._folder = tempfile.TemporaryDirectory()
        root = str(Path(self._folder.name) / "checkpoints")
        self._executor = config.open(task, checkpoints=root, folder="plan")
        self._checkpoints = CheckpointFolder(root)

    def __enter__(self) -> tuple[Executor, CheckpointFolder]:
        return self._executor, self._checkpoints

    def __exit__(self, *exc: object) -> None:
        self._executor.close()
        self._folder.cleanup()


def _timeline(config: Mapping[str, Any], *, epochs: int = 5) -> Timeline:
    return Timeline(config, epochs=epochs)


def _chain(
    timeline: Timeline, spans: Sequence[tuple[int, int]], *, resume: CheckpointRef | None = None
) -> Chain:
    stages = tuple(Stage(node=0, start=start, stop=stop) for start, stop in spans)
    return Chain(stages=stages, timeline=timeline, resume=resume)


def _assignment(chain: Chain, *, number: int = 0) -> Assignment:
    return Assignment(number=number, chain=chain, seed=3)


def _train(executor: Executor, chain: Chain, *, number: int = 0) -> list[Event]:
    executor.submit(_assignment(chain, number=number))
    return _rest(executor)


def _rest(executor: Executor) -> list[Event]:
    """All events up to the last word on the assignment."""
    events: list[Event] = []
    while True:
        reports = executor.poll(POLL_S)
        assert reports, "the executor has nothing to say"
        events += [r.event for r in reports if r.event is not None]
        if any(r.event is None for r in reports):
            return events
