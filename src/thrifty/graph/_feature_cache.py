"""A cache for the features of the most requested nodes on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thrifty.core import GraphError

from ._check import checked_nodes


class FeatureCache:
    """A cache that keeps the features of some nodes on a device, so that only others are sent.

    After SALIENT++ (Kaler et al., MLSys 2023), on one machine. Choose the nodes by `top_nodes` of
    `inclusion_probabilities`. Besides the kept rows, the cache takes 4 bytes of main memory for
    each node of the graph. `hit_rate` says what it saves.

    Args:
        features: shape ``(num_nodes, num_features)``, in main memory; may be memory-mapped.
        nodes_kept: nodes whose rows are kept on the device, without duplicates, shape ``(num,)``.
        device: device that keeps the rows.

    Raises:
        GraphError: the features are not rows in main memory, or a node does not exist or is
            listed twice.

    >>> features = torch.arange(8.0).reshape(4, 2)
    >>> cache = FeatureCache(features, [3, 0], "cpu")
    >>> cache.gather(torch.tensor([1, 3]))
    tensor([[2., 3.],
            [6., 7.]])
    >>> cache.hit_rate(torch.tensor([1, 3]))
    0.5
    """

    def __init__(self, features: torch.Tensor, nodes_kept: Any, device: Any = "cuda") -> None:
        if not isinstance(features, torch.Tensor) or features.dim() != 2:
            shape = tuple(getattr(features, "shape", ()))
            raise GraphError(
                f"features are a {type(features).__name__} of shape {shape}; give a tensor "
                "(num_nodes, num_features)"
            )
        if features.device.type != "cpu":
            raise GraphError(f"features lie on {features.device} already; give features.cpu()")
        self._features = features.detach()
        self.device = torch.device(device)
        kept = self._checked(nodes_kept)
        self._slots = torch.full((len(features),), -1, dtype=torch.int32)
        self._slots[kept] = torch.arange(len(kept), dtype=torch.int32)
        if int((self._slots >= 0).sum()) < len(kept):
            twice = int(np.flatnonzero(np.bincount(kept.numpy()) > 1)[0])
            raise GraphError(f"node {twice} is listed twice among those to keep; list it once")
        self._rows = self._features[kept].to(self.device)

    @property
    def num_kept(self) -> int:
        """Number of nodes whose features are on the device."""
        return len(self._rows)

    def gather(self, nodes: Any) -> torch.Tensor:
        """Return ``features[nodes]`` on the device.

        Args:
            nodes: node numbers, shape ``(num,)``.

        Returns:
            Shape ``(num, num_features)``, in the dtype of the features.

        Raises:
            GraphError: a node does not exist, or the numbers are not integers.
        """
        wanted = self._checked(nodes)
        slots = self._slots[wanted]
        hits = (slots >= 0).nonzero().flatten()
        misses = (slots < 0).nonzero().flatten()
        sent = self._sent(torch.index_select(wanted, 0, misses))
        if not len(hits):
            return sent
        rows = sent.new_empty(len(wanted), self._features.shape[1])
        rows[self._moved(misses)] = sent
        rows[self._moved(hits)] = self._rows[self._moved(slots[hits].long())]
        return rows

    def hit_rate(self, nodes: Any) -> float:
        """Return the share of ``nodes`` that is kept on the device, or 1 without nodes.

        ``nodes`` are node numbers, shape ``(num,)``.

        Raises:
            GraphError: a node does not exist, or the numbers are not integers.
        """
        wanted = self._checked(nodes)
        return float((self._slots[wanted] >= 0).double().mean()) if len(wanted) else 1.0

    def __repr__(self) -> str:
        return (
            f"FeatureCache(num_kept={self.num_kept} of {len(self._features)}, "
            f"device={str(self.device)!r})"
        )

    def _checked(self, nodes: Any) -> torch.Tensor:
        checked = checked_nodes(nodes, num_nodes=len(self._features), name="node")
        return torch.from_numpy(checked)

    def _sent(self, nodes: torch.Tensor) -> torch.Tensor:
        """Return rows from main memory, sent through memory that the device reads by itself."""
        shape = (len(nodes), self._features.shape[1])
        out = torch.empty(shape, dtype=self._features.dtype, pin_memory=self._pinned)
        torch.index_select(self._features, 0, nodes, out=out)
        return self._moved(out)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        # The allocator of pinned memory does not reuse it before the copy is done.
        return tensor.to(self.device, non_blocking=self._pinned)

    @property
    def _pinned(self) -> bool:
        return self.device.type == "cuda"
