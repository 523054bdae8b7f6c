import numpy as np
import pytest

from bench.search.peers import peers
from bench.search.report import SETTINGS, Measured, halves, interval, rank_rows, ranks
from bench.search.simulator import Limit, simulate

from ._toy import toy_task


def measured(*ends):
    """Return results on one task each, two repetitions around the given mean."""
    values = np.array([[[0.9, 0.9, end - 0.01], [0.9, 0.9, end + 0.01]] for end in ends])
    return Measured({SETTINGS[0]: values}, {}, {})


def test_ranks_are_of_means_and_ties_share():
    methods = [measured(0.1, 0.5), measured(0.2, 0.1), measured(0.2, 0.6)]
    assert ranks(methods, SETTINGS[:1]).tolist() == [[1, 2], [2.5, 1], [2.5, 3]]


def test_rank_rows_look_at_some_tasks_only():
    rows = rank_rows(["a", "b"], [measured(0.1, 0.5), measured(0.2, 0.1)], np.array([False, True]))
    assert [(row["method"], row["mean rank"]) for row in rows] == [("b", 1), ("a", 2)]
    assert rows[0]["mean regret"] == pytest.approx(0.1)


def test_interval_holds_the_mean():
    values = np.random.default_rng(0).random(50)
    low, high = interval(values)
    assert low < values.mean() < high
    assert interval(np.ones(5)) == [1, 1]


def test_halves_split_every_family():
    tasks = [toy_task(num=3)] * 9
    assert halves(tasks).sum() == 5


@pytest.mark.parametrize("peer", peers()[0], ids=lambda peer: peer.name)
@pytest.mark.filterwarnings("ignore")
def test_peers_search(peer):
    task = toy_task(diverging=5)
    log = []
    seconds = 15 if peer.slow else 100
    outcome = simulate(
        peer.make(task, 7),
        task,
        num_workers=4,
        limit=Limit(seconds=seconds),
        on_job=lambda job, *_: log.append(job),
    )
    assert outcome.found
    assert peer.slow or outcome.regret_at(seconds=seconds) < 1
    assert outcome.busy_seconds == pytest.approx(4 * seconds)
    assert all(job.stop > job.start for job in log)
    reached = {}
    for job in log:  # no epoch is trained twice, and none is left out
        assert job.start == reached.get(job.trial, 0)
        reached[job.trial] = job.stop
