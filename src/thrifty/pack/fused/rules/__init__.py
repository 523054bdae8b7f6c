"""Rules for what torch functions do to packed tensors, one file for each family.

Importing this package registers them.
"""

from . import _attention_losses, _channels, _layers, _tensor_operations


FAMILIES = (_attention_losses, _channels, _layers, _tensor_operations)
"""The modules whose import has registered the rules."""
