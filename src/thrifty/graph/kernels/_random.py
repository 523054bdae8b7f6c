"""Random numbers as a function of their position.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np

from ._compile import inlined


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32, _11 = (np.uint64(n) for n in (30, 27, 31, 32, 11))
_SMALL = 1 << 16
_UNIT = 2.0**-53


@inlined
def mix(z: np.uint64) -> np.uint64:
    """Return the image of ``z`` under a bijection of 64-bit words that looks random."""
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


@inlined
def stream(key: np.uint64, number: int) -> np.uint64:
    """Return the random state of one row; add ``GOLDEN`` before each number, and mix."""
    return mix(key + np.uint64(number) * GOLDEN)


@inlined
def below(word: np.uint64, bound: int) -> int:
    """Return 0 to ``bound - 1``, each with the same probability to within ``2**-16`` of it."""
    if bound < _SMALL:
        return np.int64(((word >> _32) * np.uint64(bound)) >> _32)
    return np.int64(np.float64(word >> _11) * _UNIT * np.float64(bound))
