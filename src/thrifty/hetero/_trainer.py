"""Training of one model on unequal workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from thrifty.core import (
    Clock,
    DivergedError,
    HeteroError,
    PeerLostError,
    SystemClock,
    derive_seed,
    plain_logger,
    step_seed,
)
from thrifty.perf import Power, SplitChange, StepCurve

from ._allocation import Allocation
from ._crew import Crew
from ._fixed import FixedMembership
from ._learner import Learner, Loss, device_of
from ._membership import Membership
from ._meter import Meter
from ._options import HeteroOptions
from ._order import Place, Share
from ._report import MembersChanged, StepReport
from ._samples import Collate, PublicAndPrivate
from ._worker_info import WorkerInfo


_log = plain_logger("thrifty.hetero")


class HeteroTrainer:
    """Trains a model on workers of unequal speed so that none waits for another, with the result of one process.

    A fixed global batch is split by measured speed. Worker ``i`` weighs its mean loss by ``b_i / B``, so the sum of all gradients is that of the whole batch, whatever the split (plain averaging, as
    Horovod's in Stannis, would give a slow worker's few samples more weight). Times travel with the gradients: all workers know them and run the same policy, so there is no coordinator. A step that
    fails because a worker is lost is trained again by the others; who has trained most steps gives the others its state.

    Dropout and other draws are a function of (seed, epoch, step, first sample of the share): the same distribution as in one process, but other draws.

    Args:
        model: plain; on this worker's device.
        optimizer: of the model's parameters.
        dataset: map-style, which every worker can read.
        loss: mean over a batch.
        global_batch: samples of one step, of all workers together.
        seed: of the order of samples and of draws.
        members: how workers find each other; what torchrun has started unless told.
        private: a data set that this worker alone can read; its samples never leave it.
        collate: from samples to a batch.
        meter: of this worker's energy, to be reported.
        options: others.
        clock: to read.

    Attributes:
        steps: trained.

    Raises:
        HeteroError: ``global_batch`` is below 1, or there is nothing to train.

    >>> model = nn.Linear(2, 1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randn(32, 1))
    >>> trainer = HeteroTrainer(
    ...     model, torch.optim.SGD(model.parameters(), lr=0.1), data, global_batch=16, seed=0,
    ...     loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ... )
    >>> [report.sizes for report in trainer.run(epochs=1)]
    [(16,), (16,)]
    """

    def __init__(  # noqa: PLR0913 -- what is trained, on what, with whom; all but three are keywords
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        *,
        loss: Loss,
        global_batch: int,
        seed: int = 0,
        members: Membership | None = None,
        private: Dataset[Any] | None = None,
        collate: Collate | None = None,
        meter: Meter | None = None,
        options: HeteroOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        if global_batch < 1:
            raise HeteroError(f"global_batch is at least 1, not {global_batch}")
        self.steps = 0
        self._options = options or HeteroOptions()
        samples = PublicAndPrivate(dataset, private, collate)
        if not samples.num_public + samples.num_private:
            raise HeteroError("there are no samples to train on")
        self._members = members or FixedMembership(device=device_of(model))
        self._learner = Learner(
            model,
            optimizer,
            samples,
            loss=loss,
            sum_=self._members.all_reduce if self._options.batch_norm == "global" else None,
            bucket_cap_mb=self._options.bucket_cap_mb,
        )
        self._crew = Crew(self._members, self, device=self._learner.device)
        self._global_batch = global_batch
        self._seed = seed
        self._meter = meter
        self._clock = clock or SystemClock()
        self._curve = self._options.curve
        if self._curve is not None:
            least = max(self._curve.least, self._learner.least)
            self._curve = replace(self._curve, least=least)
        self._place = Place()
        self._optimizer_s = 0.0
        self._step_s = 0.0
        self._events: list[SplitChange | MembersChanged] = []
        self._allocation: Allocation

    @property
    def split(self) -> tuple[int, ...]:
        """Samples of each worker in a step; empty before the first one."""
        return self._allocation.split if self._crew.met else ()

    @property
    def curves(self) -> tuple[StepCurve, ...]:
        """The workers as they are now; empty before the first step."""
        return self._allocation.curves if self._crew.met else ()

    @property
    def bytes_per_step(self) -> int:
        """Bytes that a worker hands in at each step: its gradients, and the control numbers beside them."""
        return self._learner.gradients.num_bytes

    def run(self, *, epochs: int) -> Iterator[StepReport]:
        """Trains until ``epochs`` epochs are complete, and reports each step.

        What the caller does between two reports (schedulers, logging, saving) is not counted as training.

        Args:
            epochs: in all, those of a loaded state too.

        Raises:
            DivergedError: the loss is not finite any more.
            TooFewWorkersError: not enough workers are left.
        """
        while self._place.epoch < epochs:
            report = self._try_step()
            if report is None:
                continue
            yield report
            if not self._allocation.left(self._place):
                self._place = Place(epoch=self._place.epoch + 1)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on: nested dicts and lists of tensors and plain values; equal on all workers."""
        return {
            **self._learner.state(),
            "steps": self.steps,
            "epoch": self._place.epoch,
            "public": self._place.public,
            "private": dict(self._place.private),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes back to what ``state`` returned; before the first step."""
        self._learner.load_state(state)
        self.steps = int(state["steps"])
        self._place = Place(
            epoch=int(state["epoch"]),
            public=int(state["public"]),
            private={str(name): int(num) for name, num in state["private"].items()},
        )

    def close(self) -> None:
        """Leaves the other workers."""
        self._members.close()

    def _try_step(self) -> StepReport | None:
        """One step, or None if a worker was lost in it."""
        try:
            if self._crew.is_due(self._options.admit_every):
                self._meet(broken=False)
            if not self._allocation.left(self._place):
                # Who was lost took private samples along: nothing is left of this epoch.
                self._place = Place(epoch=self._place.epoch + 1)
                return None
            return self._step()
        except PeerLostError as error:
            _log.warning("step %d: %s", self.steps + 1, error)
            self._learner.undo()
            self._meet(broken=True)
            return None

    def _step(self) -> StepReport:
        began = self._clock.monotonic()
        rank, control = self._crew.view.rank, self._learner.gradients.control
        shares = self._allocation.shares(self._place)
        sizes = tuple(len(share) for share in shares)
        workers = len(sizes)
        loss = self._learner.backward(
            shares[rank],
            weight=sizes[rank] / sum(sizes),
            seed=self._draws(shares[rank]),
            begin=self._members.begin_all_reduce,
        )
        probed = self._probe(sizes)
        busy_s = self._clock.monotonic() - began + self._optimizer_s
        # What workers tell each other: [seconds of each | joules | meters | loss]
        control[rank] = busy_s
        control[workers] = self._joules(busy_s)
        control[workers + 1] = float(self._meter is not None)
        control[workers + 2] = loss
        self._learner.gradients.reduce(self._members.begin_all_reduce)
        told = control.tolist()
        self._update(loss=told[workers + 2])
        self._allocation.advance(self._place, shares)
        self._observe(told[:workers], sizes, probed)
        self._step_s = self._clock.monotonic() - began
        events, self._events = self._events, []
        return StepReport(
            epoch=self._place.epoch,
            step=self.steps,
            loss=told[workers + 2],
            rank=rank,
            names=self._crew.view.names,
            sizes=sizes,
            share=shares[rank],
            busy_s=tuple(told[:workers]),
            step_s=self._step_s,
            joules=told[workers] if told[workers + 1] else None,
            events=tuple(events),
        )

    def _update(self, *, loss: float) -> None:
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss of step {self.steps + 1} is {loss}: try a smaller learning rate"
            )
        began = self._clock.monotonic()
        growth = self._options.growth
        self._learner.update(
            lr_factor=1.0
            if growth is None
            else growth.factor(
                batch=self._allocation.batch, base=self._global_batch, step=self.steps
            ),
            clip_norm=self._options.clip_norm,
        )
        # The optimiser's time is the worker's own, too: it counts for the step that follows.
        self._optimizer_s = self._clock.monotonic() - began
        self.steps += 1

    def _probe(self, sizes: Sequence[int]) -> int:
        num = self._allocation.probe(self.steps)
        if num and not sizes[self._crew.view.rank]:
            self._learner.rehearse(num)
            self._learner.gradients.zero()
        return num

    def _observe(self, busy_s: Sequence[float], sizes: Sequence[int], probed: int) -> None:
        left_out = self._allocation.left_out
        change = self._allocation.observe(busy_s, sizes, probed=probed)
        if change is None:
            return
        self._events.append(change)
        if self._crew.view.rank:
            return  # one line of a job is enough
        _log.info(
            "step %d: split %s -> %s (%s; %.0f -> %.0f ms)",
            self.steps,
            list(change.before),
            list(change.after),
            change.reason,
            1e3 * change.step_s[0],
            1e3 * change.step_s[1],
        )
        self._say_left_out(left_out)

    def _meet(self, *, broken: bool) -> None:
        if not self._crew.met:
            self._prepare()
        before = self._crew.view.names if self._crew.met else ()
        infos = self._crew.meet(self._info, broken=broken)
        if infos is None:
            return
        view = self._crew.view
        self._allocation = Allocation(
            view.names,
            infos,
            batch=self._global_batch,
            num_public=self._learner.samples.num_public,
            seed=self._seed,
            options=self._options,
        )
        self._learner.make_room(num_control=len(view.names) + 3)
        event = MembersChanged(
            step=self.steps,
            generation=view.generation,
            names=view.names,
            joined=tuple(name for name in view.names if name not in before),
            lost=tuple(name for name in before if name not in view.names),
            split=self._allocation.split,
            batch=self._allocation.batch,
        )
        self._events.append(event)
        if view.rank:
            return
        _log.info(
            "step %d: workers %s, split %s", event.step, list(event.names), list(event.split)
        )
        self._say_left_out(frozenset())

    def _prepare(self) -> None:
        """Before the first meeting, while the others need not wait: measures this worker."""
        if self._curve is None:
            self._curve = self._measured()
        if self._learner.least:
            # Its first step may have no samples for it, and it has to know what the others sum.
            self._learner.rehearse(2)

    def _info(self) -> WorkerInfo:
        """What this worker tells of itself."""
        curve = self.curves[self._crew.view.rank] if self._crew.met else self._curve
        assert curve is not None
        return WorkerInfo(
            curve=curve,
            num_private=self._learner.samples.num_private,
            power=self._options.power or Power(idle_w=0.0, busy_w=0.0),
            new=not self._crew.met,
        )

    def _measured(self) -> StepCurve:
        growth, samples = self._options.growth, self._learner.samples
        wanted = self._global_batch if growth is None else growth.most or 2**20
        return self._learner.measure(
            most=min(wanted, samples.num_public + samples.num_private), clock=self._clock
        )

    def _draws(self, share: Share) -> int:
        whose = self._crew.view.names[self._crew.view.rank] if share.private else "public"
        first = (share.private or share.public or (0,))[0]
        return step_seed(
            derive_seed(self._seed, "draws", whose, self._place.epoch) + first, self.steps
        )

    def _joules(self, busy_s: float) -> float:
        if self._meter is None:
            return 0.0
        return self._meter.joules(busy_s=busy_s, whole_s=max(busy_s, self._step_s))

    def _say_left_out(self, before: frozenset[str]) -> None:
        for name in sorted(self._allocation.left_out - before):
            _log.warning("worker %s is left out: with it a step would take longer", name)


def balance(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    *,
    epochs: int,
    **options: Any,
) -> Iterator[StepReport]:
    """Trains on unequal workers and reports each step: ``HeteroTrainer(...).run(epochs=...)``, closed at the end.

    Args:
        model: see ``HeteroTrainer``.
        optimizer: see ``HeteroTrainer``.
        dataset: see ``HeteroTrainer``.
        epochs: to train.
        options: ``loss``, ``global_batch`` and others of ``HeteroTrainer``.

    >>> model = nn.Linear(2, 1)
    >>> data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randn(32, 1))
    >>> def loss(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> len(list(balance(model, sgd, data, loss=loss, global_batch=16, epochs=2)))
    4
    """
    trainer = HeteroTrainer(model, optimizer, dataset, **options)
    try:
        yield from trainer.run(epochs=epochs)
    finally:
        trainer.close()
