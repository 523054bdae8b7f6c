"""Rules for what torch functions do to packed tensors, one file for each kind of function.

Importing this package registers them.
"""

from . import (
    _attention as _attention,
    _batch_norm as _batch_norm,
    _convolution as _convolution,
    _creation as _creation,
    _dropout as _dropout,
    _embedding as _embedding,
    _group_norm as _group_norm,
    _instance_norm as _instance_norm,
    _layer_norm as _layer_norm,
    _linear as _linear,
    _losses as _losses,
    _pointwise as _pointwise,
    _pooling as _pooling,
    _queries as _queries,
    _recurrent as _recurrent,
    _reductions as _reductions,
    _views as _views,
)
