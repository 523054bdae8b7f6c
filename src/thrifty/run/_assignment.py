"""What crosses the seam between a study and an executor."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.core import Event
from thrifty.plan import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A chain of stages for one worker; ``seed`` is the trial seed of the whole plan."""

    number: int
    chain: Chain
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Trials of a structure are not fused any more; ``key`` and ``reason`` are those of ``Refused``."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something happened to an assignment; ``event`` is None when its worker is through with it."""

    assignment: int
    event: Event | None = None
