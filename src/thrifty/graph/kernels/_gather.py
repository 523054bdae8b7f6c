"""Gathering of feature rows for the nodes of a batch."""

from __future__ import annotations

import numpy as np

from ._compile import kernel
from ._fetch import LINE, fetch_row, rows_ahead


_HALF = np.uint32(16)
_SIGN, _MAGNITUDE = np.uint32(0x8000), np.uint32(0x7FFF)
_SHIFT = np.uint32(13)
"""Number of bits by which the fraction of a float32 is longer than that of a float16."""
_BIAS = np.uint32((127 - 15) << 23)
_FIRST_NORMAL, _INFINITE = np.uint32(1 << 23), np.uint32(31 << 23)
"""Exponents 1 and 31 of float16, at the position of float32's exponent."""
_SMALLEST = np.float32(2.0**-14)
_QUIET, _NOTHING = np.uint32(1 << 22), np.uint32(0)


@kernel
def gather_rows(features: np.ndarray, nodes: np.ndarray, out: np.ndarray) -> None:
    """Copy ``features[nodes[i]]`` to ``out[i]``, bit by bit."""
    width = features.shape[1]
    ahead, step = rows_ahead(features), LINE // features.itemsize
    for i in range(len(nodes)):
        if i + ahead < len(nodes):
            fetch_row(features, nodes[i + ahead], step)
        node = np.uint64(nodes[i])
        for f in range(width):
            out[i, f] = features[node, f]


@kernel
def gather_bfloat16(features: np.ndarray, nodes: np.ndarray, out: np.ndarray) -> None:
    """Gather rows of raw bfloat16 (uint16) as raw float32 (uint32), whose upper half they are."""
    width = features.shape[1]
    ahead, step = rows_ahead(features), LINE // features.itemsize
    for i in range(len(nodes)):
        if i + ahead < len(nodes):
            fetch_row(features, nodes[i + ahead], step)
        node = np.uint64(nodes[i])
        for f in range(width):
            out[i, f] = np.uint32(features[node, f]) << _HALF


@kernel
def gather_float16(features: np.ndarray, nodes: np.ndarray, out: np.ndarray) -> None:
    """Gather rows of raw float16 (uint16) as raw float32 (uint32), in vector instructions.

    NaN comes out quiet, as from the processor's own conversion.
    """
    width = features.shape[1]
    ahead, step = rows_ahead(features), LINE // features.itemsize
    for i in range(len(nodes)):
        if i + ahead < len(nodes):
            fetch_row(features, nodes[i + ahead], step)
        node = np.uint64(nodes[i])
        for f in range(width):
            half = np.uint32(features[node, f])
            bits = np.uint32((half & _MAGNITUDE) << _SHIFT)
            normal = np.uint32(bits + _BIAS)
            # For a subnormal number, add its fraction to that of 2**-14 and subtract 2**-14.
            lifted = np.uint32(normal + _FIRST_NORMAL).view(np.float32)
            small = np.float32(lifted - _SMALLEST).view(np.uint32)
            large = np.uint32(normal + _BIAS) | (_QUIET if bits > _INFINITE else _NOTHING)
            value = small if bits < _FIRST_NORMAL else (large if bits >= _INFINITE else normal)
            out[i, f] = value | np.uint32((half & _SIGN) << _HALF)
