"""The work of all asks of a study grows linearly with its number of trials: counted, not timed."""

import sys

import numpy as np
import pytest

from bench.search.literal_sub_sampling import LiteralSubSampling
from thrifty.core import derive_seed
from thrifty.search import (
    ASHA,
    BOSS,
    CheckedASHA,
    CheckedBOSS,
    FixedWidthSubSampling,
    FreezeThaw,
    GridSearch,
    History,
    Hyperband,
    MedianStopping,
    PopulationBasedTraining,
    Proposal,
    QuantizedSampler,
    RandomSampler,
    RandomSearch,
    Sampler,
    StoppingASHA,
    SubSampling,
    SuccessiveHalving,
    WideBOSS,
)
from thrifty.space import Choice, Float, Int, Space


pytestmark = pytest.mark.slow


SPACE = Space(lr=Float(0.01, 1.0), width=Int(1, 10**6), kind=Choice(["a", "b"]))


class Cheap(Sampler):
    """Sampler of random draws that is asked as a model's sampler is."""

    adapts = True

    def __hash__(self):
        return 0

    def sample(self, history, space, *, num, rng):
        return RandomSampler().sample(history, space, num=num, rng=rng)


class Counted(History):
    """A history that returns its trials one by one, so that each one is counted."""

    def __iter__(self):
        for number in range(len(self)):
            yield self[number]


class Operations:
    """Counter of executed lines of Python, the rounds of comprehensions and generators included."""

    def __init__(self):
        self.num = 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._count)
        return self

    def __exit__(self, *exc):
        sys.settrace(self._before)

    def _count(self, frame, event, arg):
        self.num += 1
        return self._count


def num_operations(algorithm, *, workers=3):
    """Count the operations of all asks of a study, also those for which workers find no work."""
    history, rng, running = (Counted(max_epochs=algorithm.max_epochs), np.random.default_rng(0), [])
    operations = Operations()
    while True:
        seed = derive_seed(0, "ask", history.num_decisions)
        with operations:
            decisions = algorithm.ask(
                history, SPACE, num=max(workers - len(running), 1), rng=np.random.default_rng(seed)
            )
        for decision in decisions:
            number = history.record_decision(decision)
            if isinstance(decision, Proposal):
                running.append(number)
        if not running:
            return operations.num
        number = running.pop(int(rng.integers(min(workers, len(running)))))
        # There are many ties, as where trials share their training.
        scores = np.cumsum(rng.integers(0, 9, size=history[number].target) / 8)
        before = history[number].scores
        history.record_scores(number, [*before, *scores[len(before) :].tolist()])


ALGORITHMS = {
    "asha": lambda n: ASHA(max_epochs=9, num_trials=n),
    "checked rungs": lambda n: CheckedASHA(max_epochs=27, num_trials=n),
    "sub-sampling without rounds": lambda n: SubSampling(max_epochs=9, num_trials=n),
    "freeze-thaw": lambda n: FreezeThaw(max_epochs=9, num_trials=n),
    "asha that stops": lambda n: StoppingASHA(max_epochs=9, num_trials=n),
    "median": lambda n: MedianStopping(max_epochs=5, num_trials=n),
    "halving": lambda n: SuccessiveHalving(max_epochs=9, num_trials=n),
    "hyperband": lambda n: Hyperband(max_epochs=9, num_trials=n),
    "hyperband that learns": lambda n: Hyperband(max_epochs=9, num_trials=n, sampler=Cheap()),
    "boss": lambda n: BOSS(max_epochs=9, num_trials=n, sampler=RandomSampler()),
    "boss that learns": lambda n: BOSS(max_epochs=9, num_trials=n, sampler=Cheap()),
    "wide boss": lambda n: WideBOSS(max_epochs=9, num_trials=n, sampler=RandomSampler()),
    "wide boss that learns": lambda n: WideBOSS(max_epochs=9, num_trials=n, sampler=Cheap()),
    "checked rounds": lambda n: CheckedBOSS(max_epochs=9, num_trials=n, sampler=Cheap()),
    "rounds": lambda n: FixedWidthSubSampling(max_epochs=9, num_trials=n),
    "literal rounds": lambda n: LiteralSubSampling(max_epochs=9, num_trials=n),
    "population": lambda n: PopulationBasedTraining(
        max_epochs=6, population=n, interval=2, explore=("lr",)
    ),
    "random": lambda n: RandomSearch(max_epochs=9, num_trials=n, sampler=QuantizedSampler()),
    "grid": lambda n: GridSearch(max_epochs=9, levels=round((n / 2) ** 0.5)),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_twice_the_trials_are_twice_the_work(kind):
    few, many = (num_operations(ALGORITHMS[kind](n)) for n in (300, 600))
    assert many / few < 2.6
