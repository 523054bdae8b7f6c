import numpy as np
import pytest

from bench.search.curves import MAX_EPOCHS
from bench.search.methods import TopAfterFirst, methods, pass_epochs
from bench.search.simulator import Found, Job, Limit, OurSearch, simulate
from thrifty.search import ASHA, BOHB, History, MedianStopping, RandomSearch, SuccessiveHalving

from ._toy import toy_task


pytestmark = pytest.mark.slow


R = MAX_EPOCHS
ALGORITHMS = (
    ASHA(max_epochs=R, num_trials=1000),
    SuccessiveHalving(max_epochs=R, num_trials=9),
    MedianStopping(max_epochs=R, num_trials=9),
    BOHB(max_epochs=R),
)


def jobs_of(algorithm, task, *, num_workers, limit):
    log = []
    outcome = simulate(
        OurSearch(algorithm, task, seed=1),
        task,
        num_workers=num_workers,
        limit=limit,
        on_job=lambda job, begin, end: log.append((job, begin, end)),
    )
    return outcome, log


class One:
    """Searcher that trains one row to the end, again and again."""

    def __init__(self, row):
        self.row = row

    def ask(self, num):
        return [Job(0, self.row, 0, R)] * num

    def tell(self, job):
        pass


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_workers", [1, 8])
def test_epochs_are_conserved(algorithm, num_workers):
    task, told = toy_task(diverging=5), []

    class Told(OurSearch):
        def tell(self, job):
            told.append(job)
            super().tell(job)

    search, asked = Told(algorithm, task, seed=1), []
    outcome = simulate(
        search,
        task,
        num_workers=num_workers,
        limit=Limit(seconds=60),
        on_job=lambda job, *_: asked.append(job),
    )
    assert outcome.epochs == sum(job.stop - job.start for job in told)
    assert outcome.jobs == len(asked)
    assert len(asked) - len(told) < num_workers  # jobs that ran at the end


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_more_jobs_at_once_than_workers(algorithm):
    _, log = jobs_of(algorithm, toy_task(), num_workers=8, limit=Limit(seconds=60))
    for _, begin, _ in log:
        assert sum(b <= begin < e for _, b, e in log) <= 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_job_takes_its_rows_time(algorithm):
    task = toy_task()
    _, log = jobs_of(algorithm, task, num_workers=8, limit=Limit(seconds=60))
    for job, begin, end in log:
        assert end - begin == pytest.approx((job.stop - job.start) * task.seconds[job.row])


def test_a_trial_goes_on_where_it_was():
    study = SuccessiveHalving(max_epochs=R, num_trials=27)
    _, log = jobs_of(study, toy_task(), num_workers=1, limit=Limit(seconds=0, epochs=81))
    reached = {}
    for job, _, _ in log:
        assert job.start == reached.get(job.trial, 0)
        reached[job.trial] = job.stop
    assert sorted(reached.values()) == [1] * 18 + [3] * 6 + [9] * 2 + [27]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_worker_is_a_plain_loop(algorithm):
    task = toy_task(diverging=5)
    search, queue, best, found = OurSearch(algorithm, task, seed=1), [], (0, -np.inf), []
    seconds, epochs = 0.0, 0
    while seconds < 200:
        queue = queue or list(search.ask(1))
        job = queue.pop(0)
        epochs += job.stop - job.start
        seconds += (job.stop - job.start) * task.epoch_seconds[job.row]
        search.tell(job)
        score = task.curves[job.row][job.stop - 1]
        if score > -np.inf and (job.stop, score) > best:
            best = (job.stop, score)
            found.append(Found(seconds, epochs, task.regrets[job.row]))
    outcome, _ = jobs_of(algorithm, task, num_workers=1, limit=Limit(seconds=200))
    assert (outcome.found, outcome.epochs) == (found, epochs)


def test_runs_until_both_limits_are_used_up():
    search = RandomSearch(max_epochs=R, num_trials=9)
    for limit in (Limit(seconds=1, epochs=200), Limit(seconds=500, epochs=1)):
        outcome, log = jobs_of(search, toy_task(), num_workers=1, limit=limit)
        assert outcome.epochs >= limit.epochs
        assert log[-1][2] >= limit.seconds


@pytest.mark.parametrize("num_workers", [1, 8, 32])
def test_random_search_keeps_everybody_busy(num_workers):
    search = RandomSearch(max_epochs=R, num_trials=1000)
    outcome, _ = jobs_of(search, toy_task(), num_workers=num_workers, limit=Limit(seconds=50))
    assert outcome.busy_seconds == pytest.approx(50 * num_workers)


def test_halving_does_not():
    search = SuccessiveHalving(max_epochs=R, num_trials=27)
    outcome, _ = jobs_of(search, toy_task(), num_workers=8, limit=Limit(seconds=50))
    assert outcome.busy_seconds < 0.7 * 50 * 8


def test_the_perfect_search_has_no_regret():
    task = toy_task()
    best = int(task.scores[:, -1].argmax())
    outcome = simulate(One(best), task, num_workers=1, limit=Limit(seconds=100))
    assert outcome.regret_at(seconds=100) == 0


def test_a_search_that_only_diverges_has_all_of_it():
    task = toy_task(diverging=1)
    outcome = simulate(One(0), task, num_workers=1, limit=Limit(seconds=100))
    assert outcome.regret_at(seconds=100) == 1


def test_before_anything_is_known_regret_is_the_medians():
    task = toy_task()
    outcome = simulate(One(3), task, num_workers=1, limit=Limit(seconds=100))
    assert outcome.regret_at(seconds=0) == outcome.regret_at(epochs=R - 1) == 1
    assert outcome.regret_at(epochs=R) == task.regrets[3]


def test_a_study_that_ends_is_followed_by_another():
    search = SuccessiveHalving(max_epochs=R, num_trials=3)
    outcome, log = jobs_of(search, toy_task(), num_workers=1, limit=Limit(seconds=0, epochs=200))
    assert outcome.epochs >= 200
    assert max(job.trial for job, _, _ in log) == 2
    assert len({job.row for job, _, _ in log}) > 3


def test_what_a_sampler_has_learnt_goes_with_it():
    search = OurSearch(BOHB(max_epochs=R), toy_task(diverging=5), seed=0)
    simulate(search, toy_task(diverging=5), num_workers=8, limit=Limit(seconds=200))
    assert isinstance(search._history, History)
    assert search._history.prior


def test_same_seed_same_search():
    limit = Limit(seconds=50)
    assert jobs_of(BOHB(max_epochs=R), toy_task(), num_workers=8, limit=limit) == jobs_of(
        BOHB(max_epochs=R), toy_task(), num_workers=8, limit=limit
    )


def test_top_after_first_keeps_the_best():
    search = TopAfterFirst(max_epochs=R, num_trials=27, num_kept=5)
    limit = Limit(seconds=0, epochs=27 + 5 * 26)
    task = toy_task(num=400)
    outcome, log = jobs_of(search, task, num_workers=1, limit=limit)
    assert outcome.epochs == limit.epochs
    first, kept = log[:27], log[27:]
    scores = sorted((task.curves[job.row][0] for job, _, _ in first), reverse=True)
    assert [task.curves[job.row][0] for job, _, _ in kept] == scores[:5]
    assert {(job.start, job.stop) for job, _, _ in kept} == {(1, R)}


def test_a_pass_of_hyperband():
    assert pass_epochs() == 357


@pytest.mark.parametrize("method", methods(), ids=lambda method: method.name)
def test_every_method_finds_something(method):
    task = toy_task(diverging=5)
    search = OurSearch(method.make(1), task, seed=0)
    limit = Limit(seconds=357 / 8)
    outcome = simulate(search, task, num_workers=8, limit=limit)
    assert outcome.regret_at(seconds=limit.seconds) < 1
