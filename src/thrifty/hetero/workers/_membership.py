"""The workers of a job: who takes part, how they meet, and how those behind catch up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from thrifty.core import (
    Clock,
    HeteroError,
    PeerLostError,
    SystemClock,
    TooFewWorkersError,
    plain_logger,
)
from thrifty.hetero._job import WorkerInfo
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
        if dist.is_available() and not dist.is_initialized() and "RANK" in os.environ:
            _create_group(torch.device(device).type, timeout=timedelta(seconds=timeout_s))
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
        if self._together:
            with peer_losses("a sum over all workers"):
                work = dist.all_reduce(tensor, async_op=True)
        return wait

    def broadcast(self, tensor: Tensor, *, source: int) -> None:
        """Broadcast a tensor to the group."""
        if self._together:
            with peer_losses("a broadcast to all workers"):
                dist.broadcast(tensor, source)

    def close(self) -> None:
        """Destroy the group if this object created it."""
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
        self._owns = self._together = False


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


_log = plain_logger("thrifty.hetero")


class Job(Protocol):
    """The training job, as far as workers have to agree on it.

    Attributes:
        steps: Steps trained.
    """

    steps: int

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        ...


class WorkerGroup:
    """The workers that currently train together.

    All decisions follow from what every worker knows alike: the view and the rows that the workers
    send each other. When a worker is lost during a step, some workers may have completed the step
    and others not. This needs no vote: the workers that completed it have the whole gradient, so
    the worker that has trained most steps sends its state to the others.

    Args:
        members: Membership that carries the messages.
        job: The training job.
        device: Device of the messages.
    """

    def __init__(self, members: Membership, job: Job, *, device: torch.device) -> None:
        self._members = members
        self._job = job
        self._device = device
        self._view: WorkerView | None = None
        self._met_at = -1

    @property
    def view(self) -> WorkerView:
        """The view of the workers that all of them share; available after the first meeting."""
        if self._view is None:
            raise AssertionError("the workers have not met")
        return self._view

    @property
    def met(self) -> bool:
        """Whether the workers have met."""
        return self._view is not None

    def is_due(self, every: int) -> bool:
        """Return whether the workers meet before the next step, as every ``every`` steps."""
        steps = self._job.steps
        return not self.met or not (steps % every or self._met_at == steps)

    def meet(
        self, me: Callable[[], WorkerInfo], *, broken: bool = False
    ) -> tuple[WorkerInfo, ...] | None:
        """Agree on the workers, and bring those that are behind up to date.

        Args:
            me: Returns what this worker reports about itself. It is called if the workers have
                changed.
            broken: Whether connections have failed.

        Returns:
            What each worker reported, by rank; None if the workers are the same as before.

        Raises:
            TooFewWorkersError: Not enough workers are left.
            HeteroError: The workers' models differ.
        """
        while True:
            view = self._members.agree(step=self._job.steps, broken=broken)
            if self._view is not None and view.generation == self._view.generation:
                self._met_at = self._job.steps
                return None
            try:
                infos = self._exchange(view, me())
                _check_structure(view, infos)
                self._catch_up(view, infos)
            except PeerLostError as error:
                _log.warning("while workers met: %s", error)
                broken = True
                continue
            self._view, self._met_at = view, self._job.steps
            return infos

    def _exchange(self, view: WorkerView, mine: WorkerInfo) -> tuple[WorkerInfo, ...]:
        table = torch.zeros(len(view.names), WorkerInfo.NUM, dtype=torch.float64)
        table[view.rank] = torch.tensor(mine.to_row(), dtype=torch.float64)
        table = table.to(self._device)
        self._members.all_reduce(table)
        return tuple(WorkerInfo.from_row(row) for row in table.tolist())

    def share(self, give: Callable[[], Any], take: Callable[[Any], None], *, source: int) -> None:
        """Send nested dicts and lists of tensors and plain values to all other workers.

        Args:
            give: Returns the value to send. It is called only at the source.
            take: Receives the value on the other workers.
            source: Rank of the sender.

        Raises:
            PeerLostError: A worker is gone.
        """
        self._send(self.view, give, take, source=source)

    def share_state(self) -> None:
        """Copy the state of the worker that has trained most steps to all others.

        Raises:
            PeerLostError: A worker is gone.
        """
        self.share(self._job.state, self._job.load_state, source=self.view.furthest)

    def _catch_up(self, view: WorkerView, infos: tuple[WorkerInfo, ...]) -> None:
        alike = len(set(view.steps)) == 1 and not any(info.new for info in infos)
        if not alike:
            self._send(view, self._job.state, self._job.load_state, source=view.furthest)
        elif len({info.trained for info in infos}) > 1:
            raise HeteroError(
                f"workers {', '.join(view.names)} train different parameters; freeze and unfreeze "
                "parameters after the same step on all workers"
            )

    def _send(
        self, view: WorkerView, give: Callable[[], Any], take: Callable[[Any], None], *, source: int
    ) -> None:
        if len(view.names) == 1:
            return
        data = to_bytes(give()) if view.rank == source else None
        size = torch.tensor([0 if data is None else len(data)], device=self._device)
        self._members.broadcast(size, source=source)
        if data is None:
            data = torch.empty(int(size), dtype=torch.uint8)
        data = data.to(self._device)
        self._members.broadcast(data, source=source)
        if view.rank != source:
            take(from_bytes(data))


def _check_structure(view: WorkerView, infos: tuple[WorkerInfo, ...]) -> None:
    """Raise ``HeteroError`` unless all workers train the same model."""
    for name, info in zip(view.names, infos, strict=True):
        if info.structure != infos[0].structure:
            raise HeteroError(
                f"workers {view.names[0]} and {name} train different models: names, shapes or "
                "types of parameters or buffers differ; build the same model on all workers"
            )
