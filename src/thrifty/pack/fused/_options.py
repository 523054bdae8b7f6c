"""How trials of one structure are fused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """How one structure is fused.

    ``size`` is the number of trials to a block; ``max_padding`` how many times as large as its smallest batch its largest may be;
    ``channels_last`` the order of images in memory; ``compile`` sends training steps through
    ``torch.compile``, ``cuda_graphs`` captures them. The latter two keep a block's steps at its full size, so that
    trials may come and go without anything being made again.
    """

    size: int = 8
    max_padding: float = 1.5
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False

    @property
    def fixed(self) -> bool:
        """Whether free rows are trained along, for nothing."""
        return self.compile or self.cuda_graphs
