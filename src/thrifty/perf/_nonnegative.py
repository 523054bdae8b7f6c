"""Least squares with non-negative coefficients, because times are never negative."""

from __future__ import annotations

import numpy as np

from thrifty.core import require


_RIDGE = 1e-6
"""Ridge penalty on the coefficients of normalised columns.

Of equally good fits it selects the smallest, whatever the rounding.
"""


def relative_fit(basis: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the non-negative coefficients with the smallest squared relative error.

    Args:
        basis: terms of each measurement, [measurements, terms].
        times: positive times, [measurements].

    Returns:
        Coefficients, [terms].

    >>> relative_fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([3.0, 5.0])).round(6).tolist()
    [1.0, 2.0]
    """
    nnls = require("scipy.optimize", extra="cloud").nnls
    scaled = basis / times[:, None]
    # Normalise the columns, because scipy's solver depends on the conditioning.
    size = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    num = basis.shape[1]
    rows = np.concatenate([scaled / size, _RIDGE * np.eye(num)])
    wanted = np.concatenate([np.ones(len(times)), np.zeros(num)])
    found, _ = nnls(rows, wanted, maxiter=100 * num)
    out: np.ndarray = found / size
    return out
