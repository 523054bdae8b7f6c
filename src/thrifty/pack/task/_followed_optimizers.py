"""The torch optimizers of one model by name: a single one, or those of ``Optimizers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from thrifty.core import TaskError

from ._followed_optimizer import FollowedOptimizer
from ._optimizer import Optimizer, Optimizers
from ._task import HyperParameters


SINGLE = "optimizer"
"""The name of an optimizer that is the only one."""

Source = Optimizer | Optimizers | Callable[[HyperParameters], Optimizer | Optimizers]


class FollowedOptimizers:
    """The optimizers of a task, each following the hyper-parameters that it names.

    Args:
        source: One specification, several, or a method that returns either.
        model: The model whose parameters are trained.
        values: The hyper-parameters to build with.

    Attributes:
        parts: The optimizers by name; a single one has the name ``SINGLE``.
        is_single: Whether there is one that trains all parameters.

    Raises:
        TaskError: The optimizers cannot be built for this model, or do not partition its
            parameters.
    """

    def __init__(self, source: Source, model: torch.nn.Module, values: Mapping[str, Any]) -> None:
        parameters = dict(model.named_parameters())
        given = source
        read: frozenset[str] = frozenset()
        if not isinstance(source, Optimizer | Optimizers):
            hp = HyperParameters(values)
            given = source(hp)
            read = frozenset(hp.names_read)
        self.is_single = not isinstance(given, Optimizers)
        self._model = model
        self._read = read
        if not isinstance(given, Optimizers):
            if isinstance(given, Optimizer) and given.params is not None:
                raise TaskError(
                    f"{given!r} has params= but is the only optimizer; leave params= out, or use "
                    "thrifty.Optimizers(...) and give the other parameters to another one"
                )
            one: Any = source
            self.parts = {SINGLE: FollowedOptimizer(one, parameters, values)}
            return
        assigned = given.assign(parameters.items())
        self.parts = {
            name: FollowedOptimizer(_part_of(source, name), assigned[name], values)
            for name in given
        }

    @property
    def only(self) -> FollowedOptimizer:
        """The only optimizer; ask ``is_single`` first."""
        assert self.is_single, "there are several optimizers"
        return self.parts[SINGLE]

    @property
    def torch(self) -> dict[str, torch.optim.Optimizer]:
        """The torch optimizers by name."""
        return {name: part.torch for name, part in self.parts.items()}

    @property
    def names(self) -> frozenset[str]:
        """The hyper-parameters that they follow."""
        return frozenset().union(*(part.names for part in self.parts.values()))

    @property
    def read_when_built(self) -> frozenset[str]:
        """Hyper-parameters that a method's results read only while they were built."""
        return frozenset().union(*(part.read_when_built for part in self.parts.values()))

    def follow(self, values: Mapping[str, Any]) -> None:
        """Bring the torch optimizers up to date."""
        for part in self.parts.values():
            part.follow(values)

    def check(self, moving: Iterable[str]) -> None:
        """Check that all can follow the given hyper-parameters.

        Raises:
            TaskError: A factory has built an option with no ratio to the value it was given.
        """
        names = set(moving)
        for part in self.parts.values():
            part.check(names)

    def zero_grad(self) -> None:
        """Discard the gradients."""
        for part in self.parts.values():
            part.torch.zero_grad(set_to_none=True)

    def clip(self) -> None:
        """Clip the gradients of each optimizer's parameters, by value and then by norm."""
        for part in self.parts.values():
            if part.clipping:
                part.clipping.apply(self._model.parameters() if self.is_single else part.parameters)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped now."""
        return any(part.clipping for part in self.parts.values())

    def moments(self) -> dict[str, dict[str, Any]]:
        """Return the torch optimizers' state by parameter name; views, not copies."""
        return {name: own for part in self.parts.values() for name, own in part.moments().items()}

    def state(self) -> dict[str, Any]:
        """Return everything needed to continue; views, not copies."""
        if self.is_single:
            return self.only.state()
        return {"optimizers": {name: part.state() for name, part in self.parts.items()}}

    def load(self, state: Mapping[Any, Any]) -> None:
        """Restore what ``state`` returned.

        Raises:
            TaskError: The state belongs to other optimizers.
        """
        if self.is_single:
            self.only.load(state)
            return
        saved = state.get("optimizers", {SINGLE: state})
        if saved.keys() != self.parts.keys():
            raise TaskError(
                f"the checkpoint has the optimizers {', '.join(saved)}, and the task has "
                f"{', '.join(self.parts)} now; build them as they were"
            )
        for name, part in self.parts.items():
            part.load(saved[name])


def _part_of(source: Source, name: str) -> Any:
    """Return the source of one of several optimizers."""
    if isinstance(source, Optimizers):
        return source[name]
    assert not isinstance(source, Optimizer)

    def part(hp: HyperParameters) -> Any:
        given = source(hp)
        if not isinstance(given, Optimizers) or name not in given:
            raise TaskError(
                f"the task's optimizer(hp) returned {given!r}, which has no optimizer {name!r}; "
                "return the same ones each time"
            )
        return given[name]

    return part
