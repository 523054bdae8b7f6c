"""User code that tries to break sharing, each piece with a plain PyTorch loop beside it."""

from . import (
    _changing as _changing,
    _models as _models,
    _precision as _precision,
    _settings as _settings,
    _tasks_later as _tasks_later,
)
from ._case import CORPUS as CORPUS
from ._packed import Verdict as Verdict, run_packed as run_packed
from ._studied import run_studied as run_studied
from ._tasks import MOVING as MOVING
from ._tasks_judged import run_moving as run_moving
