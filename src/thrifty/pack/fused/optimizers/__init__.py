"""Optimizers over flat state: one update for K trials, each with its own hyper-parameters."""

from ._adagrad import Adagrad as Adagrad
from ._adam import Adam as Adam, AdamW as AdamW
from ._base import RowOptimizer as RowOptimizer, Rows as Rows
from ._clip import clip_rows as clip_rows
from ._find import grouped_optimizer as grouped_optimizer, optimizer_for as optimizer_for
from ._grouped import GroupedOptimizer as GroupedOptimizer
from ._rmsprop import RMSprop as RMSprop
from ._sgd import SGD as SGD


__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "GroupedOptimizer",
    "RMSprop",
    "RowOptimizer",
    "Rows",
    "clip_rows",
    "grouped_optimizer",
    "optimizer_for",
]
