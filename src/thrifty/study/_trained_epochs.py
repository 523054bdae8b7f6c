"""The epochs of a study's plan that are known: who trained them, how long, what they logged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from thrifty.core import Artifact, EpochDone
from thrifty.plan import Node
from thrifty.store import EpochAgain, EpochRecord, Record
from thrifty.store._epoch_times import EpochTimes


Place = tuple[int, int]
"""A node of the plan and one of its epochs."""


class TrainedEpochs:
    """The known epochs of a plan, and which of them the trials of one study have passed.

    Args:
        study_id: The study.
        plan_id: The plan.

    Attributes:
        num_trained: Epochs that were trained for the study in all of its runs, each counted once.
        times: The times of each epoch.
        origins: The study that trained each epoch that the store had before this run.
        evaluated: Epochs that were not trained: their kept state was evaluated again.
        again: How often epochs were trained again, and the time that took.
        attributes: The user attributes of epochs in which some were set, by node and epoch.
        artifacts: The artifacts of epochs in which some were logged, in the same form, by name.
    """

    def __init__(self, *, study_id: int, plan_id: int) -> None:
        self.num_trained = 0
        self.times: dict[Place, EpochTimes] = {}
        self.origins: dict[Place, int | None] = {}
        self.evaluated: set[Place] = set()
        self.again: dict[Place, tuple[int, EpochTimes]] = {}
        self.attributes: dict[int, dict[int, Mapping[str, Any]]] = {}
        self.artifacts: dict[int, dict[int, Mapping[str, Artifact]]] = {}
        self._study_id, self._plan_id = study_id, plan_id
        self._passed: dict[int, int] = {}
        """The farthest epoch that a trial of the study has reached on each node."""
        self._num_saved = 0
        """Epochs that trials have reported and that were not trained for them."""

    def add(self, event: EpochDone) -> Record:
        """Add an epoch that a worker has trained; return the record of it."""
        key, times = (event.node, event.epoch), EpochTimes.of(event)
        spent: dict[str, Any] = {
            "seconds": event.seconds,
            "seconds_checks": event.seconds_checks,
            "seconds_alone": event.seconds_alone,
            "seconds_alone_low": event.seconds_alone_low,
            "seconds_alone_high": event.seconds_alone_high,
        }
        if key in self.times:  # a state was lost, so the epochs before it were trained again
            num, before = self.again.get(key, (0, EpochTimes()))
            self.again[key] = num + 1, before.plus(times)
            return EpochAgain(plan=self._plan_id, node=event.node, epoch=event.epoch, **spent)
        self.num_trained += not event.evaluated
        self._note(event)
        self.times[key] = times
        return EpochRecord(
            plan=self._plan_id,
            node=event.node,
            epoch=event.epoch,
            metrics=event.metrics,
            worker=event.worker,
            study=self._study_id,
            evaluated=event.evaluated,
            attributes=event.attributes,
            artifacts=event.artifacts,
            **spent,
        )

    def learn(self, epochs: Iterable[EpochRecord]) -> None:
        """Add epochs of the store that are not known yet."""
        for epoch in epochs:
            key = epoch.node, epoch.epoch
            if epoch.again and epoch.again >= self.again.get(key, (0, None))[0]:
                self.again[key] = epoch.again, EpochTimes.of_again(epoch)
            if key in self.times:
                continue
            self.num_trained += epoch.study == self._study_id and not epoch.evaluated
            self.origins[key] = epoch.study
            self._note(epoch)
            self.times[key] = EpochTimes.of(epoch)

    def count_as_known(self) -> None:
        """Count what this study's run has trained as known, as if it was read from the store."""
        for place in self.times.keys() - self.origins.keys():
            self.origins[place] = self._study_id

    def passed(self, node: Node | None, *, reached: int, before: int) -> int:
        """Record that a trial has passed the epochs after ``before``.

        Args:
            node: The node that has its last epoch.
            reached: That epoch.
            before: The epoch that it had reached before.

        Returns:
            How many of these epochs another trial had passed already.
        """
        num_known, epoch = 0, reached
        while node is not None and epoch > before:
            first = max(before, node.start)
            passed = self._passed.get(node.id, node.start)
            num_known += max(0, min(passed, epoch) - first)
            self._num_saved += sum(
                self._is_from_elsewhere((node.id, each))
                for each in range(max(first, passed) + 1, epoch + 1)
            )
            self._passed[node.id] = max(passed, epoch)
            epoch, node = node.start, node.parent
        self._num_saved += num_known
        return num_known

    @property
    def num_saved(self) -> int:
        """The saved epochs as ``Study.savings`` counts them, without reading all trials.

        Only epochs that trials have reported count, so it falls only where one is trained again.
        """
        again = sum(
            num
            for (node, epoch), (num, _) in self.again.items()
            if epoch <= self._passed.get(node, 0)
        )
        return self._num_saved - again

    def _is_from_elsewhere(self, place: Place) -> bool:
        """Return whether the study has not trained an epoch: another study, or plan, has."""
        origin = self.origins.get(place, self._study_id)
        return origin != self._study_id or place in self.evaluated

    def _note(self, epoch: EpochDone | EpochRecord) -> None:
        if epoch.evaluated:
            self.evaluated.add((epoch.node, epoch.epoch))
        if epoch.attributes:
            self.attributes.setdefault(epoch.node, {})[epoch.epoch] = epoch.attributes
        if epoch.artifacts:
            found = {each.name: each for each in epoch.artifacts}
            self.artifacts.setdefault(epoch.node, {})[epoch.epoch] = found
