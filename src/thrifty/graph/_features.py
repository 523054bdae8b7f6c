"""Features of nodes: where they lie, which are worth caching, how they reach the device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch

from thrifty.core import GraphError, check_integers

from ._batch import Batch, Memory, copied
from ._graph import Graph, as_array, checked_nodes
from ._sampler import NeighborSampler
from .kernels._csr import gather_bfloat16, gather_float16, gather_rows
from .kernels._neighbours import push


def gather_features(
    x: torch.Tensor,
    nodes: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    memory: Memory | None = None,
) -> torch.Tensor:
    """Return ``x[nodes]`` or ``x[nodes].float()``, equal bit by bit.

    It takes one pass, in the calling thread alone.

    Args:
        x: Features, float32, bfloat16 or float16, contiguous, shape
            ``(num_nodes, num_features)``; may be memory-mapped.
        nodes: Existing node numbers; int64, shape ``(num,)``.
        dtype: Dtype of the result: that of ``x`` or float32; None for that of ``x``.
        memory: Pool to take the result's memory from; None for fresh memory.

    Returns:
        Shape ``(num, num_features)``.

    Raises:
        GraphError: The dtype of ``x`` cannot be converted to ``dtype``.

    >>> gather_features(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0, 1])).tolist()
    [[2.0], [1.0], [2.0]]
    """
    dtype = batch_dtype(x.dtype, dtype)
    shape = (len(nodes), x.shape[1])
    out = (
        torch.empty(shape, dtype=dtype, device="cpu")
        if memory is None
        else memory.array(shape, dtype)
    )
    gather_into(x, nodes, out)
    return out


def gather_into(x: torch.Tensor, nodes: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``x[nodes]`` to ``out``; see ``gather_features``."""
    rows = nodes.numpy()
    if x.dtype == torch.float32:
        gather_rows(x.numpy(), rows, out.numpy())
    elif out.dtype == x.dtype:
        gather_rows(_bits(x), rows, _bits(out))
    else:
        widen = gather_bfloat16 if x.dtype == torch.bfloat16 else gather_float16
        widen(_bits(x), rows, out.numpy().view(np.uint32))


def batch_dtype(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a batch's features.

    Raises:
        GraphError: ``wanted`` is neither the stored dtype nor float32.
    """
    if wanted is None or wanted in {stored, torch.float32}:
        return stored if wanted is None else wanted
    raise GraphError(
        f"dtype={wanted}: batches of {stored} features can be {stored} or torch.float32; "
        f"for another, store them so: graph.replace(x=graph.x.to({wanted}))"
    )


def _bits(halves: torch.Tensor) -> np.ndarray:
    return halves.view(torch.int16).numpy().view(np.uint16)


class FeatureCache:
    """A cache that keeps the features of some nodes on a device, so that only others are sent.

    After SALIENT++ (Kaler et al., MLSys 2023), on one machine. Choose the nodes by `top_nodes` of
    `inclusion_probabilities`. Besides the kept rows, the cache takes 4 bytes of main memory for
    each node of the graph. `hit_rate` says what it saves.

    Args:
        features: Shape ``(num_nodes, num_features)``, in main memory; may be memory-mapped.
        nodes_kept: Nodes whose rows are kept on the device, without duplicates, shape ``(num,)``.
        device: Device that keeps the rows.

    Raises:
        GraphError: The features are not rows in main memory, or a node does not exist or is
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
            nodes: Node numbers, shape ``(num,)``.

        Returns:
            Shape ``(num, num_features)``, in the dtype of the features.

        Raises:
            GraphError: A node does not exist, or the numbers are not integers.
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
            GraphError: A node does not exist, or the numbers are not integers.
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


class Event(Protocol):
    """A point in the work of a stream, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Return whether all work before it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until all work before it is done."""
        ...


class Streams(Protocol):
    """A device's copy stream, which runs beside its computation."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy page-locked memory; the result is ready after a later event."""
        ...

    def record(self) -> Event:
        """Return an event behind all copies so far."""
        ...

    def wait(self, event: Event) -> None:
        """Make the calling thread's computation wait for the event; the CPU does not wait."""
        ...

    def use(self, tensor: torch.Tensor) -> None:
        """Note that the calling thread's computation reads a copy.

        Its memory is not given to another copy before that computation is done.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch whose copies have been started."""

    batch: Batch
    arrays: tuple[torch.Tensor, ...]
    event: Event


class Transfer:
    """A sender of batches to a device that does not wait for the copies.

    Memory that is being copied from is held until the copy is done. Loader threads call ``send``;
    the training thread calls ``receive`` before it uses a batch. After SALIENT (Kaler et al.,
    MLSys 2022, section 4.3).

    Args:
        streams: Streams of the device.
        memory: Page-locked memory; arrays outside it are copied to it first.
    """

    def __init__(self, streams: Streams, memory: Memory) -> None:
        self._streams = streams
        self._memory = memory
        self._held: deque[tuple[Event, list[torch.Tensor]]] = deque()
        # One batch at a time: its event must not be recorded amid the copies of another batch.
        self._sending = Lock()
        weakref.finalize(self, _release_all, self._held)

    def send(self, batch: Batch) -> Sent:
        """Start to copy a batch whose ``x`` is already in page-locked memory."""
        pinned: list[torch.Tensor] = []
        arrays: list[torch.Tensor] = []

        def copy(array: torch.Tensor) -> torch.Tensor:
            pinned.append(self._pinned(array))
            arrays.append(self._streams.copy(pinned[-1]))
            return arrays[-1]

        with self._sending:
            _release_done(self._held)
            try:
                moved = copied(batch, copy)
            finally:
                # Also if a copy failed, say for lack of device memory: earlier copies are still
                # in progress.
                event = self._streams.record()
                self._held.append((event, pinned))
        return Sent(moved, tuple(arrays), event)

    def receive(self, sent: Sent) -> Batch:
        """Return the batch, ready for the calling thread's computation."""
        self._streams.wait(sent.event)
        for array in sent.arrays:
            self._streams.use(array)
        return sent.batch

    def _pinned(self, array: torch.Tensor) -> torch.Tensor:
        if array.is_pinned():
            return array
        return self._memory.array(array.shape, array.dtype).copy_(array)


class CudaStreams:
    """A side stream of a CUDA device.

    Args:
        device: Device of the stream; ``cuda`` is the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy page-locked memory; the result is ready after a later event."""
        with torch.cuda.stream(self._stream):
            return tensor.to(self._stream.device, non_blocking=True)

    def record(self) -> Event:
        """Return an event behind all copies so far."""
        return self._stream.record_event()  # type: ignore[no-any-return]

    def wait(self, event: Event) -> None:
        """Make the calling thread's computation wait for the event; the CPU does not wait."""
        # Events come from record(), so they are those of CUDA.
        self._current().wait_event(event)  # type: ignore[arg-type]

    def use(self, tensor: torch.Tensor) -> None:
        """Note that the calling thread's computation reads a copy.

        Its memory is not given to another copy before that computation is done.
        """
        tensor.record_stream(self._current())

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)


def _release_done(held: deque[tuple[Event, list[torch.Tensor]]]) -> None:
    while held and held[0][0].query():
        held.popleft()


def _release_all(held: deque[tuple[Event, list[torch.Tensor]]]) -> None:
    # No lock, because a thread may still be sending: the exit of the process must not wait for it.
    with suppress(IndexError):
        while True:
            # This name keeps the memory until the copy is done.
            kept = held.popleft()
            kept[0].synchronize()


def inclusion_probabilities(
    graph: Graph, seeds: Any, fanouts: Sequence[int], *, batch_size: int
) -> np.ndarray:
    """Return each node's probability to be in a batch, with one pass over the edges for each hop.

    After SALIENT++ (Kaler et al., MLSys 2023; vertex inclusion probabilities). The estimate
    assumes that nodes are sampled independently of each other and without replacement, and counts
    a path that returns to a node as one to another node. It is exact on trees that lead away from
    the seeds, and slightly too high where many edges have their reverse. The order of nodes, which
    is its purpose, suffers little.

    Args:
        graph: Graph to sample from.
        seeds: Nodes that batches are drawn from, shape ``(num,)``; a node that is listed several
            times is drawn more often.
        fanouts: Neighbours of each node at each hop, the seeds' hop first; -1 for all.
        batch_size: Number of seeds in a batch, drawn without replacement.

    Returns:
        float64, shape ``(num_nodes,)``.

    Raises:
        GraphError: A seed does not exist, or fanouts or batch size are invalid.

    >>> star = Graph(np.array([0, 4, 4, 4, 4, 4]), np.array([1, 2, 3, 4], dtype=np.int32))
    >>> inclusion_probabilities(star, [0, 1], [2], batch_size=1)
    array([0.5  , 0.625, 0.25 , 0.25 , 0.25 ])
    """
    hops = NeighborSampler(graph, fanouts, relabel="hash").fanouts
    nodes = checked_nodes(seeds, num_nodes=graph.num_nodes, name="seed")
    check_integers(GraphError, 1, batch_size=batch_size)
    degrees = graph.degrees()
    # With logarithms of the probability to be left out, products become sums, and rare nodes stay
    # exact.
    with np.errstate(divide="ignore"):
        left_out = _undrawn(nodes, batch_size, num_nodes=graph.num_nodes)
        reached = np.abs(np.expm1(left_out))
        for fanout in hops:
            spread = np.zeros(graph.num_nodes)
            weights = np.log1p(-reached * _taken(degrees, fanout))
            push(graph.indptr, graph.indices, weights, spread)
            reached = np.abs(np.expm1(spread))
            left_out += spread
    return np.abs(np.expm1(left_out))  # type: ignore[no-any-return]


def top_nodes(probabilities: Any, num: int) -> np.ndarray:
    """Return the most probable nodes in descending order; ties go to the lower number.

    Nodes of probability zero are left out.

    Args:
        probabilities: Probability of each node, shape ``(num_nodes,)``; counts or degrees work
            as well.
        num: Maximum number of nodes.

    Returns:
        int64, shape ``(num or fewer,)``.

    Raises:
        GraphError: The probabilities are not a vector of numbers or contain NaN, or ``num`` is
            negative.

    >>> top_nodes([0.1, 0.5, 0.0, 0.5], 2)
    array([1, 3])
    """
    values = as_array(probabilities, name="probabilities")
    if values.ndim != 1 or (values.dtype.kind not in "biuf" and values.size):
        raise GraphError(
            f"probabilities have shape {values.shape} and dtype {values.dtype}; give numbers "
            "of shape (num_nodes,)"
        )
    if np.isnan(values).any():
        raise GraphError(f"the probability of node {np.isnan(values).argmax()} is not a number")
    check_integers(GraphError, 0, num=num)
    nodes = np.flatnonzero(values > 0)
    if num < len(nodes):
        nodes = nodes[_places_of_largest(values[nodes], int(num))]
    return nodes[np.argsort(-values[nodes].astype(np.float64), kind="stable")]


def _undrawn(nodes: np.ndarray, batch_size: int, *, num_nodes: int) -> np.ndarray:
    """Return the log-probability of each node not to be among the seeds of a batch."""
    ordered = np.sort(nodes)
    # For the n-th copy of a node, given that the copies before it were not drawn.
    copy = np.arange(len(nodes)) - np.searchsorted(ordered, ordered)
    chance = np.minimum(1.0, batch_size / (len(nodes) - copy))
    logs: np.ndarray = np.bincount(ordered, weights=np.log1p(-chance), minlength=num_nodes)
    # bincount returns integers if there are no seeds.
    return logs.astype(np.float64)


def _taken(degrees: np.ndarray, fanout: int) -> np.ndarray:
    """Return the probability that an edge of each node is taken."""
    if fanout < 0:
        return np.ones(len(degrees))
    taken: np.ndarray = np.minimum(1.0, fanout / np.maximum(degrees, 1))
    return taken


def _places_of_largest(values: np.ndarray, num: int) -> np.ndarray:
    # A partial sort gives the threshold, but not which of several equal values come first.
    if not num:
        return np.empty(0, dtype=np.int64)
    least = np.partition(values, len(values) - num)[len(values) - num]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: num - len(above)]
    return np.sort(np.concatenate([above, equal]))
