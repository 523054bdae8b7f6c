"""Messages between a study and an executor."""

from __future__ import annotations

from dataclasses import dataclass

from thrifty.core import Event
from thrifty.plan import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A chain of stages for one worker; ``seed`` is the seed that all trials of the plan share."""

    number: int
    chain: Chain
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A structure whose trials must no longer be fused; the fields are those of ``Refused``."""

    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An event of an assignment; ``event`` is None when the worker has finished with it."""

    assignment: int
    event: Event | None = None
