"""Sampled neighbourhoods in the format of PyTorch Geometric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thrifty.core import MissingExtraError


def pyg_data(
    *,
    nodes: torch.Tensor,
    edge_index: torch.Tensor,
    hop_nodes: Sequence[int],
    hop_edges: Sequence[int],
    x: torch.Tensor | None,
    y: torch.Tensor | None,
) -> Any:
    """Return ``torch_geometric.data.Data`` with the fields of PyG's ``NeighborLoader``.

    Arguments are as in ``Batch``.

    Raises:
        MissingExtraError: PyG is not installed.
    """
    try:
        from torch_geometric.data import Data  # noqa: PLC0415 -- optional
    except ImportError:
        raise MissingExtraError("torch-geometric", extra="pyg") from None
    return Data(
        x=x,
        y=y,
        edge_index=edge_index,
        n_id=nodes,
        batch_size=hop_nodes[0],
        num_sampled_nodes=list(hop_nodes),
        num_sampled_edges=list(hop_edges),
        num_nodes=len(nodes),
    )
