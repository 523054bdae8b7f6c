"""Rules for what torch functions do to packed tensors, one file for each family.

Importing this package registers them.
"""

from . import _attention, _channels, _layers, _losses, _tensor_operations


FAMILIES = (_attention, _channels, _layers, _losses, _tensor_operations)
"""The modules whose import has registered the rules."""
