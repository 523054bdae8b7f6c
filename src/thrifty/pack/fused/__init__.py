"""K models as one batched computation.

First, a dry run shows that each trial gets its own gradient (``_dry_run``). User code then runs
once on packed tensors (``_packed``, ``rules``). Its computation is recorded (``_record``) and
replayed on fixed memory (``_tape``) for the trials of a block (``_block``).
"""

from ._block import Block as Block
from ._dry_run import dry_run as dry_run
from ._packed import Group as Group, Packed as Packed
from ._registry import UnfusableError as UnfusableError, register_rule as register_rule
from ._step import BlockOptions as BlockOptions


__all__ = [
    "Block",
    "BlockOptions",
    "Group",
    "Packed",
    "UnfusableError",
    "dry_run",
    "register_rule",
]
