"""The group of workers that train together: how they meet, stand by and catch up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from thrifty.core import HeteroError, PeerLostError, plain_logger
from thrifty.hetero._job import WorkerInfo

from ._membership import Membership, PartialMembership, WorkerView, from_bytes, to_bytes


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
        self._training: WorkerView | None = None
        self._ranks: tuple[int, ...] = ()
        self._met_at = -1

    @property
    def view(self) -> WorkerView:
        """The view of the workers that train, available after the first meeting.

        A worker that stands by sees all workers.
        """
        return self._training or self.everyone

    @property
    def everyone(self) -> WorkerView:
        """The view of all workers, available after the first meeting."""
        if self._view is None:
            raise AssertionError("the workers have not met")
        return self._view

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks, among all workers, of those that train."""
        return self._ranks

    @property
    def complete(self) -> bool:
        """Whether all workers train."""
        return self.met and len(self._ranks) == len(self.everyone.names)

    @property
    def stands_by(self) -> bool:
        """Whether this worker stands by."""
        return self.met and self.everyone.rank not in self._ranks

    @property
    def can_narrow(self) -> bool:
        """Whether workers may stand by."""
        return isinstance(self._members, PartialMembership) and len(self.everyone.names) > 1

    @property
    def met(self) -> bool:
        """Whether the workers have met."""
        return self._view is not None

    def is_due(self, every: int) -> bool:
        """Return whether the workers meet before the next step, as every ``every`` steps."""
        if not self.met:
            return True
        steps = self._job.steps
        # Workers that stand by would not come.
        return self.complete and not (steps % every or self._met_at == steps)

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
            self._training, self._ranks = None, tuple(range(len(view.names)))
            return infos

    def narrow(self, ranks: Sequence[int]) -> None:
        """Continue with these workers; the others wait for ``await_call``.

        Raises:
            PeerLostError: A worker is gone.
        """
        self._partial.narrow(ranks)
        self._ranks, self._training = tuple(ranks), None
        view = self.everyone
        if not self.stands_by and not self.complete:
            self._training = WorkerView(
                generation=view.generation,
                rank=self._ranks.index(view.rank),
                names=tuple(view.names[rank] for rank in self._ranks),
                steps=tuple(view.steps[rank] for rank in self._ranks),
            )

    def call(self, code: int, text: str = "") -> None:
        """Send a message to the workers that stand by, if this worker is the one that sends them.

        Args:
            code: A number, passed on by ``await_call``.
            text: Text to send with it.

        Raises:
            PeerLostError: A worker is gone.
        """
        if self.complete or self.view.rank:
            return
        content = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        lost: PeerLostError | None = None
        for rank in range(len(self.everyone.names)):
            if rank in self._ranks:
                continue
            try:
                self._partial.send(torch.tensor([code, len(content)]), to=rank)
                self._partial.send(content, to=rank)
            except PeerLostError as error:
                lost = error  # the others are told all the same
        if lost is not None:
            raise lost

    def await_call(self) -> tuple[int, str]:
        """Wait for a message of the workers that train; return its code and text.

        Raises:
            PeerLostError: The worker that sends them is gone.
        """
        head = torch.zeros(2, dtype=torch.int64)
        self._partial.receive(head, source=self._ranks[0])
        code, size = head.tolist()
        content = torch.empty(size, dtype=torch.uint8)
        self._partial.receive(content, source=self._ranks[0])
        return code, content.numpy().tobytes().decode().strip()

    def rejoin(
        self, mine: WorkerInfo, give: Callable[[], Any], take: Callable[[Any], None]
    ) -> tuple[WorkerInfo, ...]:
        """Train with all workers again; those that stood by get the state of the others.

        Args:
            mine: What this worker reports about itself.
            give: Returns the state.
            take: Receives the state on the other workers.

        Returns:
            What each worker reported, by rank.

        Raises:
            PeerLostError: A worker is gone.
            HeteroError: Models have changed meanwhile, in different ways.
        """
        ranks, training = self._ranks, self._training
        try:
            infos = self._brought_together(ranks, mine, give=give, take=take)
        except PeerLostError:
            # Until the workers meet again, what each one knows is of those that trained.
            self._ranks, self._training = ranks, training
            raise
        self._met_at = self._job.steps  # all of them skip a meeting that would be due now
        return infos

    def _brought_together(
        self,
        ranks: tuple[int, ...],
        mine: WorkerInfo,
        *,
        give: Callable[[], Any],
        take: Callable[[Any], None],
    ) -> tuple[WorkerInfo, ...]:
        """Let all workers train, and send them the state of those that have these ranks."""
        view = self.everyone
        self.narrow(range(len(view.names)))
        infos = self._exchange(view, mine)
        trained = [infos[rank] for rank in ranks]
        names = tuple(view.names[rank] for rank in ranks)
        _check_trained(names, trained)
        changed = [
            name
            for name, info in zip(view.names, infos, strict=True)
            if info.structure != trained[0].structure
        ]
        if changed:
            raise HeteroError(
                f"the model has changed on worker {names[0]} but not on {', '.join(changed)}, "
                "which stood by meanwhile or changed it in another way; change the model outside "
                "of the loop over reports, or pass HeteroOptions(stand_by=False)"
            )
        self._send(view, give, take, source=ranks[0])
        return infos

    @property
    def _partial(self) -> PartialMembership:
        assert isinstance(self._members, PartialMembership)
        return self._members

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
        else:
            _check_trained(view.names, infos)

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


def _check_trained(names: Sequence[str], infos: Sequence[WorkerInfo]) -> None:
    """Raise ``HeteroError`` unless these workers train the same parameters."""
    if len({info.trained for info in infos}) > 1:
        raise HeteroError(
            f"workers {', '.join(names)} train different parameters; freeze and unfreeze "
            "parameters after the same step on all workers"
        )


def _check_structure(view: WorkerView, infos: tuple[WorkerInfo, ...]) -> None:
    """Raise ``HeteroError`` unless all workers train the same model."""
    for name, info in zip(view.names, infos, strict=True):
        if info.structure != infos[0].structure:
            raise HeteroError(
                f"workers {view.names[0]} and {name} train different models: names, shapes or "
                "types of parameters or buffers differ; build the same model on all workers"
            )
