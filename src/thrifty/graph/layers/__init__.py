"""Layers on blocks: plain modules called as ``layer(x, block)``."""

from ._gat import GAT as GAT
from ._gin import GIN as GIN
from ._sage import SAGE as SAGE


__all__ = ["GAT", "GIN", "SAGE"]
