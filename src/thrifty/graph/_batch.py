"""A sampled mini-batch: nodes, blocks, features and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from thrifty.core import GraphError

from ._block import Block
from ._to_pyg import pyg_data


Mode = Literal["frontier", "full"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What a model needs to predict for some seeds. The first ``num_seeds`` nodes are the distinct seeds.

    Attributes:
        nodes: int64, shape ``(num_nodes,)``: their numbers in the graph.
        blocks: one for each layer, that of the input first.
        num_seeds: distinct seeds; a model gives a row for each.
        seed_rows: int64, shape ``(number of seeds asked for,)``: the row of each, also where some were asked for twice.
        hop_nodes: nodes that are new at each hop, the seeds first; length ``layers + 1``.
        hop_edges: edges sampled at each hop, that of the seeds first; length ``layers``.
        mode: ``"frontier"`` or ``"full"``.
        x: features of all nodes, shape ``(num_nodes, num_features)``, or None.
        y: labels of the seeds, shape ``(num_seeds, ...)``, or None.
    """

    nodes: torch.Tensor
    blocks: tuple[Block, ...]
    num_seeds: int
    seed_rows: torch.Tensor
    hop_nodes: tuple[int, ...]
    hop_edges: tuple[int, ...]
    mode: Mode
    x: torch.Tensor | None = None
    y: torch.Tensor | None = None

    @property
    def seeds(self) -> torch.Tensor:
        """The distinct seeds; int64, shape ``(num_seeds,)``."""
        return self.nodes[: self.num_seeds]

    @property
    def num_nodes(self) -> int:
        """All nodes, seeds included."""
        return len(self.nodes)

    @property
    def num_edges(self) -> int:
        """Sampled edges of all hops."""
        return sum(self.hop_edges)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same on another device; itself if it is there already."""
        # "cuda" may be where it lies, whatever number that is
        if torch.empty(0, device=device).device == self.nodes.device:
            return self
        return copied(self, lambda array: array.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """A copy whose arrays are its own: what is changed in it changes nothing else."""
        return copied(self, torch.clone)

    def double(self) -> Batch:
        """A copy with features, and labels that are real numbers, in double precision."""

        def doubled(tensor: torch.Tensor | None) -> torch.Tensor | None:
            real = tensor is not None and tensor.is_floating_point()
            return tensor.double() if real else tensor  # type: ignore[union-attr]

        own = self.clone()
        return replace(own, x=doubled(own.x), y=doubled(own.y))

    def shared(self) -> Batch:
        """The same for several trials: what layers make of the input features is kept for the next one that asks.

        A result may differ from that of a batch that is not shared in the last bits, because layers choose another order.
        """
        first, *rest = self.blocks
        first = Block(first.indptr, first.indices, num_src=first.num_src, shared=True)
        return replace(self, blocks=(first, *rest))

    def to_pyg(self) -> Any:
        """The batch as ``torch_geometric.data.Data``, with what PyG's ``NeighborLoader`` puts there.

        ``x``, ``edge_index`` (int64, shape ``(2, num_edges)``: sources, destinations), ``n_id`` (node numbers in the graph), ``batch_size`` (distinct seeds, which are the first
        nodes), ``num_sampled_nodes`` and ``num_sampled_edges`` (lists, for ``trim_to_layer``). ``y`` is that of the seeds, unlike PyG's, which has all nodes'. PyG's
        models give a row for each node: those of the seeds are ``out[: data.batch_size]``.

        Raises:
            GraphError: the batch was sampled with ``mode="full"``: then each layer has edges of its own.
            MissingExtraError: PyG is not installed.
        """
        if self.mode != "frontier":
            raise GraphError(
                f'a batch sampled with mode="{self.mode}" has other edges at each layer, and PyG\'s data the same at all; sample with mode="frontier"'
            )
        return pyg_data(
            nodes=self.nodes,
            edge_index=self.blocks[0].edge_index(),
            hop_nodes=self.hop_nodes,
            hop_edges=self.hop_edges,
            x=self.x,
            y=self.y,
        )


def copied(batch: Batch, copy: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with all arrays copied; those that are parts of one array are parts of one copy, as blocks are of each other."""
    copies: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in copies:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            copies[key] = copy(whole)
        return copies[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    return replace(
        batch,
        nodes=moved(batch.nodes),
        seed_rows=moved(batch.seed_rows),
        blocks=tuple(
            Block(
                moved(block.indptr),
                moved(block.indices),
                num_src=block.num_src,
                shared=block.shared,
            )
            for block in batch.blocks
        ),
        x=None if batch.x is None else moved(batch.x),
        y=None if batch.y is None else moved(batch.y),
    )
