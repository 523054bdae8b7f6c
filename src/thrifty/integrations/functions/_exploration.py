"""The space of a training function: what it suggests, found by running it up to its loop."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from thrifty.core import SpaceError, TaskError, UsageError, error_text, plain_logger
from thrifty.core._child import Child, ChildEndedError, pickled, wait_for
from thrifty.pack import SelfDescribing
from thrifty.space import Choice, Condition, Domain, Float, Int, Schedule, Space, Timeline

from ._loop_trial import is_scheduled


logger = plain_logger(__name__)

_MAX_RUNS = 2_000
_MAX_S = 30.0
_PATIENCE_S = 5.0
"""After this long, the log says what is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One suggestion in a run of a function: its name, domain and answer.

    The answer of a hyper-parameter with a schedule is its value at epoch 0.
    """

    name: str
    domain: Any
    answer: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How thoroughly suggestions are looked for; each try runs the function.

    Attributes:
        most_values: The most values of a choice or a whole number that are all tried; of more, only
            some are, and no conditions on them are found.
        num_random: How often all answers are drawn at random in the end.
        tries_all: Whether also answers are changed that no condition can be on.
    """

    most_values: int = 64
    num_random: int = 64
    tries_all: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a function suggests.

    Attributes:
        runs: The suggestions of each run, in order.
        effort: How they were looked for.
        num_untried: The answers that were left when the time was over.
    """

    runs: tuple[tuple[Suggestion, ...], ...]
    effort: Effort
    num_untried: int = 0


_USUAL = Effort()

Run = Callable[..., Sequence[tuple[str, Any, Any]]]
"""Takes answers by name, and a function that answers for a domain where there is none."""


def explored(task: SelfDescribing) -> Space:
    """Return the space of a function; it runs in a process of its own.

    Raises:
        TaskError: The function fails before its loop, or has no loop.
        SpaceError: A name has different ranges for different answers.
    """
    if _IN_CHILD.is_set():
        raise UsageError(
            f"a process that runs {task.name} runs the whole file that defines it; put what "
            'uses the study under `if __name__ == "__main__":`'
        )
    found = _from_child(task)
    if found.num_untried:
        logger.warning(
            "%s was asked for its suggestions for %g s, and %d answers were not tried. A trial for "
            "which it suggests something else fails with a message; to avoid that, make what is "
            "slow after the suggestions, or give the study a space",
            task.name,
            _MAX_S,
            found.num_untried,
        )
    return space_of(found.runs, function=task.name, effort=found.effort)


def mark_child() -> None:
    """Record that this process looks for the suggestions of a function for another process."""
    _IN_CHILD.set()


_IN_CHILD = threading.Event()
_CHILD = "thrifty.integrations.functions._exploration_main"


def _from_child(task: SelfDescribing) -> Found:
    child = Child(_CHILD, preload=["torch", "thrifty.integrations.functions._trainable"])
    try:
        child.send(sys.path)
        child.send_bytes(_packed(task))
        is_said = False
        while True:
            if not wait_for([child], _PATIENCE_S) and not is_said:
                logger.info("waiting for %s to suggest its values", task.name)
                is_said = True
            for message in child.receive():
                if isinstance(message, Found):
                    return message
                raise TaskError(message)
    except ChildEndedError as error:
        raise TaskError(
            f"{task.name} ended its process before it trained ({error}); run it by itself to see "
            "why"
        ) from None
    finally:
        child.end()


def _packed(task: SelfDescribing) -> bytes:
    try:
        return pickled(task)
    except Exception as error:
        raise TaskError(
            f"{task.name} cannot be sent to the process that looks for what it suggests "
            f"({error_text(error)}): it uses an object that cannot be sent to "
            "another process. Make that "
            "in the function, or give the study a space"
        ) from error


# -- in the other process ------------------------------------------------------------------


def explore(
    run: Run, *, effort: Effort = _USUAL, clock: Callable[[], float] = time.monotonic
) -> Found:
    """Run a function with different answers until no new suggestions are found.

    First, one answer is changed at a time, from the first answers on; where that brings new
    suggestions, theirs are changed, too. Then, all answers are drawn at random some times, which
    finds what depends on several at once.

    Args:
        run: Runs the function with the given answers, and returns its suggestions; names that have
            none get the first of their domain.
        effort: How thoroughly it looks.
        clock: Returns seconds.

    Raises:
        Exception: The first run has failed. Later ones may fail: not all answers go together.
    """
    began = clock()
    first = _first(run)
    runs = {_key(first): first}
    known = {each.name for each in first}
    queue = _changes(first, only=known, effort=effort)
    rng = np.random.default_rng(0)
    num_random = effort.num_random if known else 0
    num_runs = 1
    while (queue or num_random) and num_runs < _MAX_RUNS and clock() - began < _MAX_S:
        if queue:
            answers = queue.pop(0)
        else:
            num_random -= 1
            answers = _drawn(runs.values(), rng)
        num_runs += 1
        try:
            found = _suggestions(run(answers))
        except Exception:  # noqa: BLE001 (user code may refuse some answers; a trial says so)
            continue
        if _key(found) in runs:
            continue
        runs[_key(found)] = found
        fresh = {each.name for each in found} - known
        known |= fresh
        queue += _changes(found, only=fresh, effort=effort)
    return Found(runs=tuple(runs.values()), effort=effort, num_untried=len(queue))


_NUM_FIRST = 20


def _first(run: Run) -> tuple[Suggestion, ...]:
    """Return the suggestions of the first answers that the function accepts.

    Raises:
        Exception: It accepts none of those that are tried: what it raised for the first.
    """
    try:
        return _suggestions(run({}))
    except TaskError:
        raise
    except Exception:
        rng = np.random.default_rng(0)
        for _ in range(_NUM_FIRST):
            with suppress(Exception):
                return _suggestions(run({}, partial(any_value, rng=rng)))
        raise


def _suggestions(asked: Iterable[tuple[str, Any, Any]]) -> tuple[Suggestion, ...]:
    return tuple(Suggestion(name=n, domain=d, answer=a) for n, d, a in asked)


def _key(run: Iterable[Suggestion]) -> Hashable:
    return tuple((each.name, repr(each.domain), repr(each.answer)) for each in run)


def _changes(run: Sequence[Suggestion], *, only: set[str], effort: Effort) -> list[dict[str, Any]]:
    """Return the answers of a run, with one of them changed at a time."""
    answers = {each.name: each.answer for each in run}
    return [
        {**answers, each.name: other}
        for each in run
        if each.name in only and (effort.tries_all or _decides(each.domain, effort))
        for other in _values(each.domain, effort)
        if repr(other) != repr(each.answer)
    ]


def _drawn(runs: Iterable[Sequence[Suggestion]], rng: np.random.Generator) -> dict[str, Any]:
    domains = {each.name: each.domain for run in runs for each in run}
    return {name: any_value(domain, rng=rng) for name, domain in domains.items()}


def any_value(domain: Any, *, rng: np.random.Generator) -> Any:
    """Return a random answer; of a schedule, a value at epoch 0."""
    if isinstance(domain, Float | Int):
        return domain.sample(rng)
    values = domain.options if _is_plain(domain) else _values(domain)
    return values[int(rng.integers(len(values)))]


def first_value(domain: Any) -> Any:
    """Return the answer that a function gets first; of a schedule, a value at epoch 0."""
    return _values(domain)[0]


def _is_plain(domain: Any) -> bool:
    """Return whether a domain is a choice of values that are no schedules or domains."""
    return isinstance(domain, Choice) and not is_scheduled(domain) and not _has_parts(domain)


def _values(domain: Any, effort: Effort = _USUAL) -> Sequence[Any]:
    """Return the answers to try."""
    if is_scheduled(domain) or (isinstance(domain, Choice) and _has_parts(domain)):
        options = domain.options if isinstance(domain, Choice) else (domain,)
        return [_at_first(option) for option in options]
    if isinstance(domain, Choice):
        options, most = domain.options, effort.most_values
        return options if len(options) <= most else (options[0], options[len(options) // 2])
    if isinstance(domain, Int):
        most = effort.most_values
        return domain.levels(most if domain.size() <= most else 5)
    if isinstance(domain, Float):
        return domain.levels(3)
    return [_at_first(domain)]


def _has_parts(domain: Choice) -> bool:
    return any(isinstance(option, Domain) for option in domain.options)


def _at_first(value: Any) -> Any:
    """Return a value at epoch 0 of a schedule, or of something that is drawn."""
    try:
        config = next(iter([Space(x=value).sample(np.random.default_rng(0))]))
        return Timeline(config, epochs=_MAX_RUNS).at(0)["x"]
    except (SpaceError, ValueError, TypeError, UsageError):
        return getattr(value, "value", 0.1) if isinstance(value, Schedule) else value


# -- the space -----------------------------------------------------------------------------


def space_of(
    runs: Sequence[Sequence[Suggestion]], *, function: str, effort: Effort = _USUAL
) -> Space:
    """Return the space of the suggestions of several runs.

    A hyper-parameter that is not suggested in each of them has the conditions under which it is: on
    one other, or on two. Where these do not suffice, it has none, and each trial draws a value for
    it, needed or not.

    Raises:
        SpaceError: A name has different ranges, or no run has suggested anything.
    """
    domains: dict[str, Any] = {}
    for run in runs:
        for each in run:
            if domains.setdefault(each.name, each.domain) != each.domain:
                raise SpaceError(
                    f"{function} suggests {each.name!r} from {domains[each.name]} for some answers "
                    f"and from {each.domain} for others; use one range, or one name for each"
                )
    if not domains:
        raise SpaceError(
            f"{function} suggests nothing before it trains; call trial.suggest_float(...) or "
            "another one there"
        )
    answers = [{each.name: each.answer for each in run} for run in runs]
    return Space(**{
        name: _with_conditions(domain, _conditions(name, answers, domains, effort=effort))
        for name, domain in domains.items()
    })


def _with_conditions(domain: Any, conditions: tuple[Condition, ...]) -> Any:
    if not conditions:
        return domain
    if not isinstance(domain, Float | Int | Choice):
        domain = Choice([domain])
    return replace(domain, conditions=conditions)


def _conditions(
    name: str, runs: Sequence[Mapping[str, Any]], domains: Mapping[str, Any], *, effort: Effort
) -> tuple[Condition, ...]:
    """Return when a name is suggested; empty if always, or if that cannot be said."""
    with_it = [run for run in runs if name in run]
    without = [run for run in runs if name not in run]
    if not without:
        return ()
    # Answers that came before decide; a dict keeps the order in which they were asked for.
    before = [list(run)[: list(run).index(name)] for run in with_it]
    parents = [
        each
        for each in before[0]
        if all(each in b for b in before) and _decides(domains[each], effort)
    ]
    parents.reverse()  # the nearest one first
    for num in (1, 2):
        for chosen in combinations(parents, num):
            values = {parent: _distinct(run[parent] for run in with_it) for parent in chosen}
            if not any(_holds(values, run) for run in without):
                return tuple(
                    Condition(
                        parent,
                        tuple(
                            v for v in _values(domains[parent], effort) if _in(v, values[parent])
                        ),
                    )
                    for parent in chosen
                )
    return ()


def _decides(domain: Any, effort: Effort) -> bool:
    """Return whether all values of a domain are tried, so that conditions on it can be found."""
    if isinstance(domain, Choice):
        return _is_plain(domain) and len(domain.options) <= effort.most_values
    return isinstance(domain, Int) and domain.size() <= effort.most_values


def _holds(values: Mapping[str, Sequence[Any]], run: Mapping[str, Any]) -> bool:
    """Return whether a run has these answers; one that lacks a parent is another branch."""
    return all(parent in run and _in(run[parent], found) for parent, found in values.items())


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({(type(value), value): value for value in values}.values())


def _in(value: Any, values: Iterable[Any]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)
