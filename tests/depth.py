"""How many random cases a test draws: few in each run of the suite, many in `make thorough`."""

from __future__ import annotations

import os
from typing import Final


IS_THOROUGH: Final = bool(os.environ.get("THRIFTY_THOROUGH"))


def draws(few: int, many: int) -> int:
    """Return how many cases to draw; more of them repeat what the first ones test."""
    return many if IS_THOROUGH else few
