"""A study that is killed and run again leaves the same records as an undisturbed one."""

from __future__ import annotations

import signal
from collections import Counter

import numpy as np
import pytest

from tests.depth import draws
from tests.study.helpers import make_study, records
from tests.study.processes import At, die, exit_code, started
from thrifty.core import EpochDone
from thrifty.run import Local
from thrifty.search import ASHA, SuccessiveHalving
from thrifty.store import Store


pytestmark = pytest.mark.slow


ALGORITHMS = {
    "halving": SuccessiveHalving(max_epochs=6, num_trials=12, eta=2),
    "asha": ASHA(max_epochs=6, num_trials=12, eta=2),
}


class Count:
    def __init__(self) -> None:
        self.events = 0
        self.trained: Counter[tuple[int, int]] = Counter()

    def on_event(self, event) -> None:
        self.events += 1
        if isinstance(event, EpochDone):
            self.trained[event.node, event.epoch] += 1


def run(folder, algorithm, observer=None) -> None:
    observers = [] if observer is None else [observer]
    # An asynchronous algorithm's decisions depend on which trial ends first, so only one at a time
    # is reproducible.
    size = 1 if isinstance(algorithm, ASHA) else 3
    make_study(folder, algorithm=algorithm).run(
        progress=False, observers=observers, executor=Local(pack="concatenated", pack_size=size)
    )


def killed_at_event(folder, algorithm, count) -> None:
    child = started(run, folder, algorithm, At(count, die))
    assert exit_code(child) == -signal.SIGKILL


def killed_after(folder, algorithm, seconds) -> None:
    """Kill the study after some seconds: during training, writing a checkpoint, or a commit."""
    child = started(run, folder, algorithm)
    child.join(timeout=seconds)
    child.kill()
    child.join()


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def undisturbed(request, tmp_path_factory):
    """Return the algorithm, the records of an undisturbed run, and its number of events."""
    folder = tmp_path_factory.mktemp("left-alone")
    count = Count()
    run(folder, ALGORITHMS[request.param], count)
    return ALGORITHMS[request.param], records(make_study(folder)), count.events


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(draws(2, 5)))
def test_killed_at_a_random_event(tmp_path, undisturbed, seed):
    algorithm, expected, num_events = undisturbed
    rng = np.random.default_rng(seed)
    killed_at_event(tmp_path, algorithm, int(rng.integers(1, num_events // 2)))
    killed_at_event(tmp_path, algorithm, int(rng.integers(1, num_events // 4)))
    run(tmp_path, algorithm)
    assert records(make_study(tmp_path)) == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(draws(4, 10)))
def test_killed_at_a_random_moment(tmp_path, undisturbed, seed):
    algorithm, expected, _ = undisturbed
    killed_after(tmp_path, algorithm, np.random.default_rng(seed).uniform(0.0, 0.8))
    run(tmp_path, algorithm)
    assert records(make_study(tmp_path)) == expected


def test_at_most_what_was_running_is_trained_again(tmp_path, undisturbed):
    algorithm, _, num_events = undisturbed
    killed_at_event(tmp_path, algorithm, num_events // 2)
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        kept = {(e.node, e.epoch) for e in store.plans.load(1).epochs}
        states = {(c.node, c.epoch) for c in store.plans.load(1).checkpoints}
    count = Count()
    run(tmp_path, algorithm, count)
    again = {key for key in count.trained if key in kept}
    # An epoch is trained again only if it comes after the last kept checkpoint of its node.
    for node, epoch in again:
        assert epoch > max((e for n, e in states if n == node), default=0)
    assert set(count.trained.values()) == {1}
