"""Methods of ``bench_search``: thrifty's algorithms with their samplers, and a baseline.

Every bandit has to beat the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.special import log_ndtr, ndtr

from bench.search.auto_experiments import FirstWaveASHA, LaneASHA
from bench.search.curves import MAX_EPOCHS
from bench.search.even_sampler import EvenSampler
from bench.search.literal_sub_sampling import LiteralSubSampling
from thrifty.search import (
    ASHA,
    BOHB,
    BOSS,
    Algorithm,
    Auto,
    CheckedASHA,
    CheckedBOSS,
    Decision,
    FixedWidthSubSampling,
    FreezeThaw,
    History,
    Hyperband,
    KDESampler,
    MedianStopping,
    Proposal,
    RandomForestSampler,
    RandomSampler,
    RandomSearch,
    Sampler,
    Stop,
    StoppingASHA,
    SubSampling,
    SuccessiveHalving,
    TPESampler,
    WideBOSS,
)
from thrifty.space import Space


WIDEST = 27
"""Trials of the widest bracket, and of every method with one bracket only."""
TRIALS_OF_A_PASS = 49
"""Trials of all brackets of Hyperband together."""
QUEUED = 32
"""Fully trained trials: more than start before a budget of one pass is used up."""
FREEZE_THAW_REPEATS = 2
"""Repetitions of freeze-thaw: a study with 32 workers takes about 10 s of processor time."""
AUTO_TRIALS = 150
"""Trials of Auto for each pass: a few more than ``ASHA`` starts in it."""
ENDLESS = 100_000
"""Trials of methods that go on until they are stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopAfterFirst(Algorithm):
    """Train ``num_trials`` for one epoch and the best ``num_kept`` of them to the end.

    Egele et al., "Is One Epoch All You Need for Multi-Fidelity Hyperparameter Optimization?", 2023.
    """

    max_epochs: int
    num_trials: int
    num_kept: int
    sampler: Sampler = field(default_factory=RandomSampler)

    def ask(
        self, history: History, space: Space, *, num: int, rng: np.random.Generator
    ) -> Sequence[Decision]:
        """Propose all trials, then decide once all have reported."""
        missing = self.num_trials - len(history)
        if missing > 0:
            configs = self.sampler.sample(history, space, num=missing, rng=rng)
            return [Proposal(target=1, config=config) for config in configs]
        if len(history.leaderboard(1)) < self.num_trials:
            return []
        kept = {number for _, number in history.leaderboard(1)[: self.num_kept]}
        return [
            Proposal(target=self.max_epochs, trial=number) if number in kept else Stop(trial=number)
            for _, number in history.waiting(1)
        ]


class Method(NamedTuple):
    """A name for the tables, and the algorithm for a budget of ``n`` passes of Hyperband.

    ``slow``: its sampler takes several milliseconds for a draw, so it gets fewer repetitions.
    ``most_repeats``: no more repetitions than this, as each decision takes tens of milliseconds.
    """

    name: str
    make: Callable[[int], Algorithm]
    slow: bool = False
    most_repeats: int | None = None


def quicken_optuna() -> None:
    """Make Optuna's TPE use SciPy's normal distribution instead of its own in Python.

    The numbers are the same, in half the time, for peers as for us. A version of Optuna that keeps
    these functions elsewhere is left as it is.
    """
    try:
        from optuna.samplers._tpe import _truncnorm  # noqa: PLC0415 - nothing to patch without it
    except ImportError:
        return
    for name, function in {"_log_ndtr": log_ndtr, "_ndtr": ndtr}.items():
        if hasattr(_truncnorm, name):
            setattr(_truncnorm, name, function)


def pass_epochs() -> int:
    """Return the epochs of one pass of Hyperband: the budget of every method.

    >>> pass_epochs()
    357
    """
    total = 0
    for size, rungs in Hyperband(max_epochs=MAX_EPOCHS).brackets():
        before = 0
        for rung in rungs:
            total += size * (rung - before)
            size, before = max(size // 3, 1), rung
    return total


def methods() -> list[Method]:
    """Return all of our methods but ``WideBOSS``; ``n`` is the number of passes."""
    R, K = MAX_EPOCHS, WIDEST
    return [
        Method("random search", lambda n: RandomSearch(max_epochs=R, num_trials=QUEUED * n)),
        Method(
            "top 5 after 1 epoch",
            lambda n: TopAfterFirst(max_epochs=R, num_trials=K * n, num_kept=5 * n),
        ),
        Method("median stopping", lambda n: MedianStopping(max_epochs=R, num_trials=K * n)),
        Method("halving", lambda n: SuccessiveHalving(max_epochs=R, num_trials=K * n)),
        Method("Hyperband", lambda n: Hyperband(max_epochs=R, num_trials=TRIALS_OF_A_PASS * n)),
        Method("Auto", lambda n: Auto(max_epochs=R, num_trials=AUTO_TRIALS * n)),
        Method("checked ASHA", lambda _: CheckedASHA(max_epochs=R, num_trials=ENDLESS)),
        Method("ASHA", lambda _: ASHA(max_epochs=R, num_trials=ENDLESS)),
        Method(
            "freeze-thaw",
            lambda _: FreezeThaw(max_epochs=R, num_trials=ENDLESS),
            slow=True,
            most_repeats=FREEZE_THAW_REPEATS,
        ),
        Method(
            "TPE + halving",
            lambda n: SuccessiveHalving(max_epochs=R, num_trials=K * n, sampler=TPESampler()),
            slow=True,
        ),
        Method("BOHB", lambda n: BOHB(max_epochs=R, num_trials=TRIALS_OF_A_PASS * n)),
        Method("SS", lambda n: FixedWidthSubSampling(max_epochs=R, num_trials=K * n)),
        Method("SS literal", lambda n: LiteralSubSampling(max_epochs=R, num_trials=K * n)),
        Method("SS asynchronous", lambda n: SubSampling(max_epochs=R, num_trials=3 * K * n)),
        Method("published BOSS", lambda n: BOSS(max_epochs=R, num_trials=TRIALS_OF_A_PASS * n)),
    ]


def auto_variants() -> list[Method]:
    """Return experiments for ``Auto``, which run only where ``--methods`` names them.

    They were tried on the tuning half; see docs/design/search.md.
    """
    R, K = MAX_EPOCHS, WIDEST

    def checked(name: str, sampler: Sampler) -> Method:
        def make(n: int) -> Algorithm:
            return CheckedASHA(max_epochs=R, num_trials=AUTO_TRIALS * n, sampler=sampler)

        return Method(name, make)

    return [
        checked("Auto, random draws", RandomSampler()),
        checked("Auto, KDE draws", KDESampler()),
        checked("Auto, even draws", EvenSampler()),
        checked("Auto, half random", KDESampler(random_share=0.5)),
        Method(
            "Auto, leader lane",
            lambda n: LaneASHA(max_epochs=R, num_trials=AUTO_TRIALS * n, lane="leader"),
        ),
        Method(
            "Auto, spot checks",
            lambda n: LaneASHA(
                max_epochs=R, num_trials=AUTO_TRIALS * n, lane="spot checks", size=2
            ),
        ),
        Method(
            "Auto, first wave",
            lambda n: FirstWaveASHA(
                max_epochs=R, num_trials=AUTO_TRIALS * n, sampler=KDESampler(), wave=10
            ),
        ),
        Method("checked BOSS", lambda n: CheckedBOSS(max_epochs=R, num_trials=AUTO_TRIALS * n)),
        Method("stopping ASHA", lambda _: StoppingASHA(max_epochs=R, num_trials=ENDLESS)),
        Method(
            "SS asynchronous, KDE",
            lambda n: SubSampling(max_epochs=R, num_trials=3 * K * n, sampler=KDESampler()),
        ),
    ]


def boss_variants() -> list[Method]:
    """Return variants of ``WideBOSS``.

    Only the winner on the first half of the tasks is judged.
    """
    return [_boss(sampler) for sampler in BOSS_SAMPLERS]


BOSS_SAMPLERS: dict[str, Sampler] = {
    "forest": RandomForestSampler(num_trees=20),
    "KDE": KDESampler(),
}


def _boss(sampler: str) -> Method:
    return Method(
        f"BOSS {sampler}, widest",
        # Five of the widest brackets take a little more than a pass.
        lambda n: WideBOSS(
            max_epochs=MAX_EPOCHS, num_trials=5 * WIDEST * n, sampler=BOSS_SAMPLERS[sampler]
        ),
    )
