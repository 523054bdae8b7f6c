"""Rules for what torch functions do to packed tensors, one file for each kind of function.

Importing this package registers them.
"""

from . import (
    _attention as _attention,
    _convolution as _convolution,
    _dropout as _dropout,
    _embedding as _embedding,
    _linear as _linear,
    _losses as _losses,
    _normalisation as _normalisation,
    _pointwise as _pointwise,
    _pooling as _pooling,
    _recurrent as _recurrent,
    _reductions as _reductions,
    _shapes as _shapes,
)
