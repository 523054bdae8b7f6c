"""The interface of a back-end: K trials in one process on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A trial that takes a slot: its values at ``epoch``, its seed, its state (None: fresh)."""

    values: Mapping[str, Any]
    seed: int
    epoch: int = 0
    state: State | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One epoch of one member: ``values`` at its start, and ``moving`` ones at each of its steps.

    ``epoch`` counts from 0; each sequence in ``moving`` has ``num_steps`` values.
    """

    epoch: int
    values: Mapping[str, Any]
    moving: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Backend(ABC):
    """Trains the members of its slots, one epoch at a time; each gets the result it would get alone."""

    @abstractmethod
    def stack(self, slot: int, member: Member) -> None:
        """Puts a trial into a slot."""

    @abstractmethod
    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """How many optimiser steps the next epoch of a member has."""

    @abstractmethod
    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Mapping[str, float]]:
        """Trains one epoch of each given slot and evaluates it; metrics by slot.

        Raises:
            DivergedError: a training loss is not finite.
        """

    @abstractmethod
    def unstack(self, slot: int) -> State:
        """A copy of the full state of a member; it stays in its slot."""
