"""What an agent proposes: new configurations, repeats, near-repeats, and longer looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np


Kind = Literal["new", "repeat", "late change", "longer"]

WHOLE = 20
LOOK = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A configuration that an agent wants to see.

    Attributes:
        kind: Why: a new one; one of before; one of before that changes later; one of which it has
            seen the beginning.
        lr: The first learning rate.
        drop: The epoch at which it drops.
        gamma: The factor by which it drops.
        epochs: How far it is to be trained.
    """

    kind: Kind
    lr: float
    drop: int
    gamma: float
    epochs: int

    def config(self) -> dict[str, Any]:
        """Return the configuration as the agent writes it."""
        fields = {"value": self.lr, "milestones": [self.drop], "gamma": self.gamma}
        return {"lr": {"schedule": "Step", "fields": fields}}


def proposals(num: int, *, seed: int = 0) -> Iterator[Proposal]:
    """Yield what an agent proposes, one after the other.

    Two in five are new, a third of those only looked at for a few epochs; one in five repeats an
    earlier one; one in four has the first part of an earlier one; the others train one to the end
    that was only looked at.
    """
    rng = np.random.default_rng(seed)
    seen: list[Proposal] = []
    looked_at: list[Proposal] = []
    for _ in range(num):
        draw = rng.random()
        if not seen or draw < 0.4:
            made = Proposal(
                kind="new",
                lr=float(np.exp(rng.uniform(np.log(0.005), np.log(0.3)))),
                drop=int(rng.integers(3, 20)),
                gamma=float(rng.choice([0.1, 0.3])),
                epochs=LOOK if rng.random() < 1 / 3 else WHOLE,
            )
        elif draw < 0.6:
            made = replace(_one(rng, seen), kind="repeat")
        elif draw < 0.85 or not looked_at:
            base = _one(rng, seen)
            drop = int(rng.integers(base.drop, 20))
            made = replace(base, kind="late change", drop=drop, epochs=WHOLE)
        else:
            made = replace(looked_at.pop(), kind="longer", epochs=WHOLE)
        seen.append(made)
        if made.epochs == LOOK and made.kind == "new":
            looked_at.append(made)
        yield made


def _one(rng: np.random.Generator, seen: list[Proposal]) -> Proposal:
    return seen[int(rng.integers(len(seen)))]
