"""Functions of the normal distribution that samplers need and NumPy lacks."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt


FloatArray = npt.NDArray[np.float64]

_ROOT_2 = math.sqrt(2.0)
_ROOT_2_PI = math.sqrt(2.0 * math.pi)
_STANDARD = NormalDist()


def cdf(z: FloatArray) -> FloatArray:
    """Return the standard normal distribution function.

    >>> cdf(np.array([-1.96, 0.0])).round(3)
    array([0.025, 0.5  ])
    """
    erf = math.erf
    values = np.array([erf(x) for x in (z / _ROOT_2).ravel().tolist()], float)
    return 0.5 * (1.0 + values.reshape(z.shape))


def pdf(z: FloatArray) -> FloatArray:
    """Return the standard normal density.

    >>> pdf(np.array([0.0])).round(3)
    array([0.399])
    """
    density: FloatArray = np.exp(-0.5 * z * z) / _ROOT_2_PI
    return density


def normal_scores(scores: FloatArray) -> FloatArray:
    """Return the normal score of each score: its expected place among draws of a standard normal.

    Equal scores get their mean rank. Only the order counts, so a loss of a billion is no further
    away than the next worse one.

    >>> normal_scores(np.array([0.9, -1e9, 0.8])).round(3)
    array([ 0.967, -0.967,  0.   ])
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - 0.5 * counts  # lower scores, plus half of the equal ones
    quantiles = [_STANDARD.inv_cdf(rank / len(scores)) for rank in ranks.tolist()]
    return np.array(quantiles, float)[inverse]
