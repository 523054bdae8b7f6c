"""The search space: named domains, fixed values, conditions between them."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from thrifty.core import ScheduleError, SpaceError, ThriftyError, check_hyperparameter_names

from . import _variants, schedules
from ._conditions import Branches, branches_of, conditions_of, order_of
from ._domain import Choice, Condition, Domain, Float, Int, amounts_in, freeze, in_epochs
from ._pieces import Hold
from ._timeline import starts_alike
from ._units import Amount, EpochSize, epochs, steps, tokens
from ._variants import every_value, templates_of, variants
from .schedules import Schedule, schedule_from_json


Config = Mapping[str, Any]


class Space:
    """The hyper-parameters to tune: each keyword is one hyper-parameter.

    A value is a domain (``Float``, ``Int``, ``Choice``), a schedule (its fields may be domains), or
    a plain fixed value. Write a fixed list as a tuple.

    Raises:
        SpaceError: The space has no hyper-parameter, or one with the name of a method (``values``).
            A list stands where a domain or a tuple is meant, or contains a schedule. An amount of
            steps, tokens or epochs stands outside a schedule. A condition is ignored, can never
            hold, names an unknown hyper-parameter, or is part of a cycle.

    >>> from thrifty.space import Choice, Float, Int, Step
    >>> space = Space(
    ...     lr=Step(Choice([0.1, 0.05]), [Int(10, 30, step=10)]),
    ...     optimizer=Choice(["sgd", "adam"]),
    ...     momentum=Choice([0.8, 0.9]).when(optimizer="sgd"),
    ... )
    >>> space.size()
    18.0
    >>> sorted(space.sample(np.random.default_rng(0)))
    ['lr', 'optimizer']
    """

    def __init__(self, **params: Any) -> None:
        if not params:
            raise SpaceError("Space(): the space is empty; name at least one hyper-parameter")
        check_hyperparameter_names(params)
        for name, value in params.items():
            _check_no_list(name, value)
        self._params = {name: freeze(value) for name, value in params.items()}
        for name, value in self._params.items():
            _variants.check_no_schedule_within(name, value)
            _check_no_amount(name, value)
        self._order = order_of(self._params)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all hyper-parameters, in the given order."""
        return tuple(self._params)

    def __getitem__(self, name: str) -> Any:
        return self._params[name]

    def __repr__(self) -> str:
        return f"Space({', '.join(f'{k}={v!r}' for k, v in self._params.items())})"

    def sample(self, rng: np.random.Generator, *, levels: int | None = None) -> dict[str, Any]:
        """Draw one configuration.

        With ``levels``, each interval is first reduced to that many values. Such gridded draws let
        trials over continuous spaces coincide and therefore share training (Li et al., "Exploiting
        Reuse in Pipeline-Aware Hyperparameter Tuning", 2019).
        """

        def draw(domain: Domain) -> Any:
            if levels is None:
                return domain.sample(rng)
            options = domain.levels(levels)
            return options[int(rng.integers(len(options)))]

        config: dict[str, Any] = {}
        for name in self._order:
            if self._active(name, config):
                config[name] = _variants.resolve(self._params[name], draw)
        return self._in_given_order(config)

    def grid(self, *, levels: int = 5) -> Iterator[dict[str, Any]]:
        """Return every configuration once, with intervals reduced to ``levels`` values."""
        configs = self._grid(self._order, lambda domain: domain.levels(levels), {})
        return (self._in_given_order(config) for config in configs)

    def size(self) -> float:
        """Return the number of configurations (``math.inf`` if the space has an interval)."""
        conditional = [n for n in self._order if conditions_of(self._params[n])]
        total = math.prod(_variants.size(self._params[n], lambda d: d.size()) for n in self._order)
        if not conditional or math.isinf(total):
            return total
        return float(sum(1 for _ in self._grid(self._order, every_value, {})))

    def amounts(self) -> tuple[Amount, ...]:
        """Return the times of the space's schedules that are in steps, tokens or epochs."""
        return amounts_in(tuple(self._params.values()))

    def in_epochs(self, size: EpochSize) -> Space:
        """Return the same space with the times of all schedules in epochs.

        Raises:
            UsageError: The size of an epoch is unknown in the unit of a time.

        >>> from thrifty.space import EpochSize, WSD, steps
        >>> Space(lr=WSD(0.1, cooldown=steps(500))).in_epochs(EpochSize(steps=250))
        Space(lr=WSD(0.1, cooldown=2))
        """
        if not self.amounts():
            return self
        return Space(**{name: in_epochs(value, size) for name, value in self._params.items()})

    @property
    def has_horizons(self) -> bool:
        """Whether trials end at horizons of their own; see ``Ladder``."""
        return False

    @property
    def averages(self) -> tuple[str, ...]:
        """The averages of weights whose metrics some trials have; see ``Ladder``."""
        return ()

    def horizon_of(self, config: Config) -> int | None:
        """Return the epoch at which a configuration's training ends.

        None means that it ends at the ``max_epochs`` of the algorithm.
        """
        return None

    def check(self, *, max_epochs: int) -> None:
        """Raise ScheduleError if a schedule in the space does not fit ``max_epochs``.

        If a schedule has too many variants to check them all, the extreme ones are checked.
        """
        for name in self._params:
            self._check_schedules(name, epochs=max_epochs)

    def _check_schedules(self, name: str, *, epochs: int) -> None:
        try:
            for schedule in _schedules(self._params[name]):
                schedule.segments(epochs)
        except ScheduleError as error:
            raise ScheduleError(f"hyper-parameter {name!r}: {error}") from None

    def changed_by_length(self, *, before: int, after: int) -> tuple[str, Schedule] | None:
        """Return a schedule whose first ``before`` epochs are others in a run of ``after`` epochs.

        Returns:
            The name of the hyper-parameter and one of its schedules; None if there is none.

        >>> from thrifty.space import Cosine, Step
        >>> Space(lr=Step(0.1, [3])).changed_by_length(before=8, after=16)
        >>> Space(lr=Cosine(0.1)).changed_by_length(before=8, after=16)
        ('lr', Cosine(0.1))
        """
        for name, value in self._params.items():
            for schedule in _schedules(value):
                if not starts_alike({name: schedule}, before=before, after=after):
                    return name, schedule
        return None

    def branches(self, *, max_epochs: int) -> Branches:
        """Return the epochs after which two configurations of this space may diverge.

        The states there are worth keeping: every trial requested later starts from one of them.

        >>> from thrifty.space import Float, Step
        >>> found = Space(lr=Step(0.1, [3, 6])).branches(max_epochs=9)
        >>> [interval.first for interval in found.intervals]
        [3, 6]
        >>> [interval] = Space(lr=Step(0.1, [Float(3, 6)])).branches(max_epochs=9).intervals
        >>> interval.first, interval.last
        (3, 6)
        """
        return branches_of(self._params, max_epochs=max_epochs)

    def changes_over_time(self, name: str, *, max_epochs: int) -> bool:
        """Return whether some schedule of this hyper-parameter changes during the run.

        >>> from thrifty.space import Choice, Constant, Step
        >>> space = Space(lr=Choice([0.1, Step(0.1, [5])]), width=Constant(64))
        >>> [space.changes_over_time(name, max_epochs=10) for name in space.names]
        [True, False]
        """
        return any(
            not isinstance(s.segments(max_epochs)[0].piece, Hold) or len(s.segments(max_epochs)) > 1
            for s in _schedules(self._params[name])
        )

    def to_json(self) -> dict[str, str]:
        """Return a readable description for the record; ``space_from_json`` reads most of them."""
        return {name: repr(value) for name, value in self._params.items()}

    def _grid(
        self, names: tuple[str, ...], levels: _variants.Levels, config: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if not names:
            yield config
        elif self._active(names[0], config):
            for value in _variants.expand(self._params[names[0]], levels):
                yield from self._grid(names[1:], levels, {**config, names[0]: value})
        else:
            yield from self._grid(names[1:], levels, config)

    def _active(self, name: str, config: Config) -> bool:
        return all(condition.holds(config) for condition in conditions_of(self._params[name]))

    def _in_given_order(self, config: Config) -> dict[str, Any]:
        return {name: config[name] for name in self._params if name in config}


def _check_no_list(name: str, value: Any) -> None:
    if not isinstance(value, list):
        return
    meant = f"Choice({value!r})"
    if len(value) == 2 and all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value
    ):
        kind = "Int" if all(isinstance(v, int) for v in value) else "Float"
        meant += f" or {kind}({value[0]!r}, {value[1]!r})"
    raise SpaceError(
        f"{name}={value!r}: a list may mean several things; did you mean {meant}? "
        f"Write a tuple, {name}={tuple(value)!r}, for a fixed list"
    )


def _check_no_amount(name: str, value: Any) -> None:
    parts: tuple[Any, ...] = value if isinstance(value, tuple) else ()
    for part in (*parts, *(value.options if isinstance(value, Choice) else ())):
        _check_no_amount(name, part)
    if isinstance(value, Amount):
        raise SpaceError(
            f"hyper-parameter {name!r} is {value!r}; steps, tokens and epochs are for the times of "
            "schedules and algorithms: give a plain number"
        )


def config_to_json(config: Config) -> dict[str, Any]:
    """Return plain data that ``config_from_json`` turns back into the configuration."""
    return {
        name: value.to_json() if isinstance(value, Schedule) else _plain(value)
        for name, value in config.items()
    }


def config_from_json(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that ``config_to_json`` wrote.

    >>> from thrifty.space import Cosine
    >>> config = {"lr": Cosine(0.1), "width": 64}
    >>> config_from_json(config_to_json(config)) == config
    True
    """
    return {
        name: schedule_from_json(value) if isinstance(value, Mapping) else freeze(value)
        for name, value in data.items()
    }


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _schedules(value: Any) -> Iterator[Schedule]:
    return (schedule for template in templates_of(value) for schedule in variants(template))


_CALLS: Mapping[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (Choice, Condition, Float, Int)},
    **{each.__name__: each for each in (epochs, steps, tokens)},
    **{
        name: each
        for name, each in vars(schedules).items()
        if isinstance(each, type) and issubclass(each, schedules.Schedule)
    },
}
_MOST_CHARACTERS = 100_000


def space_from_json(texts: Mapping[str, Any]) -> Space:
    """Return the space whose ``to_json`` wrote the texts.

    Domains, the schedules of this package and plain values are read; nothing else is called.

    Raises:
        SpaceError: A hyper-parameter has something else in its domain, such as a schedule of the
            user's own.

    >>> space = Space(lr=Choice([0.1, schedules.Step(Float(0.1, 1.0), [Int(1, 3)])]), width=64)
    >>> space_from_json(space.to_json()).to_json() == space.to_json()
    True
    """
    found = {}
    for name, text in texts.items():
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError("the text is too long")
            value = _value(ast.parse(text, mode="eval").body)
        except (ThriftyError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = None
        if repr(value) != text:
            raise SpaceError(
                f"the domain of {name!r} can only be read by the code of its study: "
                f"{str(text)[:200]}"
            )
        found[name] = value
    return Space(**found)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        given = {each.arg: _value(each.value) for each in node.keywords if each.arg is not None}
        if node.func.id not in _CALLS or len(given) < len(node.keywords):
            raise ValueError(f"{node.func.id} is not read")
        return _CALLS[node.func.id](*map(_value, node.args), **given)
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    return ast.literal_eval(node)
