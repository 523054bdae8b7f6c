"""The invariant that users trust: sharing never changes the answer."""

from __future__ import annotations

import operator
import tempfile
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from tests import alone
from tests.depth import draws
from tests.study.helpers import WIDE, make_study
from thrifty.core import EpochDone
from thrifty.run import Local
from thrifty.search import (
    ASHA,
    GridSampler,
    GridSearch,
    Hyperband,
    MedianStopping,
    PopulationBasedTraining,
    QuantizedSampler,
    RandomSearch,
    SuccessiveHalving,
)
from thrifty.space import Choice, Cosine, Float, Space, Step
from thrifty.study._reader import Reader
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


ALGORITHMS = [
    GridSearch(max_epochs=6),
    RandomSearch(max_epochs=6, num_trials=8),
    RandomSearch(max_epochs=6, num_trials=8, sampler=QuantizedSampler(levels=2)),
    SuccessiveHalving(max_epochs=6, num_trials=9, eta=2, sampler=GridSampler()),
    Hyperband(max_epochs=6, eta=2),
    ASHA(max_epochs=6, num_trials=9, eta=2),
    MedianStopping(max_epochs=6, num_trials=6),
]
POPULATION = PopulationBasedTraining(
    max_epochs=6, population=4, interval=2, explore=("lr",), quantile=0.5
)
SPACES = [
    WIDE,
    Space(lr=Step(Choice([0.1, 0.05]), [Choice([2, 3.5])]), width=Choice([0, 3])),
    Space(lr=Float(0.01, 0.1, log=True), width=Choice([0, 3])),
]


SOLO = Local(pack="solo")


def nearly(found, wanted) -> bool:
    return found == pytest.approx(wanted, rel=1e-3, abs=1e-5)


class Counting:
    """Observer that counts how often each epoch of each node is trained."""

    def __init__(self) -> None:
        self.trained: Counter[tuple[int, int]] = Counter()

    def on_event(self, event) -> None:
        if isinstance(event, EpochDone):
            self.trained[event.node, event.epoch] += 1


def check(algorithm, space, seed, *, executor=SOLO, same=operator.eq) -> None:
    counting = Counting()
    with tempfile.TemporaryDirectory() as folder:
        study = make_study(folder, space=space, algorithm=algorithm, seed=seed)
        study.run(progress=False, observers=[counting], executor=executor)
        assert set(counting.trained.values()) == {1}
        assert sum(counting.trained.values()) == study.savings.unique_epochs
        assert study.trials
        for trial in study.trials:
            metrics = alone.train(
                LineTask(), trial.config, epochs=trial.epochs, run_epochs=6, seed=seed
            )
            assert same(trial.curve, tuple(m["mse"] for m in metrics))


@given(st.sampled_from(ALGORITHMS), st.sampled_from(SPACES), st.integers(0, 1000))
@settings(max_examples=draws(8, 25), deadline=None)
def test_shared_trials_equal_trials_alone_bit_for_bit(algorithm, space, seed):
    check(algorithm, space, seed)


@given(st.integers(0, 1000))
@settings(max_examples=draws(3, 10), deadline=None)
def test_branches_of_a_population_equal_trials_alone(seed):
    check(POPULATION, Space(lr=Float(0.01, 0.2, log=True), width=Choice([0, 3])), seed)


@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from(SPACES),
    st.integers(0, 1000),
    st.sampled_from([2, 5]),
)
@settings(max_examples=draws(4, 15), deadline=None)
def test_concatenated_trials_equal_trials_alone_bit_for_bit(algorithm, space, seed, size):
    check(algorithm, space, seed, executor=Local(pack="concatenated", pack_size=size))


@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from(SPACES),
    st.integers(0, 1000),
    st.sampled_from([1, 3, 7]),
)
@settings(max_examples=draws(4, 15), deadline=None)
def test_fused_trials_equal_trials_alone_up_to_rounding(algorithm, space, seed, size):
    check(algorithm, space, seed, executor=Local(pack="fused", pack_size=size), same=nearly)


def test_studies_that_train_for_longer_or_shorter_share_what_is_the_same(tmp_path):
    space = Space(lr=Choice([0.1, Cosine(0.1), Step(0.1, [2])]))
    for name, epochs in (("a", 6), ("b", 4), ("c", 6), ("d", 8), ("e", 4)):
        study = make_study(
            tmp_path, space=space, algorithm=GridSearch(max_epochs=epochs), name=name
        )
        study.run(progress=False, executor=SOLO)
        study._reader = Reader()  # as another process would read it
        for trial in study.trials:
            metrics = alone.train(
                LineTask(), trial.config, epochs=epochs, run_epochs=epochs, seed=0
            )
            assert trial.curve == tuple(m["mse"] for m in metrics)
    # All of it was requested before.
    assert study._current_ledger().epochs.num_trained == 0
