"""Options for fusing trials of one structure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """Options for fusing one structure.

    ``compile`` and ``cuda_graphs`` keep a block's steps at its full size, so that trials can come
    and go without anything being built again.

    Attributes:
        size: Number of trials per block.
        max_padding: Maximum ratio of the largest to the smallest batch size in a block.
        channels_last: Whether images are stored in channels-last layout.
        compile: Whether training steps go through ``torch.compile``.
        cuda_graphs: Whether training steps are captured as CUDA graphs.
    """

    size: int = 8
    max_padding: float = 1.5
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False

    @property
    def fixed(self) -> bool:
        """Whether steps always have the full size, so that free rows train too, with no use."""
        return self.compile or self.cuda_graphs
