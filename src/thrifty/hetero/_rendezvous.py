"""Who trains in the next step: workers meet, split the batch, stand by and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from thrifty.core import Clock, PeerLostError, plain_logger
from thrifty.perf import Power, StepCurve

from ._job import Event, HeteroOptions, MembersChanged, SummedNotes, WorkerInfo
from .balance._allocation import Allocation, Standby
from .training._learner import Learner
from .workers._group import Job, WorkerGroup
from .workers._membership import Membership


_log = plain_logger("thrifty.hetero")


class Rendezvous:
    """Keeps the workers of a job together, and splits the batch among those that train.

    All workers take the same decisions from the same numbers, so none of them leads.

    Args:
        members: How workers find each other.
        job: The training job.
        rejoin_state: Returns what a worker that has stood by needs to train the next step.
        load_rejoin_state: Takes over what ``rejoin_state`` returned on another worker.
        on_change: Called when the workers that train have changed.
        learner: This worker's share of the training.
        batch: Requested samples of one step, over all workers.
        seed: Seed of the sample order.
        options: Options of the trainer.
        clock: Clock to measure this worker's speed with.

    Attributes:
        group: The workers that have met.
        standby: Which of them stand by.
        allocation: Samples of each worker that trains; available after the first meeting.
        stopped: Whether this worker was told, while it stood by, that training has ended.
    """

    def __init__(  # noqa: PLR0913 -- all but two are keyword-only
        self,
        members: Membership,
        job: Job,
        *,
        rejoin_state: Callable[[], dict[str, Any]],
        load_rejoin_state: Callable[[Mapping[str, Any]], None],
        on_change: Callable[[], None],
        learner: Learner,
        batch: int,
        seed: int,
        options: HeteroOptions,
        clock: Clock,
    ) -> None:
        self.group = WorkerGroup(members, job, device=learner.device)
        self.standby = Standby(self.group, options=options, clock=clock)
        self.allocation: Allocation
        self.stopped = False
        self._job = job
        self._rejoin_state = rejoin_state
        self._load_rejoin_state = load_rejoin_state
        self._on_change = on_change
        self._learner = learner
        self._batch = batch
        self._seed = seed
        self._options = options
        self._clock = clock
        self._curve = options.curve
        if self._curve is not None:
            min_samples = max(self._curve.min_samples, learner.min_samples)
            self._curve = replace(self._curve, min_samples=min_samples)
        self._events: list[Event] = []
        self._broken = self._failed = False

    @property
    def curves(self) -> tuple[StepCurve, ...]:
        """Current speed curves of the workers that train; empty before the first meeting."""
        return self.allocation.curves if self.group.met else ()

    def begin(self) -> None:
        """Begin a run: what ended the one before does not count any more."""
        self.stopped = self._failed = False

    def trains_next(self) -> bool:
        """Meet and call workers as is due; return whether this worker trains the next step.

        A worker that stands by waits here until the others call it.

        Raises:
            PeerLostError: A worker is gone.
            TooFewWorkersError: Not enough workers are left.
        """
        if self._broken or self.group.is_due(self._options.admit_every):
            self.meet(broken=self._broken)
        if self.group.stands_by:
            self._stand_by()
            return False
        if self.standby.calls:
            self._call_back(stop=False)
        self.standby.beat()
        return True

    def meet(self, *, broken: bool) -> None:
        """Agree on the workers; if they have changed, split the batch among them.

        Args:
            broken: Whether connections have failed.

        Raises:
            TooFewWorkersError: Not enough workers are left.
        """
        self._broken = False
        if not self.group.met:
            self._prepare()
        before = self.group.everyone.names if self.group.met else ()
        infos = self.group.meet(self._info, broken=broken)
        if infos is None:
            return
        view = self.group.view
        self.standby.meet(infos, batch=self._batch)
        self._allocate()
        self._on_change()
        event = MembersChanged(
            step=self._job.steps,
            generation=view.generation,
            names=view.names,
            joined=tuple(name for name in view.names if name not in before),
            lost=tuple(name for name in before if name not in view.names),
            split=self.allocation.split,
            batch=self.allocation.batch,
        )
        self._events.append(event)
        if view.rank:
            return
        _log.info("step %d: workers %s, split %s", event.step, list(event.names), list(event.split))
        self._log_left_out(frozenset())

    def meet_after(self, error: PeerLostError) -> None:
        """Let the workers meet before the next step, because of this error after the present one.

        The step itself is complete and counts.
        """
        _log.warning("after step %d: %s", self._job.steps, error)
        self._broken = True

    def make_room(self) -> None:
        """Make room for the numbers that workers send each other beside gradients."""
        self._learner.make_room(num_control=SummedNotes.num(len(self.group.view.names)))

    def observe(
        self, summed: SummedNotes, sizes: Sequence[int], *, probed: int, checked: bool
    ) -> None:
        """Record the times of a step; from the next one on, the split or the workers may change.

        Args:
            summed: What the workers have told each other.
            sizes: Samples of each worker in this step.
            probed: Samples that workers without a share have tried.
            checked: Whether this step was checked, and its times are no others' measure.
        """
        usual = sum(sizes) == self.allocation.batch and not checked
        resplit = self._resplit(summed.busy_s, sizes, probed)
        try:
            change = self.standby.observe(
                summed, self.allocation.curves, step=self._job.steps, usual=usual, resplit=resplit
            )
        except PeerLostError as error:
            self.meet_after(error)
            return
        if change is not None:
            self._events.append(change)
        if not self.group.complete and self.allocation.names != self.group.view.names:
            # Callers change models only after this step's report, so no change is missed here.
            self._allocate()

    def take_events(self) -> tuple[Event, ...]:
        """Return what has happened since the last call."""
        events, self._events = self._events, []
        return tuple(events)

    def release(self) -> None:
        """End the wait of workers that stand by, because training ends here, or pauses."""
        if not self.group.met or self.group.complete or self._failed:
            return
        try:
            if self.group.stands_by:
                self._stand_by()
            else:
                self._call_back(stop=True)
        except PeerLostError as error:
            _log.warning("after step %d: %s", self._job.steps, error)
            self.meet(broken=True)

    def fail(self, error: Exception) -> None:
        """Tell workers that stand by that training has failed here."""
        self._failed = True
        if self.group.met and not self.group.complete and not self.group.stands_by:
            with contextlib.suppress(PeerLostError):
                self.standby.fail(error)

    def _allocate(self) -> None:
        """Split the batch over the workers that train."""
        self.allocation = Allocation(
            self.group.view.names,
            self.standby.infos,
            batch=self._batch,
            num_public=self._learner.samples.num_public,
            seed=self._seed,
            options=self._options,
        )
        self.make_room()

    def _resplit(self, busy_s: Sequence[float], sizes: Sequence[int], probed: int) -> bool:
        """Record the times of a step; return whether the split has changed."""
        left_out = self.allocation.left_out
        change = self.allocation.observe(busy_s, sizes, probed=probed)
        if change is None:
            return False
        self._events.append(change)
        if self.group.view.rank:
            return True  # one log line per job is enough
        _log.info(
            "step %d: split %s -> %s (%s; %.0f -> %.0f ms)",
            self._job.steps,
            list(change.before),
            list(change.after),
            change.reason,
            1e3 * change.step_s[0],
            1e3 * change.step_s[1],
        )
        self._log_left_out(left_out)
        for name in sorted(left_out - self.allocation.left_out):
            _log.warning("worker %s is no longer left out: with it a step takes less time", name)
        return True

    def _log_left_out(self, before: frozenset[str]) -> None:
        for name in sorted(self.allocation.left_out - before):
            _log.warning("worker %s is left out: with it a step would take longer", name)

    def _stand_by(self) -> None:
        """Wait until the workers that train call this one."""
        goes_on = self.standby.await_call()
        self._rejoin()
        # If the others are lost before they have sent their state, this worker trains on.
        self.stopped = not goes_on

    def _call_back(self, *, stop: bool) -> None:
        self.standby.call(stop=stop)
        self._rejoin()

    def _rejoin(self) -> None:
        """Train with all workers again. Those that stood by take over the state of the others."""

        def give() -> dict[str, Any]:
            return {"job": self._rejoin_state(), "standby": self.standby.state()}

        def take(state: Mapping[str, Any]) -> None:
            self._load_rejoin_state(state["job"])
            self.standby.load_state(state["standby"])

        infos = self.group.rejoin(self._info(), give, take)
        self.standby.rejoined(infos)
        self._allocate()

    def _prepare(self) -> None:
        """Measure this worker before the first meeting, while the others need not wait."""
        if self._curve is None:
            self._curve = self._measured()
        if self._learner.min_samples:
            # This worker's first step may have no samples for it, but it must know what the
            # others sum.
            self._learner.rehearse(2)

    def _measured(self) -> StepCurve:
        growth, samples = self._options.growth, self._learner.samples
        wanted = self._batch if growth is None else growth.max_batch or 2**20
        return self._learner.measure(
            max_samples=min(wanted, samples.num_public + samples.num_private), clock=self._clock
        )

    def _info(self) -> WorkerInfo:
        """Return what this worker reports about itself."""
        curve = self._curve
        if self.group.met:
            curve = self.standby.own_curve(self.curves)
        assert curve is not None
        return WorkerInfo(
            curve=curve,
            num_private=self._learner.samples.num_private,
            power=self._options.power or Power(idle_w=0.0, busy_w=0.0),
            new=not self.group.met,
            structure=self._learner.structure(),
            trained=self._learner.trained(),
        )
