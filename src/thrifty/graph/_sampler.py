"""Neighbourhoods of seed nodes, sampled hop by hop."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from thrifty.core import GraphError, derive_seed

from ._batch import Batch, Block, Mode
from ._graph import Graph, checked_nodes
from ._relabeler import DenseRelabeler, HashRelabeler
from ._workspace import Workspace
from .kernels import wrapping


Relabel = Literal["auto", "dense", "hash"]
_MOST_NEIGHBORS = 2**31


class NeighborSampler:
    """A sampler of seeds' neighbours, their neighbours, and so on, one hop for each model layer.

    The result is a function of (``seed``, epoch, batch) and the requested seeds. It does not
    depend on what else was sampled before or on the number of threads, and any number of threads
    may call ``sample`` at once. After SALIENT (Kaler et al., MLSys 2022, section 4).

    Args:
        graph: graph to sample from.
        fanouts: neighbours of each node at each hop, the seeds' hop first; -1 for all of them.
        mode: ``"frontier"`` expands each node once, at the hop where it is found (as PyG's
            ``NeighborLoader``); ``"full"`` expands all nodes found so far again at every hop (as
            SALIENT and DGL's blocks).
        replace: whether an edge may be drawn more than once; every node with neighbours then gets
            ``fanout`` of them.
        seed: seed of all draws.
        relabel: ``"dense"`` uses a table of 4 bytes a node for each thread, ``"hash"`` a hash
            table, and ``"auto"`` the dense table as long as it takes at most ``table_bytes``. All
            give the same batches.
        table_bytes: see ``relabel``.

    Raises:
        GraphError: fanouts or options are invalid.

    >>> ring = Graph(np.arange(6), np.array([1, 2, 3, 4, 0], dtype=np.int32))
    >>> batch = NeighborSampler(ring, [1, 1]).sample([0, 3])
    >>> batch.nodes
    tensor([0, 3, 1, 4, 2])
    >>> batch.blocks
    (Block(num_src=5, num_dst=4, num_edges=4), Block(num_src=4, num_dst=2, num_edges=2))
    """

    def __init__(
        self,
        graph: Graph,
        fanouts: Sequence[int],
        *,
        mode: Mode = "frontier",
        replace: bool = False,
        seed: int = 0,
        relabel: Relabel = "auto",
        table_bytes: int = 2**30,
    ) -> None:
        self.graph = graph
        self.fanouts = _checked_fanouts(fanouts)
        self.mode: Mode = _one_of(mode, Mode, name="mode")
        self.replace = bool(replace)
        self.seed = _integer(seed, name="seed")
        _one_of(relabel, Relabel, name="relabel")
        fits = 4 * graph.num_nodes <= table_bytes
        self.relabel: Literal["dense", "hash"] = (
            "dense" if relabel == "dense" or (relabel == "auto" and fits) else "hash"
        )
        self._workspaces: list[Workspace] = []

    @property
    def num_layers(self) -> int:
        """Number of hops, and of blocks in a batch."""
        return len(self.fanouts)

    def sample(self, seeds: Any, *, epoch: int = 0, batch: int = 0) -> Batch:
        """Return the sampled neighbourhood of some seeds, without features and labels.

        Args:
            seeds: node numbers, any integer dtype, shape ``(num,)``; duplicates get one row.
            epoch: epoch, which the draws depend on.
            batch: number of the batch, which the draws also depend on.

        Raises:
            GraphError: a seed does not exist, a number is not an integer, or the batch has more
                than 2^31 edges.
        """
        wanted = checked_nodes(seeds, num_nodes=self.graph.num_nodes, name="seed")
        place = (_integer(epoch, name="epoch"), _integer(batch, name="batch"))
        workspace = self._workspace()
        found = self._sample(workspace, wanted, place)
        # Not after an exception: the next caller would find a half-made batch.
        self._workspaces.append(workspace)
        return found

    def _workspace(self) -> Workspace:
        """Return a workspace that no other thread is using."""
        try:
            return self._workspaces.pop()
        except IndexError:
            dense = self.relabel == "dense"
            return Workspace(DenseRelabeler(self.graph.num_nodes) if dense else HashRelabeler())

    def _sample(self, workspace: Workspace, seeds: np.ndarray, place: tuple[int, int]) -> Batch:
        with wrapping():
            seed_rows = workspace.start(seeds)
            num_seeds = workspace.num_nodes
            hops = self._hops(workspace, place)
        edges = torch.from_numpy(workspace.edges[: workspace.num_edges].copy())
        return Batch(
            nodes=torch.from_numpy(workspace.nodes[: workspace.num_nodes].copy()),
            blocks=_prefixes(hops, edges) if self.mode == "frontier" else _slices(hops, edges),
            num_seeds=num_seeds,
            seed_rows=torch.from_numpy(seed_rows),
            hop_nodes=tuple(np.diff([0, num_seeds, *(h.num_src for h in hops)]).tolist()),
            hop_edges=tuple(int(h.starts[-1] - h.starts[0]) for h in hops),
            mode=self.mode,
        )

    def _hops(self, workspace: Workspace, place: tuple[int, int]) -> list[_Hop]:
        hops: list[_Hop] = []
        first = 0
        for number, fanout in enumerate(self.fanouts):
            end = workspace.num_nodes
            starts = workspace.hop(
                self.graph.indptr,
                self.graph.indices,
                first=first,
                fanout=fanout,
                replace=self.replace,
                # A hash and no counter: rows of different hops and batches must not share draws.
                key=np.uint64(derive_seed(self.seed, "neighbors", *place, number)),
            )
            hops.append(_Hop(starts, workspace.num_nodes))
            if self.mode == "frontier":
                first = end
        return hops


class _Hop(NamedTuple):
    """Where one hop's rows begin and end in the batch's edges, and the number of nodes after it."""

    starts: np.ndarray
    num_src: int


def _prefixes(hops: Sequence[_Hop], edges: torch.Tensor) -> tuple[Block, ...]:
    """Return blocks that share their edges: all rows for the input layer, fewer for later ones."""
    starts = torch.from_numpy(
        np.concatenate([hops[0].starts, *(hop.starts[1:] for hop in hops[1:])])
    )
    blocks, num_rows = [], 0
    for hop in hops:
        num_rows += len(hop.starts) - 1
        end = int(hop.starts[-1])
        blocks.append(Block(starts[: num_rows + 1], edges[:end], num_src=hop.num_src))
    return tuple(reversed(blocks))


def _slices(hops: Sequence[_Hop], edges: torch.Tensor) -> tuple[Block, ...]:
    """Return blocks with separate edges for each layer."""
    return tuple(
        Block(
            torch.from_numpy(hop.starts - hop.starts[0]),
            edges[int(hop.starts[0]) : int(hop.starts[-1])],
            num_src=hop.num_src,
        )
        for hop in reversed(hops)
    )


def _checked_fanouts(fanouts: Any) -> tuple[int, ...]:
    if isinstance(fanouts, np.ndarray | torch.Tensor):
        fanouts = fanouts.tolist()
    if isinstance(fanouts, str) or not isinstance(fanouts, Sequence) or not fanouts:
        raise GraphError(
            f"fanouts={fanouts!r}; give one number for each layer, that of the seeds first, "
            "such as [15, 10, 5]"
        )
    for fanout in fanouts:
        if isinstance(fanout, bool) or not isinstance(fanout, Integral) or fanout < -1:
            raise GraphError(
                f"fanouts={list(fanouts)!r}: {fanout!r} is no fanout; give 0 or more "
                "neighbours, or -1 for all"
            )
    # No node has more neighbours, and with replacement this size raises an error before memory
    # runs out.
    return tuple(min(int(fanout), _MOST_NEIGHBORS) for fanout in fanouts)


def _integer(value: Any, *, name: str) -> int:
    # Use one type for all numbers, because seeds are derived from how numbers are written.
    try:
        return index(value)
    except TypeError:
        raise GraphError(f"{name}={value!r}; give an integer") from None


def _one_of(value: Any, allowed: Any, *, name: str) -> Any:
    options = get_args(allowed)
    if value not in options:
        raise GraphError(f"{name}={value!r}; it must be one of {', '.join(map(repr, options))}")
    return value
