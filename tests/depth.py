"""How much the suite tests: a part in each run, all in `make thorough`."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Final, TypeVar


IS_THOROUGH: Final = bool(os.environ.get("THRIFTY_THOROUGH"))

T = TypeVar("T")


def draws(few: int, many: int) -> int:
    """Return how many random cases to draw; more of them repeat what the first ones test."""
    return many if IS_THOROUGH else few


def drawn(cases: Sequence[T], num: int) -> list[T]:
    """Return ``num`` of the cases, the same in each process and each run.

    They are drawn, not every third one, say, in which one of two parameters could always have the
    same value.
    """
    return random.Random(0).sample(list(cases), min(num, len(cases)))
