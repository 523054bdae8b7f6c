"""Least squares with coefficients that cannot be negative: seconds do not run backwards."""

from __future__ import annotations

import numpy as np

from thrifty.core import MissingExtraError


_RIDGE = 1e-6
"""On coefficients of columns of one size: of those that fit alike the smallest, whatever the rounding."""


def relative_fit(basis: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Non-negative coefficients with the smallest squared relative error.

    Args:
        basis: [measurements, terms].
        times: positive, [measurements].

    Returns:
        [terms]

    >>> relative_fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([3.0, 5.0])).round(6).tolist()
    [1.0, 2.0]
    """
    try:
        from scipy.optimize import nnls  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("scipy", extra="cloud") from error
    scaled = basis / times[:, None]
    # Columns of one size: scipy's solver is a matter of conditioning.
    size = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    num = basis.shape[1]
    rows = np.concatenate([scaled / size, _RIDGE * np.eye(num)])
    wanted = np.concatenate([np.ones(len(times)), np.zeros(num)])
    found, _ = nnls(rows, wanted, maxiter=100 * num)
    out: np.ndarray = found / size
    return out
