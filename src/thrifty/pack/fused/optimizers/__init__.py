"""Optimizers over flat state: one update for K trials, each with its own hyper-parameters."""

from ._fused_optimizer import GroupedOptimizer, RowOptimizer, Rows, clip_rows
from ._rules import SGD, Adagrad, Adam, AdamW, RMSprop, grouped_optimizer, optimizer_for


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
