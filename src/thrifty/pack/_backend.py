"""The interface of a back-end: K trials in one process on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from thrifty.core import TrainingError, error_text, is_from_user

from ._state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A trial that takes a slot.

    Attributes:
        values: Its hyper-parameters at ``epoch``.
        seed: Names its random streams.
        epoch: Where it begins.
        state: What it begins with; None for a fresh model.
        first: Its hyper-parameters at epoch 0, with which model, data and optimizer are made, so
             that a continued trial is the same as one that was never interrupted. None: ``values``.
        moving: The hyper-parameters that are known to move while it trains.
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
        """The hyper-parameters with which model, data and optimizer are made."""
        return self.values if self.first is None else self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch of one member.

    Attributes:
        epoch: Counts from 0.
        values: The hyper-parameters at its start.
        moving: Those that move within the epoch; each sequence has a value for each step.
        verify: Whether the results leave the worker after this epoch, so that they must be verified by then. If it
            is False, a back-end may leave epochs unverified for a while (see ``Backend.num_unverified``).
        stop: The epoch at which its stage ends; None if that is not known.
    """

    epoch: int
    values: Mapping[str, Any]
    moving: Mapping[str, Sequence[float]] = field(default_factory=dict)
    verify: bool = True
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """A member's share of the time that was spent.

    Attributes:
        seconds: All of it.
        checks: The part of ``seconds`` that went into checks.
    """

    seconds: float = 0.0
    checks: float = 0.0

    def plus(self, other: TimeShare) -> TimeShare:
        """Return the sum."""
        return TimeShare(
            seconds=self.seconds + other.seconds, checks=self.checks + other.checks
        )


Outcome = Mapping[str, float] | Exception
"""What came of an epoch: its metrics, or what went wrong in this trial's own code."""


class UnverifiedError(Exception):
    """What a trial trained since its last check does not count: train it again, alone.

    Attributes:
        mismatch: Whether a check has failed, so that trials of this structure are not fused again.
    """

    def __init__(self, reason: str, *, mismatch: bool) -> None:
        super().__init__(reason)
        self.mismatch = mismatch


class Backend(ABC):
    """Trains the members of its slots, epoch by epoch; each gets the result it would get alone.

    What goes wrong in one trial is its outcome and does not touch the others; what it was doing is lost from its last
    epoch on. Running out of memory is raised.
    """

    @abstractmethod
    def stack(self, slot: int, member: Member) -> None:
        """Puts a trial into a free slot. Errors of the task's code come through."""

    @abstractmethod
    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """How many optimiser steps the next epoch of a member has."""

    @abstractmethod
    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Trains until at least one member has ended its epoch, and returns the outcomes of those that have.

        ``plans`` has an epoch for each slot that ended its last one (or is new); slots that are in the middle
        of an epoch go on with it.
        """

    def num_unverified(self, slot: int) -> int:
        """How many of the last epochs of a member are not verified yet.

        Keep their results until a later epoch is verified. If that fails, its outcome is an UnverifiedError.
        """
        return 0

    @abstractmethod
    def unstack(self, slot: int) -> State:
        """A copy of the full state of a member at the end of an epoch; it stays in its slot."""

    @abstractmethod
    def release(self, slot: int) -> None:
        """Frees a slot."""


def guarded(compute: Callable[[], Mapping[str, float]]) -> Outcome:
    """The outcome of something that may raise; running out of memory comes through."""
    try:
        with no_exits():
            return compute()
    except Exception as error:
        if out_of_memory(error):
            raise
        return error


@contextmanager
def no_exits() -> Iterator[None]:
    """Make ``sys.exit()`` in the task's code an error of the task; the user's Ctrl-C comes through.

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


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in error_text(error)
    )
