"""What a task is, by content: the code and the values that training and evaluation depend on."""

from ._own import is_own as is_own, is_own_module as is_own_module
from ._place import MISSING as MISSING, Place as Place
from ._reach import Reach as Reach, Reached as Reached, reach as reach


__all__ = ["MISSING", "Place", "Reach", "Reached", "is_own", "is_own_module", "reach"]
