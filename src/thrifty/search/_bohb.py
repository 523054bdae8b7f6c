"""BOHB: Hyperband with a kernel density sampler."""

from __future__ import annotations

from ._hyperband import Hyperband
from ._samplers import KDESampler


def BOHB(  # noqa: N802
    *,
    max_epochs: int,
    eta: int = 3,
    num_trials: int | None = None,
    random_share: float = 1 / 3,
    share: float = 0.0,
) -> Hyperband:
    """Return Hyperband with configurations from kernel densities of good and bad trials.

    Falkner, Klein and Hutter, "BOHB: Robust and Efficient Hyperparameter Optimization at Scale",
    ICML 2018. This is short for a ``Hyperband`` with a ``KDESampler`` and the authors' constants;
    write that out to set the model's other options.

    Args:
        max_epochs: most epochs that a trial is trained.
        eta: one in ``eta`` trials is promoted at each rung.
        num_trials: number of trials; the brackets repeat until all are drawn (default: each bracket
            once).
        random_share: share of the draws that are random.
        share: part of the best candidate's lead over the median that may be given up to share
            training.

    Raises:
        AlgorithmError: an option is out of range.

    >>> BOHB(max_epochs=27, num_trials=100).sampler
    KDESampler(top_share=0.15, num_candidates=64, random_share=0.3333333333333333,
        bandwidth_factor=3.0, min_bandwidth=0.001, min_points=None, share=0.0)
    """
    return Hyperband(
        max_epochs=max_epochs,
        eta=eta,
        num_trials=num_trials,
        sampler=KDESampler(min_bandwidth=1e-3, random_share=random_share, share=share),
    )
