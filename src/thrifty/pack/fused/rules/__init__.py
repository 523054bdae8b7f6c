"""Rules for what torch functions do to packed tensors, one file for each kind of function.

Importing this package registers them.
"""

from . import (
    _attention,
    _convolution,
    _layers,
    _losses,
    _normalisation,
    _pointwise,
    _shapes,
)


FAMILIES = (
    _attention,
    _convolution,
    _layers,
    _losses,
    _normalisation,
    _pointwise,
    _shapes,
)
"""The modules whose import has registered the rules."""
