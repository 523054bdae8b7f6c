"""The workers of a job: who takes part, and how messages travel between them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from statistics import median
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from thrifty.core import Clock, HeteroError, PeerLostError, SystemClock, TooFewWorkersError
from thrifty.pack import State, pack_state, unpack_state
from thrifty.perf import CollectiveTiming


Wait = Callable[[], None]
"""Waits for a sum that was begun; raises ``PeerLostError`` if a worker is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """The workers of one generation, as all of them see it.

    Attributes:
        generation: Number that grows with every change.
        rank: Rank of this worker.
        names: Names of the workers, by rank.
        steps: Steps that each of them has trained.
    """

    generation: int
    rank: int
    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def furthest(self) -> int:
        """Rank of the worker with most steps trained (the lowest such rank). Its state counts."""
        return self.steps.index(max(self.steps))


class Membership(Protocol):
    """Agrees on the workers that train together, and carries sums between them.

    Every wait ends, either with its result or with an error after the implementation's time limit.
    A worker that stands by (``PartialMembership``) waits as long as the others train.
    """

    def agree(self, *, step: int, broken: bool = False) -> WorkerView:
        """Agree with the other workers on the members.

        All workers call it at the same steps, and after a ``PeerLostError``.

        Args:
            step: Steps that this worker has trained.
            broken: Whether the connections of the present generation have failed.

        Raises:
            TooFewWorkersError: Not enough workers are left, or enough do not come in time.
        """
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum over all workers.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Begin an ``all_reduce`` and return, so that the caller can do other work meanwhile.

        The caller must not touch the tensor until it has waited for the sum. All workers begin
        their sums in one order, and wait for them in that order.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Replace a contiguous tensor by that of the worker with rank ``source``.

        Raises:
            PeerLostError: A worker is gone; the tensor's contents are undefined.
        """
        ...

    def close(self) -> None:
        """Leave the group; may be called twice."""
        ...


@runtime_checkable
class PartialMembership(Protocol):
    """The additional methods of a ``Membership`` in which some workers can stand by."""

    def narrow(self, ranks: Sequence[int]) -> None:
        """Let sums and broadcasts reach only these workers from now on.

        All workers of the present set call it at the same step with the same ranks. Those that
        return to a larger set call it, too. In a smaller set, ``source`` of a broadcast counts its
        workers.

        Args:
            ranks: Ranks among all workers, in order.

        Raises:
            PeerLostError: A worker is gone.
        """
        ...

    def send(self, tensor: Tensor, *, to: int) -> None:
        """Send a contiguous CPU tensor to one worker; ``narrow`` has been called before.

        Args:
            tensor: The tensor to send.
            to: Rank among all workers.

        Raises:
            PeerLostError: The worker is gone.
        """
        ...

    def receive(self, tensor: Tensor, *, source: int) -> None:
        """Wait for a tensor that another worker sends; ``narrow`` has been called before.

        Args:
            tensor: Receives the values.
            source: Rank of the sender among all workers.

        Raises:
            PeerLostError: The worker is gone.
        """
        ...


class FixedMembership:
    """The default group of ``torch.distributed``, or a single worker where none was started.

    When started with plain ``torchrun --nproc-per-node=4 train.py``, it creates the group. Sums use
    NCCL if all workers train on CUDA devices. If some of them train on CPUs, sums use gloo, which
    copies those of GPUs through pinned memory. A worker that dies ends the job, and torchrun
    restarts all of them. ``ElasticMembership`` continues without it.

    Args:
        device: Device of this worker's model; workers may differ.
        timeout_s: Timeout of every exchange.

    >>> members = FixedMembership()
    >>> members.agree(step=0).names
    ('0',)
    """

    def __init__(self, *, device: torch.device | str = "cpu", timeout_s: float = 300.0) -> None:
        self._owns = False
        self._timeout = timedelta(seconds=timeout_s)
        self._ranks: tuple[int, ...] | None = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._messages: Any = None
        if dist.is_available() and not dist.is_initialized() and "RANK" in os.environ:
            _create_group(torch.device(device).type, timeout=self._timeout)
            self._owns = True
        self._together = dist.is_available() and dist.is_initialized()

    def agree(self, *, step: int, broken: bool = False) -> WorkerView:
        """Return the group as it was started."""
        if broken:
            raise TooFewWorkersError(
                "a worker was lost, and this group cannot go on without it; give the trainer an "
                "ElasticMembership to have it go on, or let torchrun start all workers again"
            )
        size = dist.get_world_size() if self._together else 1
        rank = dist.get_rank() if self._together else 0
        names = tuple(str(rank) for rank in range(size))
        return WorkerView(generation=0, rank=rank, names=names, steps=(step,) * size)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the group."""
        self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor: Tensor) -> Wait:
        """Begin to sum a tensor over the group."""

        def wait() -> None:
            if work is not None:
                with peer_losses("a sum over all workers"):
                    work.wait()

        work = None
        if self._exchanges:
            with peer_losses("a sum over all workers"):
                work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return wait

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Broadcast a tensor to the group."""
        if self._exchanges:
            rank = source if self._ranks is None else self._ranks[source]
            with peer_losses("a broadcast to all workers"):
                dist.broadcast(tensor, rank, group=self._group)

    def narrow(self, ranks: Sequence[int]) -> None:
        """Sum and broadcast among these workers only, in a group of their own."""
        chosen = tuple(ranks)
        if not self._together or len(chosen) == dist.get_world_size():
            self._ranks = None
            return
        with peer_losses("a change of the workers that train"):
            # PyTorch lets all workers take part in the creation of a group. NCCL cannot carry
            # messages between CPUs.
            if self._messages is None:
                self._messages = dist.new_group(backend="gloo", timeout=self._timeout)
            if len(chosen) > 1 and chosen not in self._groups:
                self._groups[chosen] = dist.new_group(list(chosen), timeout=self._timeout)
        self._ranks = chosen

    def send(self, tensor: Tensor, *, to: int) -> None:
        """Send a tensor to one worker of the group."""
        with peer_losses(f"a message to worker {to}"):
            dist.send(tensor, to, group=self._messages)

    def receive(self, tensor: Tensor, *, source: int) -> None:
        """Receive a tensor from one worker of the group."""
        with peer_losses(f"a message from worker {source}"):
            work = dist.irecv(tensor, source, group=self._messages)
            if work is not None:
                work.wait(_STANDBY_LIMIT)

    def close(self) -> None:
        """Destroy the groups that this object created."""
        if dist.is_available() and dist.is_initialized():
            if self._owns:
                dist.destroy_process_group()  # and all others
            else:
                for group in (self._messages, *self._groups.values()):
                    if group not in {None, dist.GroupMember.NON_GROUP_MEMBER}:
                        dist.destroy_process_group(group)
        self._groups, self._messages, self._ranks = {}, None, None
        self._owns = self._together = False

    @property
    def _exchanges(self) -> bool:
        return self._together and (self._ranks is None or len(self._ranks) > 1)

    @property
    def _group(self) -> Any:
        return None if self._ranks is None else self._groups[self._ranks]


_STANDBY_LIMIT = timedelta(days=365)
"""Longest wait for a message. A caller may take long between two steps, and a process that dies
closes its connections, which ends the wait at once."""

_GROUPS = count()
"""Numbers of the groups that this process creates."""


def _create_group(kind: str, *, timeout: timedelta) -> None:
    """Create the default group, with a backend that all workers' kinds of devices can use."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    # torchrun keeps the store over restarts, and a worker may come back as another kind.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"thrifty/{attempt}/{next(_GROUPS)}", store)
    store.set(f"kind/{rank}", kind)
    kinds = {store.get(f"kind/{each}").decode() for each in range(size)}
    backend = "nccl" if kinds == {"cuda"} else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


@contextmanager
def peer_losses(what: str) -> Iterator[None]:
    """Turn errors of a group into the error that a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        # The first sentence of gloo's message says what happened. The rest is advice for its
        # developers.
        raise PeerLostError(f"{what} failed: {str(error).partition('. ')[0]}") from error


def sums_block(device: torch.device) -> bool:
    """Return whether a sum of this device's tensors ends before the call returns.

    Those that NCCL carries only begin then.
    """
    if device.type != "cuda":
        return True
    together = dist.is_available() and dist.is_initialized()
    return together and str(dist.get_backend()) == "gloo"


_WARM_UP = 2


def measure_all_reduce(
    members: Membership,
    sizes: Sequence[int],
    *,
    name: str,
    per_node: int = 1,
    repeats: int = 10,
    device: torch.device | str = "cpu",
    clock: Clock | None = None,
) -> list[CollectiveTiming]:
    """Time all-reduce of several sizes over all workers, to fit a ``CollectiveModel``.

    All workers call it with the same arguments and get the same answer: for each size, the median
    over the repeats and the mean over the workers. A single worker has nothing to measure and gets
    an empty list.

    Args:
        members: Membership that carries the sums.
        sizes: Bytes of the tensors, rounded down to whole float32 numbers.
        name: Name of the network, such as the VM type.
        per_node: Workers on each machine.
        repeats: Timed sums of each size, after some warm-up sums.
        device: Device of the tensors.
        clock: Clock to measure with (default: the machine's).

    Raises:
        HeteroError: ``repeats`` is below 1, a size is below 4 bytes, or the machines have unequal
            numbers of workers.
        PeerLostError: A worker is gone.

    >>> from thrifty.hetero import FixedMembership
    >>> measure_all_reduce(FixedMembership(), [2**10, 2**20], name="here")
    []
    """
    clock = clock or SystemClock()
    if repeats < 1 or any(size < 4 for size in sizes):
        raise HeteroError(
            f"each size is summed at least once, and has 4 bytes or more; not repeats={repeats}, "
            f"sizes={list(sizes)}"
        )
    num = len(members.agree(step=0).names)
    if per_node < 1 or num % per_node:
        raise HeteroError(f"{num} workers cannot be {per_node} on each machine: mend per_node")
    if num == 1:
        return []
    counts = [size // 4 for size in sizes]
    own = [
        _median_s(members, torch.zeros(count, device=device), repeats=repeats, clock=clock)
        for count in counts
    ]
    total = torch.tensor(own, dtype=torch.float64, device=device)
    members.all_reduce(total)
    return [
        CollectiveTiming(
            name=name,
            num_bytes=4 * count,
            nodes=num // per_node,
            per_node=per_node,
            seconds=seconds / num,
        )
        for count, seconds in zip(counts, total.tolist(), strict=True)
    ]


def _median_s(members: Membership, tensor: torch.Tensor, *, repeats: int, clock: Clock) -> float:
    times = []
    for _ in range(_WARM_UP + repeats):
        began = clock.monotonic()
        members.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(max(clock.monotonic() - began, 1e-9))
    return median(times[_WARM_UP:])


def to_bytes(value: Any) -> Tensor:
    """Serialise nested dicts and lists of tensors and plain values to bytes, without pickle.

    >>> from_bytes(to_bytes({"weight": torch.ones(2), "step": 3}))["step"]
    3
    """
    state = pack_state(value)
    tensors = {f"{i}": t.detach().cpu().contiguous() for i, t in enumerate(state.tensors.values())}
    tree = json.dumps({"keys": list(state.tensors), "tree": state.tree}).encode()
    body = save(tensors) if tensors else b""
    return torch.frombuffer(
        bytearray(len(tree).to_bytes(8, "little") + tree + body), dtype=torch.uint8
    )


def from_bytes(data: Tensor) -> Any:
    """Return the value that ``to_bytes`` serialised."""
    raw = data.cpu().numpy().tobytes()
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])
    body = raw[8 + size :]
    tensors = load(body) if body else {}
    named = {key: tensors[f"{i}"] for i, key in enumerate(head["keys"])}
    return unpack_state(State(tensors=named, tree=head["tree"]))
