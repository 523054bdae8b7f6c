"""A sampled mini-batch: nodes, blocks, features and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from thrifty.core import GraphError

from ._block import Block
from ._convert import pyg_data


Mode = Literal["frontier", "full"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A sampled mini-batch: what a model needs to predict for its seeds.

    The first ``num_seeds`` nodes are the distinct seeds.

    Attributes:
        nodes: the nodes' numbers in the graph; int64, shape ``(num_nodes,)``.
        blocks: one block for each layer, the input layer's first.
        num_seeds: number of distinct seeds; a model returns a row for each.
        seed_rows: the row of each requested seed, duplicates included; int64, shape
            ``(number of requested seeds,)``.
        hop_nodes: number of new nodes at each hop, the seeds first; length ``layers + 1``.
        hop_edges: number of edges sampled at each hop, the seeds' hop first; length ``layers``.
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
        """Number of nodes, seeds included."""
        return len(self.nodes)

    @property
    def num_edges(self) -> int:
        """Number of sampled edges over all hops."""
        return sum(self.hop_edges)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on another device, or itself if it is already there."""
        # "cuda" without a number may be the device that the batch is on.
        if torch.empty(0, device=device).device == self.nodes.device:
            return self
        return copied(self, lambda array: array.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """Return a copy with arrays of its own, so that changes to it affect nothing else."""
        return copied(self, torch.clone)

    def double(self) -> Batch:
        """Return a copy with features and floating-point labels in double precision."""

        def doubled(tensor: torch.Tensor | None) -> torch.Tensor | None:
            real = tensor is not None and tensor.is_floating_point()
            return tensor.double() if real else tensor  # type: ignore[union-attr]

        own = self.clone()
        return replace(own, x=doubled(own.x), y=doubled(own.y))

    def shared(self) -> Batch:
        """Return the batch marked for several trials, so that layers cache input aggregates.

        Each aggregate of the input features is then computed once for all trials. Results may
        differ from those of a batch that is not shared in the last bits, because layers choose
        another order of operations.
        """
        first, *rest = self.blocks
        first = Block(first.indptr, first.indices, num_src=first.num_src, shared=True)
        return replace(self, blocks=(first, *rest))

    def to_pyg(self) -> Any:
        """Return the batch as ``torch_geometric.data.Data``, as PyG's ``NeighborLoader`` does.

        It has these attributes:

        - ``x``
        - ``edge_index``: sources and destinations; int64, shape ``(2, num_edges)``
        - ``n_id``: node numbers in the graph
        - ``batch_size``: number of distinct seeds, which are the first nodes
        - ``num_sampled_nodes`` and ``num_sampled_edges``: lists
        - ``y``: labels of the seeds, unlike PyG's, which has those of all nodes

        PyG's models return a row for each node; the seeds' rows are ``out[: data.batch_size]``.

        Raises:
            GraphError: the batch was sampled with ``mode="full"``, where each layer has its own
                edges.
            MissingExtraError: PyG is not installed.
        """
        if self.mode != "frontier":
            raise GraphError(
                f'a batch sampled with mode="{self.mode}" has other edges at each layer, and '
                'PyG\'s data the same at all; sample with mode="frontier"'
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
    """Return the batch with all arrays copied.

    Arrays that are parts of one array become parts of one copy, as blocks are of each other.
    """
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
