"""Optimizers over flat state: one update for K trials, each with its own hyper-parameters."""

from ._base import (
    GroupedOptimizer as GroupedOptimizer,
    RowOptimizer as RowOptimizer,
    Rows as Rows,
    clip_rows as clip_rows,
)
from ._find import grouped_optimizer as grouped_optimizer, optimizer_for as optimizer_for
from ._rules import (
    SGD as SGD,
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    RMSprop as RMSprop,
)


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
