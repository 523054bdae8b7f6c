"""K models as one batched computation.

First, a dry run shows that each trial gets its own gradient (``_dry_run``). User code then runs
once on packed tensors (``_packed``, ``rules``). Its computation is recorded (``_record``) and
replayed on fixed memory (``_tape``) for the trials of a block (``_block``).
"""

from ._block import Block
from ._dry_run import dry_run
from ._fusable import UnfusableError, register_rule
from ._packed import Group, Packed
from ._step import BlockOptions


__all__ = ["Block", "BlockOptions", "Group", "Packed", "UnfusableError", "dry_run", "register_rule"]
