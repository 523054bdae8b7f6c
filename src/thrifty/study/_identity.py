"""What a study consists of, as plain data to store and to compare on the next run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from thrifty.core import StudyMismatchError, fingerprint
from thrifty.pack import Task, TaskIdentity, Trainable, task_identity
from thrifty.pack.identity import asking_legacy, note_moves
from thrifty.search import Algorithm
from thrifty.space import Space
from thrifty.store._spec import changes, is_legacy, listed

from ._goals import Bound, Goals


VERSION = 3
"""Part of a plan's identity; raised when the meaning of seeds, epochs or states changes."""
LEGACY_VERSION = 2
"""The version that identified tasks by their source only. Its studies keep their plans."""

_NOT_COMPARED = ("file", "task")  # a task is compared by its plan


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of a study that define it.

    Attributes:
        apart: Whether metrics are separate from training; False if they change what is trained.
    """

    task: Task | Trainable
    space: Space
    algorithm: Algorithm
    goals: Goals
    seed: int
    warm_start: tuple[str, ...] = ()
    """Names of the earlier studies that this study learns from."""
    apart: bool = True
    _known: dict[str, TaskIdentity] = field(default_factory=dict, repr=False, compare=False)

    @property
    def identity(self) -> TaskIdentity:
        """The identity of the task, computed once for all uses of this recipe.

        Raises:
            TaskError: A value that the task reads has no content.
        """
        if "task" not in self._known:
            self._known["task"] = task_identity(self.task)
        found = self._known["task"]
        return found if self.apart else found.joined()

    @contextlib.contextmanager
    def watched(self, *, fresh: bool) -> Iterator[None]:
        """Record what the task changes in its own values in this context, as still the same task.

        Args:
            fresh: Whether the study is new; a study of an older version is identified differently.
        """
        before = self.identity if fresh else self._known.get("task")
        try:
            yield
        finally:
            if before is not None:
                note_moves(self.task, before)

    def plan_identity(self, *, legacy: bool = False) -> str:
        """Return the identity of the plan; studies that share it share training and evaluation."""
        if legacy:
            parts = {"task": self._legacy_task(), "seed": self.seed, "version": LEGACY_VERSION}
            return fingerprint(parts)
        return fingerprint({
            "family": self.family(),
            "metrics": self.identity.evaluation_digest,
        })

    def family(self) -> str:
        """Return the identity of the training; studies that share it may differ in metrics."""
        return fingerprint({
            "training": self.identity.training_digest,
            "seed": self.seed,
            "version": VERSION,
        })

    def like(self, spec: Mapping[str, Any]) -> Recipe:
        """Return the same recipe, with metrics apart from training if a stored spec has them so."""
        if is_legacy(spec):
            return self
        return replace(self, apart=bool(spec["task"]["evaluation"]))

    def spec(self, *, legacy: bool = False) -> dict[str, Any]:
        """Return the study as plain data; rarely used fields are present only if set."""
        goals = self.goals
        several = len(goals.metrics) > 1
        content = {"version": VERSION, **self.identity.to_json()} if not legacy else None
        spec: dict[str, Any] = {
            "task": content or self._legacy_task(),
            "space": self.space.to_json(),
            "algorithm": repr(self.algorithm),
            "max_epochs": self.algorithm.max_epochs,
            "metric": list(goals.metrics) if several else goals.metrics[0],
            "mode": list(goals.modes) if several else goals.modes[0],
            "seed": self.seed,
        }
        if goals.constraints:
            spec["constraints"] = {name: [b.side, b.limit] for name, b in goals.constraints}
        if self.warm_start:
            spec["warm_start"] = list(self.warm_start)
        return spec

    def check_same(self, found: Mapping[str, Any], *, same_plan: bool, where: str) -> None:
        """Raise StudyMismatchError unless the stored spec is that of this study."""
        legacy = is_legacy(found)
        mine = self.like(found).spec(legacy=legacy)
        differing = [
            f"{key} was {found.get(key)!r} and is {mine.get(key)!r}"
            for key in dict.fromkeys((*mine, *found))
            if key not in _NOT_COMPARED and found.get(key) != mine.get(key)
        ]
        compare = _legacy_difference if legacy else _difference
        changed = compare(found.get("task", {}), mine["task"])
        if changed:
            differing.append(changed)
        elif not same_plan and not differing:
            differing.append("it was made by another version of thrifty")
        if differing:
            raise StudyMismatchError(
                f"{where}: {'; '.join(differing)}. "
                "Give this one another name, or restore what has changed"
            )

    def _legacy_task(self) -> dict[str, str]:
        with asking_legacy():
            return dict(self.task.identity())


def _difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    training = changes(was["training"], now["training"])
    evaluation = changes(was["evaluation"], now["evaluation"])
    if training:
        return f"the task has changed ({listed([*training, *evaluation])})"
    if evaluation:
        return (
            f"its metrics have changed ({listed(evaluation)}); under another name, what was "
            "trained and is still kept is only evaluated again"
        )
    return ""


def _legacy_difference(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what differs between two identities of older versions."""
    texts = [
        key if key == "source" else f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in dict.fromkeys((*now, *was))
        if was.get(key) != now.get(key)
    ]
    return f"the task has changed ({', '.join(texts)})" if texts else ""


def goals_of(spec: Mapping[str, Any]) -> Goals:
    """Return the goals of a stored study."""
    constraints = {n: Bound(*bound) for n, bound in spec.get("constraints", {}).items()}
    return Goals.of(spec["metric"], spec["mode"], constraints=constraints)
