"""Conformance checks for search algorithms, also for those of third parties.

::

    @pytest.mark.parametrize("check", ALGORITHM_CHECKS)
    def test_mine(check):
        check(MyAlgorithm(max_epochs=27))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from thrifty.core import derive_seed
from thrifty.search import Algorithm, Decision, History, Proposal, Stop
from thrifty.space import Choice, Config, Float, Int, Space, Step, Timeline, common_prefix


MAX_ROUNDS = 20_000
"""Far more results than any test study needs: an algorithm that gets there never ends."""


def default_space() -> Space:
    """Return the small space that checks use by default; it has every kind of hyper-parameter."""
    return Space(
        lr=Float(0.01, 1.0, log=True),
        width=Int(1, 8),
        decay=Choice([0.0, Step(0.1, (1,))]),
        kind=Choice(["a", "b"]),
    )


def learning_curve(config: Config, *, epochs: int, max_epochs: int) -> list[float]:
    """Return a made-up curve that rises to at most 1, one score for each epoch.

    A score depends only on the values of the hyper-parameters up to its epoch, so trials that share
    a prefix share its scores, as in a real study.
    """
    timeline = Timeline(config, epochs=max_epochs)
    out, score = [], 0.0
    for epoch in range(epochs):
        values = repr(sorted(timeline.at(epoch).items()))
        speed = derive_seed(0, "speed", values) % 1000 / 2000
        score += (1.0 - score) * speed
        out.append(score)
    return out


@dataclass(frozen=True, slots=True)
class Scores:
    """Log entry of a trial that reached its target."""

    trial: int
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Log entry of a trial that did not reach its target."""

    trial: int


Entry = Proposal | Stop | Scores | Failure


class Check(Protocol):
    """A check that raises AssertionError if an algorithm does something wrong."""

    def __call__(self, algorithm: Algorithm, space: Space | None = None) -> None: ...

    __name__: str


class FakeStudy:
    """A study on made-up curves that drives an algorithm as a real study does.

    Workers finish in a random order. With probability ``failure_rate``, a result is a failure or a
    NaN score. ``offset`` is added to all scores. ``on_ask`` sees every answer (the study, the
    number of free workers, the decisions) before it is carried out. ``log`` has everything that
    happened.

    >>> from thrifty.search import SuccessiveHalving
    >>> study = FakeStudy(SuccessiveHalving(max_epochs=9, num_trials=9))
    >>> study.run()
    >>> sorted(trial.reached for trial in study.history)
    [1, 1, 1, 1, 1, 1, 3, 3, 9]
    """

    def __init__(
        self,
        algorithm: Algorithm,
        space: Space | None = None,
        *,
        num_workers: int = 1,
        failure_rate: float = 0.0,
        offset: float = 0.0,
        seed: int = 0,
        on_ask: Callable[[FakeStudy, int, Sequence[Decision]], None] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.space = space or default_space()
        self.history = History()
        self.log: list[Entry] = []
        self._num_workers = num_workers
        self._failure_rate = failure_rate
        self._offset = offset
        self._seed = seed
        self._on_ask = on_ask
        self._rng = np.random.default_rng(derive_seed(seed, "study"))

    def ask(self, *, num: int, history: History | None = None) -> list[Decision]:
        """Return the algorithm's decisions for the present history, or for another one.

        Random numbers come from the study's own stream.
        """
        history = self.history if history is None else history
        rng = np.random.default_rng(derive_seed(self._seed, "ask", history.num_decisions))
        return list(self.algorithm.ask(history, self.space, num=num, rng=rng))

    def run(self) -> None:
        """Run until the algorithm makes no more decisions."""
        queue: list[int] = []
        running: list[int] = []
        for _ in range(MAX_ROUNDS):
            while len(running) < self._num_workers:
                if not queue and not self._refill(queue, num=self._num_workers - len(running)):
                    break
                if queue:
                    running.append(queue.pop(0))
            if not running:
                return
            self._finish(running.pop(int(self._rng.integers(len(running)))))
        raise AssertionError(f"{self.algorithm} still goes on after {MAX_ROUNDS} results")

    def _refill(self, queue: list[int], *, num: int) -> bool:
        decisions = self.ask(num=num)
        if self._on_ask is not None:
            self._on_ask(self, num, decisions)
        for decision in decisions:
            number = self.history.record_decision(decision)
            self.log.append(decision)
            if isinstance(decision, Proposal):
                queue.append(number)
        return bool(decisions)

    def _finish(self, number: int) -> None:
        trial, fails = self.history[number], self._rng.random() < self._failure_rate
        if fails and self._rng.random() < 0.5:
            self.history.record_failure(number)
            self.log.append(Failure(number))
            return
        curve = learning_curve(
            trial.config, epochs=trial.target, max_epochs=self.algorithm.max_epochs
        )
        scores = [score + self._offset for score in curve]
        if fails:
            scores[-1] = math.nan
        self.history.record_scores(number, scores)
        self.log.append(Scores(number, tuple(scores)))


def replay(log: Sequence[Entry]) -> History:
    """Rebuild the history that a log describes."""
    history = History()
    for entry in log:
        if isinstance(entry, Scores):
            history.record_scores(entry.trial, entry.scores)
        elif isinstance(entry, Failure):
            history.record_failure(entry.trial)
        else:
            history.record_decision(entry)
    return history


def check_ends(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that a study ends and leaves no trial running.

    This must hold for any number of workers, also if trials fail.
    """
    for study in _studies(algorithm, space):
        study.run()
        assert len(study.history), "it proposed no trial at all"
        assert not study.history.num_running
        assert not study.ask(num=1), "it has more to say after the end"


def check_everything_fails(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that a study ends even if every trial fails."""
    study = FakeStudy(algorithm, space, num_workers=2, failure_rate=1.0)
    study.run()
    assert all(trial.state == "failed" for trial in study.history)


def check_decisions(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that decisions are about waiting trials, each once.

    Targets must grow and never exceed ``max_epochs``.
    """
    for study in _studies(algorithm, space, on_ask=_check_answer):
        study.run()


def check_pure(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that the algorithm answers the same if asked twice, or for a rebuilt history."""
    for study in _studies(algorithm, space, on_ask=_check_same_answer):
        study.run()


def check_same_seed(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that studies with the same seed take the same course."""
    for one, other in zip(_studies(algorithm, space), _studies(algorithm, space), strict=True):
        one.run()
        other.run()
        assert one.log == other.log


def check_any_sign(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that scores are only compared: negative ones (``mode="min"``) must change nothing."""
    for num_workers in (1, 4):
        studies = [
            FakeStudy(algorithm, space, num_workers=num_workers, offset=offset)
            for offset in (0.0, -8.0)
        ]
        for study in studies:
            study.run()
        one, other = (
            [entry for entry in study.log if isinstance(entry, Proposal | Stop)]
            for study in studies
        )
        assert one == other, "it decides differently where all scores are lower by the same amount"


def check_interrupted(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that a study whose record ends amid an answer goes on and ends.

    No trial may be left behind.
    """
    study = FakeStudy(algorithm, space, num_workers=2)
    study.run()
    rng = np.random.default_rng(0)
    for cut in rng.integers(1, len(study.log), size=8):
        resumed = FakeStudy(algorithm, space or study.space, on_ask=_check_answer)
        resumed.history = replay(study.log[:cut])
        for trial in list(resumed.history):
            if trial.state == "running":
                resumed._finish(trial.number)
        resumed.run()
        assert not resumed.history.num_running
        assert not resumed.ask(num=1), "it has more to say after the end"


def check_best_is_finished(algorithm: Algorithm, space: Space | None = None) -> None:
    """Check that the best trial is trained to the end if nothing fails and all curves rise.

    This holds for algorithms that only drop a trial for a better one. It is not part of
    ``ALGORITHM_CHECKS``.
    """
    for num_workers in (1, 4):
        study = FakeStudy(algorithm, space, num_workers=num_workers)
        study.run()
        best = max(trial.scores[-1] for trial in study.history)
        ends = [t.reached for t in study.history if t.scores[-1] == best]
        assert max(ends) == algorithm.max_epochs, f"the best trial stopped at {ends}"


ALGORITHM_CHECKS: tuple[Check, ...] = (
    check_ends,
    check_everything_fails,
    check_decisions,
    check_pure,
    check_same_seed,
    check_any_sign,
    check_interrupted,
)
"""Checks that any algorithm must pass; each takes the algorithm and, if needed, a space for it."""


def check_algorithm(algorithm: Algorithm, space: Space | None = None) -> None:
    """Run all of ``ALGORITHM_CHECKS``, one after the other."""
    for check in ALGORITHM_CHECKS:
        check(algorithm, space)


def _studies(
    algorithm: Algorithm,
    space: Space | None,
    *,
    on_ask: Callable[[FakeStudy, int, Sequence[Decision]], None] | None = None,
) -> list[FakeStudy]:
    space = space or default_space()
    return [
        FakeStudy(
            algorithm,
            space,
            num_workers=num_workers,
            failure_rate=failure_rate,
            seed=num_workers,
            on_ask=on_ask,
        )
        for num_workers in (1, 4)
        for failure_rate in (0.0, 0.3)
    ]


def _check_answer(
    study: FakeStudy,
    num: int,  # noqa: ARG001
    decisions: Sequence[Decision],
) -> None:
    history, most = study.history, study.algorithm.max_epochs
    seen: set[int] = set()
    for decision in decisions:
        if decision.trial is not None:
            assert decision.trial not in seen, f"two decisions about one trial: {decision}"
            seen.add(decision.trial)
            state = history[decision.trial].state
            assert state == "waiting", f"{decision} for a trial that is {state}"
        if isinstance(decision, Proposal):
            reached = 0 if decision.trial is None else history[decision.trial].reached
            assert reached < decision.target <= most, f"{decision}: reached {reached} of {most}"
            if decision.config is not None:
                _check_config(study, decision)


def _check_config(study: FakeStudy, proposal: Proposal) -> None:
    assert proposal.config is not None
    unknown = set(proposal.config) - set(study.space.names)
    assert not unknown, f"{sorted(unknown)} are not in the space"
    most = study.algorithm.max_epochs
    timeline = Timeline(proposal.config, epochs=most)
    if proposal.parent is not None:
        donor, epoch = proposal.parent
        before = study.history[donor]
        assert before.reached >= epoch > 0, (
            f"{proposal} branches off at an epoch that its parent has not reached"
        )
        assert not math.isinf(before.scores[epoch - 1])
        shared = common_prefix(timeline, Timeline(before.config, epochs=most))
        assert shared >= epoch, f"{proposal} differs from its parent at epoch {shared} already"


def _check_same_answer(study: FakeStudy, num: int, decisions: Sequence[Decision]) -> None:
    before = repr(study.algorithm)
    assert study.ask(num=num) == decisions, "asked twice, it answered differently"
    assert repr(study.algorithm) == before, "it keeps state on itself"
    if len(study.log) % 7 == 0 or len(study.log) < 20:  # each one would take quadratic time
        assert study.ask(num=num, history=replay(study.log)) == decisions, (
            "it answered differently to the same history, rebuilt"
        )
