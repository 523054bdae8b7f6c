"""The neighbour sampler, its workspace and the numbering of sampled nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from thrifty.core import GraphError, derive_seed

from ._batch import Batch, Block, Mode
from ._graph import Graph, checked_nodes
from .kernels import (
    choose,
    count_edges,
    free_slots,
    read_neighbors,
    relabel_dense,
    relabel_hashed,
    wrapping,
)


_MOST_EDGES = 2**31 - 1
_MOST_UNCOUNTED = 2**20
"""Number of edges for which room is made without counting them first."""


class Workspace:
    """The nodes and edges of the batch in progress, in arrays that grow and are reused.

    ``nodes[:num_nodes]`` are the nodes so far, ``edges[:num_edges]`` the numbers of the
    neighbours, row after row.
    """

    def __init__(self, relabeler: Relabeler) -> None:
        self._relabeler = relabeler
        self.nodes = np.empty(0, dtype=np.int64)
        self.edges = np.empty(0, dtype=np.int32)
        self._picks = np.empty(0, dtype=np.int64)
        self._found = np.empty(0, dtype=np.int32)
        self.num_nodes = self.num_edges = 0

    def start(self, seeds: np.ndarray) -> np.ndarray:
        """Begin a batch and return the row of each seed.

        ``seeds`` are int64 and all exist.
        """
        self.num_nodes = self.num_edges = 0
        self._relabeler.start()
        self.nodes = grown(self.nodes, len(seeds))
        rows = np.empty(len(seeds), dtype=np.int64)
        self.num_nodes = self._relabeler.number(seeds, self.nodes, num_nodes=0, out=rows)
        return rows

    def hop(
        self,
        indptr: np.ndarray,
        indices: np.ndarray,
        *,
        first: int,
        fanout: int,
        replace: bool,
        key: np.uint64,
    ) -> np.ndarray:
        """Sample neighbours of the nodes from ``first`` on.

        Returns:
            Where the rows of their edges begin and end.

        Raises:
            GraphError: The batch has more edges than int32 can number.
        """
        rows = self.nodes[first : self.num_nodes]
        most = len(rows) * fanout
        if fanout < 0 or most > _MOST_UNCOUNTED:
            most = int(count_edges(indptr, rows, fanout, replace))
        if self.num_edges + most > _MOST_EDGES:
            raise GraphError(
                f"a batch has more than {_MOST_EDGES} edges; sample fewer seeds or smaller fanouts"
            )
        self._picks = grown(self._picks, most)
        starts = np.empty(len(rows) + 1, dtype=np.int32)
        starts[0] = self.num_edges
        num = int(choose(indptr, rows, fanout, replace, key, starts, self._picks))
        self._found = grown(self._found, num)
        found = self._found[:num]
        read_neighbors(indices, self._picks[:num], found)
        self.nodes = grown(self.nodes, self.num_nodes + num, keep=self.num_nodes)
        self.edges = grown(self.edges, self.num_edges + num, keep=self.num_edges)
        self.num_nodes = self._relabeler.number(
            found, self.nodes, num_nodes=self.num_nodes, out=self.edges[self.num_edges :]
        )
        self.num_edges += num
        return starts


def grown(array: np.ndarray, size: int, *, keep: int = 0) -> np.ndarray:
    """Return the array, or a larger one if it is shorter than ``size``.

    The larger array starts with the first ``keep`` entries.
    """
    if len(array) >= size:
        return array
    larger = np.empty(size + size // 4, dtype=array.dtype)
    larger[:keep] = array[:keep]
    return larger


_FEWEST_SLOTS = 2**15
_SLOTS_OF_NODE = 4
"""Slots of the hash table for each node, so that few nodes need a second probe."""
_SPARE = 16
"""The table grows when at most one in this many of its slots may still be taken."""


class Relabeler(ABC):
    """Numbers for the nodes of one batch at a time.

    Each number is the position of the node in ``nodes``.
    """

    @abstractmethod
    def start(self) -> None:
        """Forget all nodes."""

    @abstractmethod
    def number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        """Write the numbers of ``found`` to ``out``, and new nodes to ``nodes``.

        Returns:
            The number of nodes afterwards.
        """


class DenseRelabeler(Relabeler):
    """A dense table with 4 bytes for each node of the graph.

    It is cleared only once in ``2**(32 - bits)`` batches.
    """

    def __init__(self, num_nodes: int) -> None:
        self._bits = max(num_nodes - 1, 1).bit_length()
        self._table = np.zeros(num_nodes, dtype=np.uint32)
        self._stamp = 0

    def start(self) -> None:
        """Forget all nodes."""
        self._stamp += 1
        if self._stamp >> (32 - self._bits):
            self._table.fill(0)
            self._stamp = 1

    def number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        """Write the numbers of ``found`` to ``out``, and new nodes to ``nodes``.

        Returns:
            The number of nodes afterwards.
        """
        table = self._table
        return int(relabel_dense(found, table, self._stamp, self._bits, nodes, num_nodes, out))


class HashRelabeler(Relabeler):
    """A hash table with 10 bytes for each of four to eleven times the largest batch's nodes."""

    def __init__(self) -> None:
        self._num_used = 0
        self._make(_FEWEST_SLOTS)

    def start(self) -> None:
        """Forget all nodes."""
        free_slots(self._keys, self._slots[: self._num_used])
        self._num_used = 0

    def number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        """Write the numbers of ``found`` to ``out``, and new nodes to ``nodes``.

        Returns:
            The number of nodes afterwards.
        """
        done = 0
        while done < len(found):
            room = len(self._keys) // _SLOTS_OF_NODE - num_nodes
            if room <= len(self._keys) // _SPARE:
                self._grow(nodes[:num_nodes])
                continue
            # In parts: of a million edges, only a few thousand nodes may be new, so do not make
            # room for a million.
            part = found[done : done + room]
            num_nodes = self._number(part, nodes, num_nodes=num_nodes, out=out[done:])
            self._num_used = num_nodes
            done += len(part)
        return num_nodes

    def _grow(self, known: np.ndarray) -> None:
        self._make(2 * len(self._keys))
        nodes, out = np.empty_like(known), np.empty(len(known), dtype=np.int32)
        self._number(known, nodes, num_nodes=0, out=out)

    def _number(
        self, found: np.ndarray, nodes: np.ndarray, *, num_nodes: int, out: np.ndarray
    ) -> int:
        keys, values, slots = self._keys, self._values, self._slots
        return int(relabel_hashed(found, keys, values, slots, nodes, num_nodes, out))

    def _make(self, num_slots: int) -> None:
        self._keys, self._values, self._slots = (
            np.full(num_slots, -1, dtype=np.int32),
            np.empty(num_slots, dtype=np.int32),
            np.empty(num_slots // _SLOTS_OF_NODE, dtype=np.int64),
        )


Relabel = Literal["auto", "dense", "hash"]
_MOST_NEIGHBORS = 2**31


class NeighborSampler:
    """A sampler of seeds' neighbours, their neighbours, and so on, one hop for each model layer.

    The result is a function of (``seed``, epoch, batch) and the requested seeds. It does not
    depend on what else was sampled before or on the number of threads, and any number of threads
    may call ``sample`` at once. After SALIENT (Kaler et al., MLSys 2022, section 4).

    Args:
        graph: Graph to sample from.
        fanouts: Neighbours of each node at each hop, the seeds' hop first; -1 for all of them.
        mode: ``"frontier"`` expands each node once, at the hop where it is found (as PyG's
            ``NeighborLoader``); ``"full"`` expands all nodes found so far again at every hop (as
            SALIENT and DGL's blocks).
        replace: Whether an edge may be drawn more than once; every node with neighbours then gets
            ``fanout`` of them.
        seed: Seed of all draws.
        relabel: ``"dense"`` uses a table of 4 bytes a node for each thread, ``"hash"`` a hash
            table, and ``"auto"`` the dense table as long as it takes at most ``table_bytes``. All
            give the same batches.
        table_bytes: See ``relabel``.

    Raises:
        GraphError: Fanouts or options are invalid.

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
            seeds: Node numbers, any integer dtype, shape ``(num,)``; duplicates get one row.
            epoch: Epoch, which the draws depend on.
            batch: Number of the batch, which the draws also depend on.

        Raises:
            GraphError: A seed does not exist, a number is not an integer, or the batch has more
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
