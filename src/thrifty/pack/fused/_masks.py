"""Random numbers of a step for all trials of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._member import FusedTrial
from ._randomness import Draw, fill


def draw_masks(
    draws: Sequence[Draw], trials: Sequence[FusedTrial], *, num_rows: Sequence[int] | None
) -> None:
    """Fill each trial's dropout masks.

    Trials at the same position of the same random stream get the same masks, drawn only once.

    Args:
        draws: The random numbers that the program needs.
        trials: The trials in the first rows.
        num_rows: Number of real rows of each trial's batch where these differ, else None.
    """
    first: dict[Any, int] = {}
    same = [
        first.setdefault((t.draw_key, num_rows and num_rows[k]), k)
        for k, t in enumerate(trials)
    ]
    drawing = [k for k in range(len(same)) if same[k] == k]
    for k in drawing:
        trials[k].seed_step()
    for draw in draws:
        for k in drawing:
            fill(
                Draw(noise=draw.noise[k : k + 1], path=draw.path, p=draw.p),
                generators=[trials[k].generator],
                rates=[trials[k].rates],
                num_rows=None if num_rows is None else [num_rows[k]],
            )
        for k, source in enumerate(same):
            if source != k:
                draw.noise[k].copy_(draw.noise[source])
