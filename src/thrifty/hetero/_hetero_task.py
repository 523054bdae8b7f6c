"""A trial that is itself a data-parallel job on workers of unequal speed."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from thrifty.core import HeteroError, TrainingError, WorkerLostError
from thrifty.core._child import Child, ChildEndedError, pickled, wait_for
from thrifty.pack import TRAIN_LOSS, HyperParameters, Task, TaskIdentity, Trainable, task_identity
from thrifty.pack.identity import identify

from ._job import HeteroOptions
from .training._learner import Objective, Reduction, Weight
from .workers._membership import from_bytes, to_bytes


class HeteroTask(Trainable):
    """Trains a task with several processes of this machine instead of one.

    In a study it is a trial like any other. The processes split every batch by their speed. The
    result equals that of the plain task up to rounding; for models that draw random numbers it also
    differs by the draws. A schedule that moves within epochs, such as ``Cosine``, has the value at
    the beginning of each epoch, where the plain task follows it at each step. When a worker dies,
    its trial fails with it, and the study retries from the last checkpoint.

    Args:
        task: The task to train. Its data must be arrays or data sets.
        workers: Number of processes.
        cores: CPU cores to bind each process to, so that the processes do not share cores (default:
            not bound).
        devices: Device of each process, such as ``("cuda:0", "cpu")``. Processes on GPUs and on
            CPUs train together (default: the device that the study gives the trial, for all).
        options: Options of the ``HeteroTrainer`` in each process.
        reduction: Whether the task's loss is a mean over the batch or a sum; see ``HeteroTrainer``.
        weight: Weight of a batch in that mean; see ``HeteroTrainer``.

    Raises:
        HeteroError: ``workers`` is below 1, ``cores`` or ``devices`` has another length, or an
            option is invalid.

    Example::

        study = th.Study(th.hetero.HeteroTask(Digits(), workers=2), space, ...)
    """

    _thrifty_internals: ClassVar[frozenset[str]] = frozenset()
    """Says that what is trained is not among the attributes, but in the worker processes."""

    def __init__(
        self,
        task: Task,
        *,
        workers: int,
        cores: Sequence[Sequence[int]] | None = None,
        devices: Sequence[str] | None = None,
        options: HeteroOptions | None = None,
        reduction: Reduction = "mean",
        weight: Weight | None = None,
    ) -> None:
        if workers < 1:
            raise HeteroError(f"`workers` must be at least 1, got {workers}")
        if cores is not None and len(cores) != workers:
            raise HeteroError(f"{workers} workers have {len(cores)} sets of cores")
        if devices is not None and len(devices) != workers:
            raise HeteroError(
                f"`devices` must name one device for each of {workers} workers, got {len(devices)}"
            )
        Objective(loss=task.loss, reduction=reduction, weight=weight)  # fails early
        self.task = task
        self.workers = workers
        self.cores = cores
        self.devices = devices
        self.options = options or HeteroOptions()
        self.reduction = reduction
        self.weight = weight

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return the attributes that change results whatever the workers are."""
        return {"task": self.task, "reduction": self.reduction, "weight": self.weight}

    def _content(self) -> TaskIdentity:
        """Return the task's identity plus the options through which workers change the result.

        What was always so has no entry, so that identities in earlier databases still match.
        """
        inner = task_identity(self.task).joined()
        training = {**inner.training, "trained by": "HeteroTask"}
        if type(self) is not HeteroTask or self.version or vars(self).keys() - _ATTRIBUTES:
            own = super()._content().joined().training
            training |= {f"HeteroTask: {name}": text for name, text in own.items()}
        options = self.options
        if options.clip_norm is not None:
            training["clip_norm"] = repr(options.clip_norm)
        if options.batch_norm == "local" or not options.verify or options.growth:
            training["split"] = (
                f"{self.workers} workers, batch_norm={options.batch_norm}, "
                f"verify={options.verify}, growth={options.growth}"
            )
        if options.batch_norm == "local" and options.micro_batch is not None:
            training["micro-batches"] = f"at most {options.micro_batch} samples"
        if self.reduction != "mean" or self.weight is not None:
            objective = SimpleNamespace(reduction=self.reduction, weight=self.weight)
            found = identify(objective).joined().training
            training |= {f"objective: {name}": text for name, text in found.items()}
        return TaskIdentity(training=training, evaluation={})

    def _legacy_identity(self) -> Mapping[str, str]:
        return {**self.task.identity(), "trained by": "HeteroTask"}

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Start the worker processes."""
        self._crew = _Processes(self.workers)
        weakref.finalize(self, self._crew.end)
        begin = {
            "values": dict(hp),
            "seed": seed,
            "devices": list(self.devices or [str(device)] * self.workers),
            "options": self.options,
            "objective": pickled((self.reduction, self.weight)),
        }
        self._crew.start(pickled(self.task), begin, self.cores)

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Train one epoch on all processes."""
        self._crew.tell("epoch", epoch, dict(hp))
        answers = self._crew.hear()
        # A process that stood by knows the loss of its own steps only.
        _, most = max(answers, key=lambda answer: answer[0])
        self._metrics = {**answers[0][1], TRAIN_LOSS: most[TRAIN_LOSS]}

    def evaluate(self) -> Mapping[str, float]:
        """Return the metrics of the first process, and the loss of one that trained all steps."""
        return dict(self._metrics)

    def state(self) -> Any:
        """Return the state of the first process; the states of all processes are equal."""
        return from_bytes(torch.frombuffer(bytearray(self._crew.state()), dtype=torch.uint8))

    def load_state(self, state: Any) -> None:
        """Load a state into all processes."""
        self._crew.tell("state", to_bytes(state).numpy().tobytes())
        self._crew.hear()


_ATTRIBUTES = frozenset({
    "task", "workers", "cores", "devices", "options", "reduction", "weight", "_crew", "_metrics",
})  # fmt: skip

_PRELOAD = ("thrifty.hetero._trainer", "torch.distributed", "torch._dynamo")
"""Modules that the fork server preloads; torch imports the last one for the first optimizer."""


class _Processes:
    """The worker processes of one trial."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._children: list[Child] = []
        self._inbox: list[deque[Any]] = [deque() for _ in range(num)]
        self._lost: dict[int, str] = {}
        """What processes have said that ended because they had lost another one."""
        self._asked: set[int] = set()
        """Processes that have not answered yet."""

    def start(
        self, task: bytes, begin: Mapping[str, Any], cores: Sequence[Sequence[int]] | None
    ) -> None:
        for rank in range(self._num):
            self._children.append(Child("thrifty.hetero._task_main", preload=_PRELOAD))
            bound = None if cores is None else list(cores[rank])
            self._send(rank, sys.path, task, {**begin, "rank": rank, "cores": bound})
        # The first process opens the store at which all of them meet.
        port = self._receive(0)
        for rank in range(self._num):
            self._send(rank, {"port": port, "workers": self._num})
        self.hear()

    def tell(self, *message: Any) -> None:
        if not self._children:
            raise WorkerLostError("the workers of this trial have ended")
        for rank in range(self._num):
            self._send(rank, message)

    def hear(self) -> list[Any]:
        """Receive one answer of each process."""
        return [self._receive(rank) for rank in range(self._num)]

    def state(self) -> bytes:
        if not self._children:
            raise WorkerLostError("the workers of this trial have ended")
        self._send(0, ("get",))
        answer: bytes = self._receive(0)
        return answer

    def end(self) -> None:
        while self._children:
            self._children.pop().end()

    def _send(self, rank: int, *messages: Any) -> None:
        # A dead worker is detected and reported when an answer is awaited.
        self._asked.add(rank)
        for message in messages:
            self._children[rank].send(message)

    def _receive(self, rank: int) -> Any:
        """Wait for an answer of one process.

        All processes are watched: if any of them is gone, the others wait for it, and no answer
        comes.
        """
        while not self._inbox[rank]:
            if self._lost and not self._asked - self._lost.keys():
                raise self._all_lost()  # the others have answered, so nothing more will be heard
            left = [each for i, each in enumerate(self._children) if i not in self._lost]
            for child in wait_for(left, None):
                self._read(self._children.index(child))
        return self._inbox[rank].popleft()

    def _read(self, rank: int) -> None:
        for kind, answer in self._messages(rank):
            if kind == "lost":
                # The cause is the other's end or error, which may be heard of later.
                self._lost[rank] = answer
            elif kind != "error":
                self._inbox[rank].append(answer)
                self._asked.discard(rank)
            else:
                for other in range(self._num):
                    # The failed worker may only be the first to notice that another one is gone.
                    if other != rank and other not in self._lost:
                        self._messages(other)
                self.end()
                raise TrainingError(f"worker {rank} of {self._num}: {answer}")

    def _all_lost(self) -> WorkerLostError:
        self.end()
        rank, answer = next(iter(self._lost.items()))
        return WorkerLostError(
            f"workers of this trial have lost each other; worker {rank} of {self._num}: {answer}"
        )

    def _messages(self, rank: int) -> list[Any]:
        try:
            return self._children[rank].receive()
        except ChildEndedError as error:
            self.end()
            raise WorkerLostError(
                f"worker {rank} of {self._num} of this trial ended without a word ({error})"
            ) from error
