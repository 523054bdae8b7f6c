"""Conformance checks for executors, and the tasks that they train."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from thrifty.core import (
    CheckpointLost,
    CheckpointRef,
    EpochDone,
    Event,
    StageDone,
    StageFailed,
    StoreWriteError,
)
from thrifty.integrations.functions._loop_trial import LoopTrial
from thrifty.integrations.functions._trainable import TrainableFunction, trainable
from thrifty.pack import SGD, ArrayData, HyperParameters, Task
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, Executor, ExecutorConfig, Report, state_from_arrays, train_alone
from thrifty.space import MultiStep, Timeline
from thrifty.store import CheckpointFolder


class LineTask(Task):
    """A task that fits a line through 32 points; an epoch takes a millisecond.

    Its metric is ``mse``. It reads ``lr`` and, where the space has them, ``width`` (a hidden
    layer) and ``dropout``.
    """

    optimizer = SGD(lr="lr", momentum=0.9)
    batch_size = 8

    def data(self, hp: HyperParameters) -> ArrayData:
        """Return 32 points on a line."""
        x = torch.linspace(-1, 1, 32)[:, None]
        return ArrayData(train=(x, 2 * x + 1), valid=(x, 2 * x + 1))

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        """Return a linear model, or a network with one hidden layer."""
        width = hp.get("width", 0)
        if not width:
            return torch.nn.Linear(1, 1)
        return torch.nn.Sequential(
            torch.nn.Linear(1, width),
            torch.nn.Tanh(),
            torch.nn.Dropout(hp.get("dropout", 0.0)),
            torch.nn.Linear(width, 1),
        )

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean squared error."""
        x, y = batch
        return torch.nn.functional.mse_loss(model(x), y)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the mean squared error as ``mse``."""
        return {"mse": self.loss(model, batch)}

    def adapt(self, model: torch.nn.Module, hp: HyperParameters) -> None:
        """Let dropout follow a schedule."""
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = hp.get("dropout", 0.0)


class UnspeakableError(Exception):
    """An error whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


_ERRORS: Mapping[str, Callable[[], BaseException]] = {
    "raise": lambda: RuntimeError("the task's own error"),
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "odd text": lambda: RuntimeError("half a pair \ud800, nothing \0, \x1b[31mred"),
    "huge text": lambda: RuntimeError("x" * 5_000_000),
    "no text": UnspeakableError,
}


class FaultyTask(LineTask):
    """A ``LineTask`` that fails in the epochs where hyper-parameter ``fault`` names a fault.

    - ``"raise"`` raises an error, ``"nan"`` makes the loss NaN.
    - ``"exit"`` calls ``sys.exit()``, ``"interrupt"`` raises KeyboardInterrupt.
    - ``"odd text"`` raises an error whose text no database takes, ``"huge text"`` one with
      megabytes of text, ``"no text"`` one whose text cannot be read.
    - ``"hang"`` never returns.
    - ``"die"`` kills the process. If ``fuse`` names a file, the process dies only if the file
      exists, and deletes it first: it dies only once.

    Inject a fault with ``fault=MultiStep(["", "raise"], milestones=[3])``.
    """

    def __init__(self, *, fuse: str = "") -> None:
        self._fuse = fuse
        self._fault = ""

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return nothing, because the fuse is not part of what is trained."""
        return {}

    def _legacy_identity(self) -> Mapping[str, str]:
        return {**super()._legacy_identity(), "attributes": ""}

    def adapt(self, model: torch.nn.Module, hp: HyperParameters) -> None:
        """Set the fault of this epoch: faults are hyper-parameters that follow a schedule."""
        super().adapt(model, hp)
        self._fault = hp.get("fault", "")

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean squared error, unless a fault is active."""
        if model.training and self._fault in _ERRORS:
            raise _ERRORS[self._fault]()
        if model.training and self._fault == "hang":
            threading.Event().wait()
        if model.training and self._fault == "die" and (not self._fuse or self._burn()):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().loss(model, batch)
        return loss * float("nan") if model.training and self._fault == "nan" else loss

    def _burn(self) -> bool:
        try:
            Path(self._fuse).unlink()
        except FileNotFoundError:
            return False
        return True


class VirtualClock:
    """A clock that shows the time that a test sets.

    >>> clock = VirtualClock(100.0)
    >>> clock.advance(5.0)
    >>> clock.now(), clock.monotonic()
    (105.0, 5.0)
    >>> clock.jump(-50.0)
    >>> clock.now(), clock.monotonic()
    (55.0, 5.0)
    """

    def __init__(self, now: float = 0.0) -> None:
        self._began = now
        self._now = now

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return self._now

    def monotonic(self) -> float:
        """Return the seconds since the clock was made."""
        return self._now - self._began

    def jump(self, seconds: float) -> None:
        """Set the date, as an administrator or a time server does; no time passes."""
        self._now += seconds
        self._began += seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds


# -- checks ----------------------------------------------------------------------------------------


Check = Callable[[ExecutorConfig], None]
Metrics = Mapping[str, float]

POLL_S = 30.0
"""Seconds that one call of ``poll`` may wait."""
HERE = uuid.uuid4().hex
"""Identifier that differs between processes."""
_ODD_FAULTS = ("exit", "odd text", "huge text", "no text")


def check_metrics_are_those_of_a_trial_alone(config: ExecutorConfig) -> None:
    """Check that training a chain gives the metrics of training its timeline alone."""
    timeline = _timeline({"lr": MultiStep([0.1, 0.01], milestones=[2])})
    _, alone = train_alone(LineTask(), timeline, seed=3, epochs=4)
    with _OpenExecutor(config, LineTask()) as (executor, _):
        events = _train(executor, _chain(timeline, [(0, 2), (2, 4)]))
    _assert_same([e.metrics for e in events if isinstance(e, EpochDone)], alone)
    assert [(e.start, e.stop) for e in events if isinstance(e, StageDone)] == [(0, 2), (2, 4)]


@trainable
def saying(trial: LoopTrial) -> Generator[Mapping[str, Any], None, None]:
    """A training function that sets user attributes before and in its loop."""
    trial.set_user_attr("rate", str(trial.suggest_float("lr", 0.1, 1.0)))
    for epoch in trial.epochs({}):
        trial.set_user_attr("odd", ["\ud800, \0", {"epoch": epoch, "known": None}])
        yield {"mse": 1.0}


def check_attributes_are_those_of_their_epoch(config: ExecutorConfig) -> None:
    """Check that each epoch is reported with the user attributes that were set in it."""
    chain = _chain(_timeline({"lr": 0.5}), [(0, 1), (1, 3)])
    with _OpenExecutor(config, saying) as (executor, _):
        events = _train(executor, chain)
    odd = [{"odd": ["\ud800, \0", {"epoch": epoch, "known": None}]} for epoch in range(3)]
    assert [dict(e.attributes) for e in _epochs(events)] == [odd[0] | {"rate": "0.5"}, *odd[1:]]


def check_checkpoints_can_be_resumed(config: ExecutorConfig) -> None:
    """Check that a chain that starts from a checkpoint resumes exactly where it was made."""
    _check_resuming(config, scheme="")


def check_checkpoints_may_have_an_address(config: ExecutorConfig) -> None:
    """Check that checkpoints can be kept at an fsspec address."""
    _check_resuming(config, scheme="file://")


def check_several_at_once(config: ExecutorConfig) -> None:
    """Check that each of several assignments gets its own reports in order.

    The last report must have no event.
    """
    timelines = [_timeline({"lr": rate, "width": 4}) for rate in (0.1, 0.05, 0.02, 0.01)]
    chains = [_chain(each, [(0, 2), (2, 4)], node=i) for i, each in enumerate(timelines)]
    with _OpenExecutor(config, LineTask()) as (executor, _):
        told = _train_all(executor, chains, pack_size=config.pack_size or 2)
    for number, timeline in enumerate(timelines):
        _, alone = train_alone(LineTask(), timeline, seed=3, epochs=4)
        *events, last = told[number]
        assert last is None
        assert None not in events
        done = [e for e in events if isinstance(e, EpochDone)]
        assert [(e.node, e.epoch) for e in done] == [(number, i + 1) for i in range(4)]
        _assert_same([e.metrics for e in done], alone)


def check_packs_make_room(config: ExecutorConfig) -> None:
    """Check that packing gives workers places for more trials, of which an assignment takes one."""
    chain = _chain(_timeline({"lr": 0.1}), [(0, 1)])
    with _OpenExecutor(config, LineTask()) as (executor, _):
        free = executor.num_free(pack_size=3)
        assert free >= executor.num_free() >= 1
        executor.submit(_assignment(chain))
        assert executor.num_free(pack_size=3) == free - 1
        _rest(executor)
        assert executor.num_free() >= 1


def check_user_errors_become_events(config: ExecutorConfig) -> None:
    """Check that an exception in the task's code fails its stage, but not the worker.

    The event must have a traceback.
    """
    faulty = _timeline({"lr": 0.1, "fault": MultiStep(["", "raise"], milestones=[2])})
    with _OpenExecutor(config, FaultyTask()) as (executor, _):
        events = _train(executor, _chain(faulty, [(0, 1), (1, 4)]))
        again = _train(executor, _chain(_timeline({"lr": 0.1}), [(0, 1)]), number=1)
    (failed,) = [e for e in events if isinstance(e, StageFailed)]
    assert (failed.kind, failed.epoch) == ("error", 2)
    assert "the task's own error" in failed.traceback
    assert [e.stop for e in events if isinstance(e, StageDone)] == [1]
    assert any(isinstance(e, StageDone) for e in again)


def check_odd_errors_become_events(config: ExecutorConfig) -> None:
    """Check that any exception of the task's code, even ``sys.exit()``, only fails its stage.

    The text of the event must be one that a database can keep.
    """
    with _OpenExecutor(config, FaultyTask()) as (executor, _):
        for number, fault in enumerate(_ODD_FAULTS):
            faulty = _timeline({"lr": 0.1, "fault": MultiStep(["", fault], milestones=[1])})
            events = _train(executor, _chain(faulty, [(0, 3)], node=number), number=number)
            (failed,) = [e for e in events if isinstance(e, StageFailed)]
            assert (failed.kind, failed.epoch) == ("error", 1), failed
            for text in (failed.message, failed.traceback):
                assert text.encode("utf-8")
                assert all(c.isprintable() or c in "\n\t" for c in text)
                assert len(text) < 1_000_000
            if fault == "exit":
                assert "SystemExit" in failed.message


def check_divergence_is_an_event(config: ExecutorConfig) -> None:
    """Check that a loss that is not finite fails its stage as diverged."""
    faulty = _timeline({"lr": 0.1, "fault": MultiStep(["", "nan"], milestones=[1])})
    with _OpenExecutor(config, FaultyTask()) as (executor, _):
        events = _train(executor, _chain(faulty, [(0, 4)]))
    (failed,) = [e for e in events if isinstance(e, StageFailed)]
    assert (failed.kind, failed.epoch) == ("diverged", 1)


def check_a_killed_worker_is_lost(config: ExecutorConfig) -> None:
    """Check that a worker that dies loses its current stage, which can then be trained again.

    An executor that trains in the process of the study would take it along, so it is not tried.
    """
    harmless = _timeline({"lr": 0.1})
    deadly = _timeline({"lr": 0.1, "fault": MultiStep(["", "die"], milestones=[2])})
    chain = _chain(deadly, [(0, 2), (2, 4)])
    with tempfile.NamedTemporaryFile(delete=False) as fuse:
        task = _WhereTask(fuse=fuse.name)
    with _OpenExecutor(config, task) as (executor, _):
        (where,) = _epochs(_train(executor, _chain(harmless, [(0, 1)])))
        if not where.metrics["elsewhere"]:
            Path(fuse.name).unlink()
            return
        events = _train(executor, chain, number=1)
        (failed,) = [e for e in events if isinstance(e, StageFailed)]
        assert (failed.kind, failed.start, failed.stop) == ("lost", 2, 4)
        assert [e.epoch for e in _epochs(events)] == [1, 2]
        again = _train(executor, chain, number=2)
    _, alone = train_alone(LineTask(), deadly, seed=3, epochs=4)
    found = [{k: v for k, v in e.metrics.items() if k != "elsewhere"} for e in _epochs(again)]
    _assert_same(found, alone)
    assert isinstance(again[-1], StageDone)


def check_a_lost_checkpoint_is_an_event(config: ExecutorConfig) -> None:
    """Check that a missing checkpoint is reported, and is not a failure of the stage."""
    gone = CheckpointRef(node=0, epoch=2, path="plan/0-2.safetensors", num_bytes=9, digest="-")
    with _OpenExecutor(config, LineTask()) as (executor, _):
        events = _train(executor, _chain(_timeline({"lr": 0.1}), [(2, 4)], resume=gone))
    (lost,) = events
    assert isinstance(lost, CheckpointLost)
    assert lost.checkpoint == gone


def check_an_unwritable_place_is_raised(config: ExecutorConfig) -> None:
    """Check that a checkpoint that cannot be written ends the study: ``poll`` raises."""
    with _OpenExecutor(config, LineTask()) as (executor, folder):
        Path(folder.root).touch()  # a file where the folder should be
        said = ""
        try:
            _train(executor, _chain(_timeline({"lr": 0.1}), [(0, 1)]))
        except StoreWriteError as error:
            said = str(error)
        assert folder.root in said, "the state was not written, and poll() did not say so"


def check_stopping_keeps_the_state(config: ExecutorConfig) -> None:
    """Check that a worker that must stop saves its state at the end of the epoch and ends."""
    timeline = _timeline({"lr": 0.1}, epochs=100_000)
    with _OpenExecutor(config, LineTask()) as (executor, folder):
        executor.submit(_assignment(_chain(timeline, [(0, 100_000)])))
        events: list[Event] = []
        while not _epochs(events):
            events += [r.event for r in _poll(executor) if r.event is not None]
        executor.stop()
        events += _rest(executor)
        (done,) = [e for e in events if isinstance(e, StageDone)]
        assert done.checkpoint is not None
        assert done.stop == max(e.epoch for e in _epochs(events))
        folder.read(done.checkpoint)


EXECUTOR_CHECKS: tuple[Check, ...] = (
    check_metrics_are_those_of_a_trial_alone,
    check_attributes_are_those_of_their_epoch,
    check_checkpoints_can_be_resumed,
    check_checkpoints_may_have_an_address,
    check_several_at_once,
    check_packs_make_room,
    check_user_errors_become_events,
    check_odd_errors_become_events,
    check_divergence_is_an_event,
    check_a_killed_worker_is_lost,
    check_a_lost_checkpoint_is_an_event,
    check_an_unwritable_place_is_raised,
    check_stopping_keeps_the_state,
)
"""Checks to run with ``check(YourExecutor(...))``, in tests with a generous time limit."""


class _WhereTask(FaultyTask):
    """A task that reports whether it is trained in another process than it was made in."""

    def __init__(self, *, fuse: str) -> None:
        super().__init__(fuse=fuse)
        self._made = HERE

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        metrics = super().metrics(model, batch)
        return {**metrics, "elsewhere": 0 * metrics["mse"] + float(self._made != HERE)}


def _check_resuming(config: ExecutorConfig, *, scheme: str) -> None:
    timeline = _timeline({"lr": 0.1, "width": 8, "dropout": 0.3})
    _, alone = train_alone(LineTask(), timeline, seed=3, epochs=5)
    with _OpenExecutor(config, LineTask(), scheme=scheme) as (executor, folder):
        first = _train(executor, _chain(timeline, [(0, 2)]))
        kept = next(e.checkpoint for e in first if isinstance(e, StageDone))
        assert kept is not None
        assert state_from_arrays(*folder.read(kept)).tensors
        rest = _train(executor, _chain(timeline, [(2, 5)], resume=kept), number=1)
    _assert_same([e.metrics for e in _epochs(rest)], alone[2:])


def _assert_same(found: Sequence[Metrics], wanted: Sequence[Metrics]) -> None:
    """Check equality up to rounding: an executor may train several trials as one computation."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(math.isclose(one[k], other[k], rel_tol=1e-4, abs_tol=1e-6) for k in one)


def _epochs(events: Sequence[Event]) -> list[EpochDone]:
    return [e for e in events if isinstance(e, EpochDone)]


class _OpenExecutor:
    def __init__(
        self, config: ExecutorConfig, task: LineTask | TrainableFunction, *, scheme: str = ""
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        root = scheme + str(Path(self._folder.name) / "checkpoints")
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
    timeline: Timeline,
    spans: Sequence[tuple[int, int]],
    *,
    resume: CheckpointRef | None = None,
    node: int = 0,
) -> Chain:
    stages = tuple(Stage(node=node, start=start, stop=stop) for start, stop in spans)
    return Chain(stages=stages, timeline=timeline, resume=resume)


def _assignment(chain: Chain, *, number: int = 0) -> Assignment:
    return Assignment(number=number, chain=chain, seed=3)


def _train(executor: Executor, chain: Chain, *, number: int = 0) -> list[Event]:
    executor.submit(_assignment(chain, number=number))
    return _rest(executor)


def _train_all(
    executor: Executor, chains: Sequence[Chain], *, pack_size: int
) -> dict[int, list[Event | None]]:
    """Return the events of each chain; submit chains as a study does, whenever a place is free."""
    waiting = deque(enumerate(chains))
    told: dict[int, list[Event | None]] = {}
    active: set[int] = set()
    while waiting or active:
        while waiting and executor.num_free(pack_size=pack_size):
            number, chain = waiting.popleft()
            active.add(number)
            executor.submit(_assignment(chain, number=number))
        assert active, "no worker is busy, and none is free"
        for report in _poll(executor):
            told.setdefault(report.assignment, []).append(report.event)
            if report.event is None:
                active.remove(report.assignment)
    return told


def _rest(executor: Executor) -> list[Event]:
    """Return all events up to the last report on the assignment."""
    events: list[Event] = []
    while True:
        reports = _poll(executor)
        events += [r.event for r in reports if r.event is not None]
        if any(r.event is None for r in reports):
            return events


def _poll(executor: Executor) -> Sequence[Report]:
    """Wait for the next reports.

    There is no time limit here, because a busy machine may start a worker late. An executor must
    report a worker that is gone. If it hangs instead, the time limit of the test ends it.
    """
    while not (reports := executor.poll(POLL_S)):
        pass
    return reports
