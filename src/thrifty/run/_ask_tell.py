"""An executor whose training happens elsewhere: it hands out assignments and is told metrics."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thrifty.core import (
    Attributes,
    EpochDone,
    Event,
    StageDone,
    StageFailed,
    StageStarted,
    UsageError,
    plain_logger,
)
from thrifty.pack import HyperParameters, Task, Trainable
from thrifty.pack._state import pack_state
from thrifty.store._plan_files import MAX_BASE_BYTES

from ._executor import Assignment, ChainProgress, Executor, ExecutorConfig, Report
from ._running_chain import StateFiles


logger = plain_logger(__name__)

_WORKER = "told"
SAY_S = 10.0
"""Seconds that ``ask`` waits for a trial until the log says why."""


class External(Trainable):
    """A task that is trained elsewhere, by a loop that calls ``Study.ask`` and ``Study.tell``.

    Args:
        name: What is trained. Studies of one name and version share what they were told.

    >>> import thrifty as th
    >>> study = th.Study(
    ...     th.External("a robot"),
    ...     th.Space(speed=th.Float(0.1, 1.0)),
    ...     algorithm=th.RandomSearch(max_epochs=1, num_trials=3),
    ...     metric="distance",
    ...     storage="sqlite://",
    ...     name="robot",
    ... )
    >>> while trial := study.ask():
    ...     _ = study.tell(trial, {"distance": 10 * trial.config["speed"]})
    >>> len(study.trials)
    3
    """

    def __init__(self, name: str, *, version: str = "") -> None:
        self.name = name
        self.version = version

    def identity(self) -> Mapping[str, str]:
        """Return the name and the version."""
        return {"external": self.name, "version": self.version}

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Never called."""
        raise NotImplementedError

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Never called."""
        raise NotImplementedError

    def evaluate(self) -> Mapping[str, float]:
        """Never called."""
        raise NotImplementedError

    def state(self) -> Any:
        """Never called."""
        raise NotImplementedError

    def load_state(self, state: Any) -> None:
        """Never called."""
        raise NotImplementedError


class AskedTrial:
    """The next epochs to train: those of one trial, up to the next decision.

    Attributes:
        start: The epoch after which it begins.
        stop: The epoch after which it ends, unless ``tell`` returns False before.
        resume: The name of the state from which it goes on; None: it begins from nothing.
        state: The name under which to keep its state after the epoch that was told last; None: that
            state is not needed.
    """

    def __init__(self, progress: ChainProgress) -> None:
        chain = progress.chain
        self._progress = progress
        self._began = time.perf_counter()
        self.start, self.stop = chain.stages[0].start, chain.stages[-1].stop
        ref = chain.resume
        self.resume = None if ref is None else _name(ref.node, ref.epoch)
        self.state: str | None = None

    def __repr__(self) -> str:
        return f"AskedTrial({self.config}, epochs {self.start + 1} to {self.stop})"

    @property
    def config(self) -> dict[str, Any]:
        """The hyper-parameters in its next epoch; scheduled ones change from epoch to epoch."""
        return self._progress.chain.timeline.at(min(self._progress.epoch, self.stop - 1))

    @property
    def epoch(self) -> int:
        """How many epochs it has, those before ``start`` included."""
        return self._progress.epoch


def _name(node: int, epoch: int) -> str:
    return f"{node}-{epoch}"


class AskTellExecutor(Executor):
    """Gives each waiting ``ask`` an assignment, and turns each ``tell`` into events.

    The study's loop runs in a thread of its own, and calls the methods of ``Executor``; ``ask`` and
    ``tell`` are called by other threads.

    Args:
        states: Where it writes states; they are empty, as the real ones are elsewhere.
    """

    trains_elsewhere = True

    def __init__(self, states: StateFiles) -> None:
        self._states = states
        self._changed = threading.Condition()
        self._num_asking = 0
        self._num_refused = 0
        """How often the loop has come to ``poll`` while ``ask`` waited and got no trial."""
        self._was_free = False
        """Whether a call of `ask` waited when the loop last looked."""
        self._handed: deque[AskedTrial] = deque()
        self._active: dict[int, AskedTrial] = {}
        self._cut: set[int] = set()
        self._reports: list[Report] = []
        self._is_busy = False
        """Whether the loop works with reports that it has taken."""
        self.is_ended = False
        """Whether nothing more is handed out."""

    @property
    def may_be_asked(self) -> bool:  # type: ignore[override]
        """Whether ``ask`` may get a trial when the loop looks again: the study is not done yet.

        Who has asked since it looked last has not been looked for.
        """
        with self._changed:
            return not (self.is_ended or self._was_free)

    def num_free(self, *, pack_size: int = 1) -> int:
        """Return how many ask and have no assignment yet."""
        with self._changed:
            # One who was interrupted leaves what was handed to him to the next.
            free = 0 if self.is_ended else max(0, self._num_asking - len(self._handed))
            self._was_free = free > 0
            return free

    def submit(self, assignment: Assignment) -> None:
        """Hand an assignment to a waiting ``ask``."""
        with self._changed:
            asked = AskedTrial(ChainProgress(assignment))
            self._active[assignment.number] = asked
            self._reports.append(asked._progress.report(_started(asked)))
            self._handed.append(asked)
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> Sequence[Report]:
        """Return what was told since the last call."""
        with self._changed:
            self._is_busy = False
            self._num_refused += self._wants_more()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._reports or self.is_ended or self._wants_more(), timeout_s
            )
            found, self._reports = self._reports, []
            self._is_busy = bool(found)
            return found

    def cut(self, assignment: int) -> None:
        """End an assignment after its present epoch; it is told so by the next ``tell``."""
        with self._changed:
            if assignment in self._active:
                self._cut.add(assignment)

    def stop(self) -> None:
        """End all assignments; epochs after the last state that is kept are asked for again."""
        with self._changed:
            self.is_ended = True
            for asked in list(self._active.values()):
                self._forget(asked)
            self._changed.notify_all()

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self.is_ended = True
            self._changed.notify_all()
        self._states.close()

    # -- for those who ask -----------------------------------------------------------------

    def ask(self, *, wait: bool = True) -> AskedTrial | None:
        """Return the next trial to train; None if the study is done.

        Args:
            wait: Whether to wait until it is known; else None also stands for nothing now.
        """
        with self._changed:
            self._num_asking += 1
            before = self._num_refused
            self._changed.notify_all()
            try:
                found = self._changed.wait_for(lambda: self._is_answered(before, wait=wait), SAY_S)
                if not found:
                    logger.warning(
                        "ask() waits: the study is paused, or what to train next depends on trials "
                        "that were asked for and not told yet; ask(wait=False) does not wait"
                    )
                    self._changed.wait_for(lambda: self._is_answered(before, wait=wait))
                return self._handed.popleft() if self._handed else None
            finally:
                self._num_asking -= 1

    def _is_answered(self, before: int, *, wait: bool) -> bool:
        refused = not wait and self._num_refused > before + 1
        return bool(self._handed) or self.is_ended or refused

    def tell(
        self,
        asked: AskedTrial,
        metrics: Mapping[str, float],
        *,
        attributes: Mapping[str, Any] | None = None,
    ) -> bool:
        """Report the metrics of the next epoch; return whether the trial goes on.

        ``attributes`` are its user attributes.

        Raises:
            UsageError: The trial has ended.
        """
        with self._changed:
            progress = self._current(asked)
            now = time.perf_counter()
            progress.epoch += 1
            self._add(
                asked,
                EpochDone(
                    node=progress.stage.node,
                    epoch=progress.epoch,
                    metrics=dict(metrics),
                    seconds=now - asked._began,
                    worker=_WORKER,
                    seconds_alone=now - asked._began,
                    attributes=attributes or {},
                ),
            )
            asked._began, asked.state = now, None
            if progress.epoch == progress.stage.stop:
                self._end_stage(asked)
            elif progress.number in self._cut:
                self._keep(asked)
                self._forget(asked)
            self._wait_until_known()
            return progress.number in self._active

    def fail(self, asked: AskedTrial, error: str) -> None:
        """Report that a trial has failed.

        Raises:
            UsageError: It has ended.
        """
        with self._changed:
            progress = self._current(asked)
            stage = progress.stage
            self._add(
                asked,
                StageFailed(
                    node=stage.node,
                    start=stage.start,
                    stop=stage.stop,
                    epoch=stage.start,
                    kind="error",
                    message=error,
                    worker=_WORKER,
                ),
            )
            self._forget(asked)
            self._wait_until_known()

    def _current(self, asked: AskedTrial) -> ChainProgress:
        progress = asked._progress
        if self.is_ended or self._active.get(progress.number) is not asked:
            raise UsageError(
                f"{asked!r} has ended: it was told {progress.epoch} epochs, or was stopped, or the "
                "study was; ask() for another one"
            )
        return progress

    def _add(self, asked: AskedTrial, event: Event) -> None:
        self._reports.append(asked._progress.report(event))

    def _end_stage(self, asked: AskedTrial) -> None:
        progress = asked._progress
        self._keep(asked)
        if progress.number not in self._cut and progress.next_stage():
            self._add(asked, _started(asked))
        else:
            self._forget(asked)

    def _forget(self, asked: AskedTrial) -> None:
        self._reports.append(asked._progress.report(None))
        del self._active[asked._progress.number]
        self._cut.discard(asked._progress.number)

    def _keep(self, asked: AskedTrial) -> None:
        """Note that the state after the epoch that was told last is kept, elsewhere."""
        node, epoch, start = asked._progress.stage.node, asked.epoch, asked._progress.stage.start
        asked.state = _name(node, epoch)
        written = self._states.write(node, epoch, pack_state({"external": asked.state})).result()
        self._add(
            asked, StageDone(node=node, start=start, stop=epoch, worker=_WORKER, checkpoint=written)
        )

    def _wants_more(self) -> bool:
        return self._num_asking > len(self._handed)

    def _wait_until_known(self) -> None:
        """Wait until the loop has worked with all reports."""
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: self.is_ended or not (self._reports or self._is_busy), _PATIENCE_S
        )


_PATIENCE_S = 60.0


def _started(asked: AskedTrial) -> StageStarted:
    stage = asked._progress.stage
    return StageStarted(node=stage.node, start=stage.start, stop=stage.stop, worker=_WORKER)


@dataclass(frozen=True, kw_only=True, eq=False)
class AskTell(ExecutorConfig):
    """The executor of ``Study.ask``; ``opened`` has the executor once the run has begun."""

    opened: list[AskTellExecutor]
    pack: str = "solo"
    pack_size: int | None = 1

    def open(
        self,
        task: Task | Trainable,
        *,
        checkpoints: str,
        folder: str,
        curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        refused: Mapping[str, str] | None = None,
        max_base_bytes: float = MAX_BASE_BYTES,
    ) -> Executor:
        """Return the executor."""
        executor = AskTellExecutor(StateFiles(checkpoints, folder=folder, name=_WORKER))
        self.opened.append(executor)
        return executor


def check_trains(task: Task | Trainable, executor: ExecutorConfig | None) -> None:
    """Refuse to train what is trained elsewhere.

    Raises:
        UsageError: The task is an ``External``, and the executor is not that of ``Study.ask``.
    """
    if isinstance(task, External) and not isinstance(executor, AskTell):
        raise UsageError(
            f"{task.name!r} is trained elsewhere; call study.ask() and study.tell(), not run()"
        )


def checked_metrics(value: Any, *, needed: Sequence[str]) -> Mapping[str, float]:
    """Return metrics by name: of a mapping, or of one number.

    Args:
        value: What was told.
        needed: The metrics that the study needs; a single number is the first one.

    Raises:
        UsageError: It is neither, or a needed metric is missing.
    """
    found = value if isinstance(value, Mapping) else {needed[0]: value}
    missing = [name for name in needed if name not in found]
    if missing:
        raise UsageError(
            f"tell({value!r}): {', '.join(map(repr, missing))} is missing; give all metrics that "
            f"the study needs in one dict ({', '.join(needed)})"
        )
    for name, each in found.items():
        if isinstance(each, bool) or not _is_number(each):
            raise UsageError(
                f"tell({value!r}): {name!r} is {each!r}; give a number, or a dict of metrics"
            )
    return {str(name): float(each) for name, each in found.items()}


def checked_attributes(values: Any) -> Mapping[str, Any]:
    """Return user attributes as they are stored.

    Raises:
        UsageError: They are no dict of JSON values, or too large.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            f"tell(user_attrs={values!r}): give a dict of texts, numbers, lists and dicts by name"
        )
    found = Attributes(call="tell(user_attrs={{{key}: ...}})", error=UsageError)
    for key, value in values.items():
        found.set(key, value)
    return found.take()


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
