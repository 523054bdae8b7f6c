"""What a study is made of, as plain data: to be kept, and to be compared when it is run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.core import StudyMismatchError, fingerprint
from thrifty.pack import Task, Trainable
from thrifty.search import Algorithm
from thrifty.space import Space

from ._goals import Bound, Goals


VERSION = 2
"""Part of a plan's identity; raised when the meaning of seeds, epochs or states changes."""

_NOT_COMPARED = ("file", "task")  # a task is compared by its plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a study is made of."""

    task: Task | Trainable
    space: Space
    algorithm: Algorithm
    goals: Goals
    seed: int
    warm_start: tuple[str, ...] = ()
    """Names of the earlier studies that it learns from."""

    def plan_identity(self) -> str:
        """Studies for which this is equal share what they train."""
        return fingerprint({
            "task": dict(self.task.identity()),
            "seed": self.seed,
            "version": VERSION,
        })

    def spec(self) -> dict[str, Any]:
        """Plain data. What most studies do not have is there only in those that do."""
        goals = self.goals
        several = len(goals.metrics) > 1
        spec: dict[str, Any] = {
            "task": dict(self.task.identity()),
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
        """Raises StudyMismatchError unless the stored spec is that of this study."""
        mine = self.spec()
        differing = [
            f"{key} was {found.get(key)!r} and is {mine.get(key)!r}"
            for key in dict.fromkeys((*mine, *found))
            if key not in _NOT_COMPARED and found.get(key) != mine.get(key)
        ]
        changed = _differences(found.get("task", {}), mine["task"])
        if changed:
            differing.append(f"the task has changed ({changed})")
        elif not same_plan and not differing:
            differing.append("it was made by another version of thrifty")
        if differing:
            raise StudyMismatchError(
                f"{where}: {'; '.join(differing)}. "
                "Give this one another name, or restore what has changed"
            )


def _differences(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What differs between two identities of tasks; of a digest its name alone says something."""
    return ", ".join(
        key if key == "source" else f"{key} was {was.get(key)!r} and is {now.get(key)!r}"
        for key in dict.fromkeys((*now, *was))
        if was.get(key) != now.get(key)
    )


def goals_of(spec: Mapping[str, Any]) -> Goals:
    """The goals of a stored study."""
    constraints = {n: Bound(*bound) for n, bound in spec.get("constraints", {}).items()}
    return Goals.of(spec["metric"], spec["mode"], constraints=constraints)
