"""The interface of a back-end, which trains K trials in one process on one device."""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from thrifty.core import TaskError, TrainingError, error_text, is_from_user

from ._state import State


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A trial that takes a slot.

    Attributes:
        values: Its hyper-parameters at ``epoch``.
        seed: The seed of its random streams.
        epoch: The epoch at which it begins.
        state: The state it begins with; None for a fresh model.
        first: Its hyper-parameters at epoch 0, from which model, data and optimizer are built, so
             that a continued trial is the same as one that was never interrupted. None: ``values``.
        moving: The hyper-parameters known to change during training.
        alone: Whether it must not be fused with others, because a check of it has failed.
        stop: The epoch at which its stage ends; None if that is not known.
    """

    values: Mapping[str, Any]
    seed: int
    epoch: int = 0
    state: State | None = None
    first: Mapping[str, Any] | None = None
    moving: frozenset[str] = frozenset()
    alone: bool = False
    stop: int | None = None

    @property
    def first_values(self) -> Mapping[str, Any]:
        """The hyper-parameters from which model, data and optimizer are built."""
        return self.values if self.first is None else self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch of one member.

    Attributes:
        epoch: The index of the epoch, from 0.
        values: The hyper-parameters at its start.
        moving: Hyper-parameters that change within the epoch; each sequence has a value per step.
        verify: Whether the results leave the worker after this epoch and so must be verified by
            then. If False, a back-end may leave epochs unverified for a while (see
            ``Backend.num_unverified``).
        stop: The epoch at which its stage ends; None if that is not known.
    """

    epoch: int
    values: Mapping[str, Any]
    moving: Mapping[str, Sequence[float]] = field(default_factory=dict)
    verify: bool = True
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """A member's share of the time spent.

    Attributes:
        seconds: The whole share.
        checks: The part of ``seconds`` that went into checks.
    """

    seconds: float = 0.0
    checks: float = 0.0

    def plus(self, other: TimeShare) -> TimeShare:
        """Return the sum."""
        return TimeShare(seconds=self.seconds + other.seconds, checks=self.checks + other.checks)


Outcome = Mapping[str, float] | Exception
"""The result of an epoch: its metrics, or the error raised by this trial's own code."""


class UnverifiedError(Exception):
    """The training since a trial's last check does not count: train the trial again, alone.

    Attributes:
        mismatch: Whether a check has failed, so that trials of this structure are not fused again.
    """

    __module__ = "thrifty.pack"  # tracebacks name the place to import it from

    def __init__(self, reason: str, *, mismatch: bool) -> None:
        super().__init__(reason)
        self.mismatch = mismatch


class Backend(ABC):
    """A trainer of the members in its slots, epoch by epoch.

    Each member gets the result that it would get alone. An error in one trial becomes its outcome
    and does not affect the others; the trial loses what it has trained since its last epoch.
    Running out of memory raises.
    """

    @abstractmethod
    def put(self, slot: int, member: Member) -> None:
        """Put a trial into a free slot. Errors of the task's code propagate."""

    @abstractmethod
    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """Return how many optimizer steps the next epoch of a member has."""

    @abstractmethod
    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Train until at least one member ends its epoch, and return the outcomes of those that do.

        ``plans`` has an epoch for each slot that ended its last one (or is new). Slots in the
        middle of an epoch continue it.
        """

    def num_unverified(self, slot: int) -> int:
        """Return how many of a member's last epochs are not verified yet.

        Keep their results until a later epoch is verified. If that fails, its outcome is an
        UnverifiedError.
        """
        return 0

    @abstractmethod
    def state(self, slot: int) -> State:
        """Return a copy of a member's full state at the end of an epoch; it stays in its slot."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Free a slot."""


def guarded(compute: Callable[[], T]) -> T | Exception:
    """Return the result of a call or its error; running out of memory propagates."""
    try:
        with no_exits():
            return compute()
    except Exception as error:
        if out_of_memory(error):
            raise
        return _explained(error)


def _explained(error: Exception) -> Exception:
    """Return what to do about an error that speaks of PyTorch's own code only."""
    if not (isinstance(error, RuntimeError) and "c10/core/impl/COW.cpp" in str(error)):
        return error
    found = TaskError(
        "the model makes a frozen tensor or a buffer larger (resize_, or out= with one that is too "
        "small), which PyTorch cannot do with memory that trials share; give it its full size in "
        "__init__, or make a new tensor in forward"
    )
    found.__cause__ = error
    return found


@contextmanager
def no_exits() -> Iterator[None]:
    """Turn ``sys.exit()`` in the task's code into an error of the task; Ctrl-C propagates.

    Raises:
        TrainingError: The code has raised something that is meant to end the process.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if is_from_user(error):
            raise
        raise TrainingError(
            f"the task's code raised {error_text(error)}, which is meant to end the whole process; "
            "raise an Exception for what went wrong, or return"
        ) from error


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()


@cache
def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system than Linux
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or this machine, has run out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in error_text(error)
    )
