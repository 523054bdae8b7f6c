"""Random branches of trials: what they say that they cost, what they train, and their results."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import thrifty as th
from bench.common.digits_task import Digits
from bench.common.harness import Goal, equal, table
from thrifty.core import EpochDone


EPOCHS, EVERY = 20, 5
SPACE = {"lr": th.Choice([th.Step(0.1, [6]), th.Step(0.1, [13]), th.Cosine(0.2), 0.05])}
SOLO = th.Local(pack="solo")


class Counted:
    """Counts the epochs that are trained."""

    num = 0

    def on_event(self, event: object) -> None:
        self.num += isinstance(event, EpochDone)


def _study(folder: Path, space: dict[str, Any], *, every: int | None = None) -> th.Study:
    return th.Study(
        Digits(),
        th.Space(**space),
        algorithm=th.GridSearch(max_epochs=EPOCHS),
        metric="accuracy",
        mode="max",
        name="branches",
        storage=th.Storage(url=f"sqlite:///{folder}/t.db", checkpoint_every=every),
    )


def random_branches(num: int) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Branch off random trials at random epochs; train each branch, and alone.

    Half of the branches begin where a state is kept (``checkpoint_every``), the others anywhere.
    """
    rng = np.random.default_rng(0)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        study = _study(Path(place), SPACE, every=EVERY).run(progress=False, executor=SOLO)
        for number in range(num):
            trial = int(rng.integers(len(study.trials)))
            at_state = number % 2 == 0
            steps = EPOCHS // EVERY
            epoch = int(EVERY * rng.integers(1, steps) if at_state else rng.integers(1, EPOCHS))
            factor = float(rng.choice([0.1, 0.3, 3.0])) * float(rng.uniform(0.9, 1.1))
            branch = study.branch(trial, after=epoch, scale={"lr": factor})
            study.enqueue_trial(branch)
            counted = Counted()
            study.run(progress=False, executor=SOLO, observers=[counted])
            with tempfile.TemporaryDirectory() as other:
                alone = _study(Path(other), dict(branch.config)).run(progress=False, executor=SOLO)
                (wanted,) = alone.trials
            rows.append({
                "at a kept state": epoch % EVERY == 0,
                "known": branch.known_epochs,
                "said to be trained again": branch.epochs_again,
                "said to be trained": branch.epochs_to_train,
                "trained": counted.num,
                "equal": study.trials[-1].curve == wanted.curve,
            })
    kept = [row for row in rows if row["at a kept state"]]
    table([
        {
            "branches": name,
            "number": len(some),
            "epochs in common": sum(row["known"] for row in some),
            "of these trained again": sum(row["said to be trained again"] for row in some),
            "epochs trained": sum(row["trained"] for row in some),
        }
        for name, some in (
            ("at a kept state", kept),
            ("elsewhere", [row for row in rows if not row["at a kept state"]]),
        )
    ])
    again = sum(row["trained"] - (EPOCHS - row["known"]) for row in kept)
    wrong = sum(row["trained"] != row["said to be trained"] for row in rows)
    return rows, [
        equal("branches at kept states: epochs trained again", again, 0),
        equal("branches that trained something else than they said", wrong, 0),
        equal("branches equal to training alone", sum(row["equal"] for row in rows), num),
    ]
