"""The present workers: how they meet, and how those that are behind catch up."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from thrifty.core import HeteroError, PeerLostError, plain_logger
from thrifty.hetero._job_report import WorkerInfo
from thrifty.pack import State, pack_state, unpack_state

from ._membership import Membership, View


def to_bytes(value: Any) -> Tensor:
    """Serialise nested dicts and lists of tensors and plain values to bytes, without pickle.

    >>> from_bytes(to_bytes({"weight": torch.ones(2), "step": 3}))["step"]
    3
    """
    state = pack_state(value)
    tensors = {
        f"{i}": t.detach().cpu().contiguous() for i, t in enumerate(state.tensors.values())
    }
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
        self._view: View | None = None
        self._met_at = -1

    @property
    def view(self) -> View:
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

    def _exchange(self, view: View, mine: WorkerInfo) -> tuple[WorkerInfo, ...]:
        table = torch.zeros(len(view.names), WorkerInfo.NUM, dtype=torch.float64)
        table[view.rank] = torch.tensor(mine.to_row(), dtype=torch.float64)
        table = table.to(self._device)
        self._members.all_reduce(table)
        return tuple(WorkerInfo.from_row(row) for row in table.tolist())

    def share(
        self, give: Callable[[], Any], take: Callable[[Any], None], *, source: int
    ) -> None:
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

    def _catch_up(self, view: View, infos: tuple[WorkerInfo, ...]) -> None:
        alike = len(set(view.steps)) == 1 and not any(info.new for info in infos)
        if not alike:
            self._send(view, self._job.state, self._job.load_state, source=view.furthest)
        elif len({info.trained for info in infos}) > 1:
            raise HeteroError(
                f"workers {', '.join(view.names)} train different parameters; freeze and unfreeze "
                "parameters after the same step on all workers"
            )

    def _send(
        self,
        view: View,
        give: Callable[[], Any],
        take: Callable[[Any], None],
        *,
        source: int,
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


def _check_structure(view: View, infos: tuple[WorkerInfo, ...]) -> None:
    """Raise ``HeteroError`` unless all workers train the same model."""
    for name, info in zip(view.names, infos, strict=True):
        if info.structure != infos[0].structure:
            raise HeteroError(
                f"workers {view.names[0]} and {name} train different models: names, shapes or "
                "types of parameters or buffers differ; build the same model on all workers"
            )
