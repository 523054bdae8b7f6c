"""Simulated workers report what real ones would, at the right time."""

from __future__ import annotations

import math
from collections import Counter
from heapq import heapify, heappop, heappush

import pytest
from hypothesis import given, settings, strategies as st

from thrifty.core import EpochDone, StageDone, StageFailed, StageStarted, UsageError
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment
from thrifty.run._simulated import Faults, Simulated, SimulatedWorker, Times, ValuesAt
from thrifty.space import MultiStep, Timeline
from thrifty.testing import LineTask


def outcome(timeline, epoch, seed):
    return {"score": float(epoch + seed)}


def opened(**options):
    given = {"workers": 1, "epoch_s": 10.0, "outcome": outcome}
    return Simulated(**{**given, **options}).open()


def assignment(number=0, *, stops=(3,), config=None, seed=0):
    starts = (0, *stops)
    stages = tuple(
        Stage(node=number, start=start, stop=stop)
        for start, stop in zip(starts, stops, strict=False)
    )
    timeline = Timeline(config or {"lr": 0.1}, epochs=100)
    return Assignment(number=number, chain=Chain(stages=stages, timeline=timeline), seed=seed)


def until_through(executor, *, num=1):
    """Return all reports until ``num`` assignments have ended, with the time of each."""
    out = []
    while sum(report.event is None for _, report in out) < num:
        for report in executor.poll(0.1):
            out.append((executor.clock.now(), report))
    return out


def shape(reports):
    return [(at, type(report.event).__name__) for at, report in reports]


def test_a_chain_is_reported_stage_by_stage_at_the_right_times():
    executor = opened(start_s=5.0, checkpoint_bytes=7)
    executor.submit(assignment(stops=(2, 3), seed=40))
    reports = until_through(executor)
    assert shape(reports) == [
        (5.0, "StageStarted"),
        (15.0, "EpochDone"),
        (25.0, "EpochDone"),
        (25.0, "StageDone"),
        (25.0, "StageStarted"),
        (35.0, "EpochDone"),
        (35.0, "StageDone"),
        (35.0, "NoneType"),
    ]
    assert reports[2][1].event.metrics == {"score": 42.0}
    kept = [r.event.checkpoint for _, r in reports if isinstance(r.event, StageDone)]
    assert [(ref.epoch, ref.num_bytes) for ref in kept] == [(2, 7), (3, 7)]
    assert executor.counts.busy_s == 35.0
    assert executor.counts.epochs == 3


def test_an_epoch_takes_what_its_values_say():
    executor = opened(epoch_s=lambda values: 1000.0 / values["batch"])
    config = {"batch": MultiStep([10, 100], milestones=[2])}
    executor.submit(assignment(config=config))
    ends = [at for at, r in until_through(executor) if isinstance(r.event, EpochDone)]
    assert ends == [100.0, 200.0, 210.0]


def test_values_of_an_epoch_are_those_of_its_timeline():
    timeline = Timeline({"batch": MultiStep([10, 100], milestones=[2]), "width": 4}, epochs=4)
    for epoch in range(4):
        values = ValuesAt(timeline, epoch)
        assert dict(values) == timeline.at(epoch)
        assert (len(values), repr(values)) == (2, repr(timeline.at(epoch)))
    assert values.get("depth", 7) == 7
    with pytest.raises(KeyError, match="depth"):
        values["depth"]


def test_a_worker_takes_one_assignment_at_a_time():
    executor = opened(workers=3)
    assert executor.num_free(pack_size=8) == 3
    executor.submit(assignment(0))
    executor.submit(assignment(1))
    assert executor.num_free() == 1
    until_through(executor, num=2)
    assert executor.num_free() == 3


@given(
    st.integers(1, 5),
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=12),
    st.floats(0.0, 3.0),
)
def test_many_chains_end_when_a_plain_list_of_workers_says(workers, lengths, start_s):
    executor = opened(workers=workers, start_s=start_s, epoch_s=1.0)
    waiting = [
        assignment(n, stops=tuple(sum(each[: i + 1]) for i in range(len(each))))
        for n, each in enumerate(lengths)
    ]
    ends, times = {}, []
    todo = list(waiting)
    while len(ends) < len(waiting):
        while todo and executor.num_free():
            executor.submit(todo.pop(0))
        for report in executor.poll(0.1):
            times.append(executor.clock.now())
            if report.event is None:
                ends[report.assignment] = executor.clock.now()
    assert times == sorted(times)
    free = [0.0] * workers
    heapify(free)
    for number, each in enumerate(lengths):
        end = heappop(free) + start_s + sum(each)
        assert ends[number] == pytest.approx(end)
        heappush(free, end)
    assert executor.counts.busy_s == pytest.approx(sum(start_s + sum(e) for e in lengths))


def test_what_a_failing_worker_trains_is_lost_back_to_the_last_stage():
    executor = opened(faults=Faults(mean_between_failures_s=500.0, repair_s=50.0), seed=0)
    executor.submit(assignment(stops=tuple(range(20, 1001, 20))))
    reports = until_through(executor)
    lost = reports[-2][1].event
    assert isinstance(lost, StageFailed)
    assert (lost.kind, lost.epoch) == ("lost", lost.start)
    kept = [r.event.stop for _, r in reports if isinstance(r.event, StageDone)]
    trained = [r.event.epoch for _, r in reports if isinstance(r.event, EpochDone)]
    assert max(trained) > lost.start == max(kept) > 0
    failed_at = executor.clock.now()
    assert executor.counts.failures == 1
    assert executor.counts.busy_s == failed_at
    assert executor.num_free() == 1  # all workers are gone, so time passes
    assert executor.clock.now() == failed_at + 50.0


def test_failures_come_as_often_as_they_are_said_to():
    executor = opened(workers=20, faults=Faults(mean_between_failures_s=100.0, repair_s=100.0))
    executor.submit(assignment(stops=(1000,), config={"lr": 0.1}))
    number = 1
    while executor.clock.now() < 10_000.0:
        if any(r.event is None for r in executor.poll(0.1)):
            executor.num_free()
            executor.submit(assignment(number, stops=(1000,)))
            number += 1
    # 20 workers, one failure in 200 s each, 10,000 s: 1000, within 4 sigma.
    assert executor.counts.failures == pytest.approx(1000, abs=4 * math.sqrt(1000))


def test_a_worker_that_is_back_is_worth_a_look():
    faults = Faults(mean_between_failures_s=1000.0, repair_s=1e-3)
    executor = opened(workers=2, faults=faults, epoch_s=1e9)
    executor.submit(assignment(0))
    executor.submit(assignment(1))
    until_through(executor)
    failed_at = executor.clock.now()
    assert executor.num_free() == 0
    assert executor.poll(0.1) == []
    assert executor.num_free() == 1
    assert executor.clock.now() == failed_at + 1e-3


def test_with_notice_the_state_at_the_end_of_the_epoch_is_kept():
    faults = Faults(mean_between_preemptions_s=100.0, notice_s=10.0, replace_s=30.0)
    executor = opened(faults=faults, seed=3)
    executor.submit(assignment(stops=(1000,)))
    reports = until_through(executor)
    done, through = (report.event for _, report in reports[-2:])
    assert isinstance(done, StageDone)
    assert done.checkpoint.epoch == done.stop == executor.counts.epochs < 1000
    assert through is None
    assert executor.counts.preemptions == 1
    ended = executor.clock.now()
    executor.num_free()
    # Preempted at most 10 s after the epoch's end, replaced 30 s later.
    assert ended + 30.0 <= executor.clock.now() <= ended + 40.0


def test_a_notice_shorter_than_the_epoch_loses_it():
    faults = Faults(mean_between_preemptions_s=100.0, notice_s=9.0)
    executor = opened(faults=faults, epoch_s=1e6)
    executor.submit(assignment())
    reports = until_through(executor)
    assert shape(reports)[1:] == [
        (executor.clock.now(), "StageFailed"),
        (executor.clock.now(), "NoneType"),
    ]
    assert reports[-2][1].event.kind == "evicted"
    assert executor.counts.busy_s == executor.clock.now() > 9.0


def test_a_worker_that_will_be_taken_gets_nothing_new():
    faults = Faults(mean_between_preemptions_s=1e-9, notice_s=100.0)
    executor = opened(workers=2, faults=faults)
    executor.submit(assignment(stops=(1,)))
    until_through(executor)
    assert executor.clock.now() == 10.0
    # Neither the busy worker nor the other one is available before it was replaced.
    executor.num_free()
    assert executor.clock.now() == pytest.approx(100.0)


def test_stopping_keeps_the_state_at_the_end_of_the_epoch():
    executor = opened(workers=2)
    executor.submit(assignment(0, stops=(50,)))
    executor.poll(0.1)
    executor.stop()
    executor.submit(assignment(1, stops=(1, 50)))
    reports = until_through(executor, num=2)
    kept = {r.assignment: r.event.stop for _, r in reports if isinstance(r.event, StageDone)}
    assert kept == {0: 1, 1: 1}
    assert not any(isinstance(r.event, StageStarted) and r.event.start for _, r in reports)
    assert executor.num_free() == 2


def test_nothing_happens_after_the_end():
    executor = opened()
    executor.submit(assignment())
    executor.close()
    assert executor.poll(0.1) == []


def test_stragglers_are_slow_all_of_the_time():
    faults = Faults(stragglers=0.3, slowdown=4.0)
    executor = opened(workers=200, faults=faults, seed=5)
    for number in range(200):
        executor.submit(assignment(number))
    reports = until_through(executor, num=200)
    seconds = {}
    for _, report in reports:
        if isinstance(report.event, EpochDone):
            seconds.setdefault(report.event.worker, set()).add(report.event.seconds)
    counted = Counter(value for (value,) in seconds.values())
    assert counted.keys() == {10.0, 40.0}
    assert counted[40.0] == Simulated(
        workers=200, epoch_s=1.0, outcome=outcome, faults=faults, seed=5
    ).slowdowns().count(4.0)
    assert 40 <= counted[40.0] <= 80


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 20))
def test_more_workers_change_nothing_for_those_that_were_there(seed, workers):
    faults = Faults(stragglers=0.5)
    few, many = (faults.slowdowns(n, seed=seed) for n in (workers, 2 * workers))
    assert many[:workers] == few


def test_failures_and_preemptions_of_each_worker_have_streams_of_their_own():
    faults = Faults(mean_between_failures_s=5.0, mean_between_preemptions_s=5.0)
    workers = [SimulatedWorker(n, slowdown=1.0, faults=faults, seed=0) for n in range(3)]
    gaps = {times.gap_s() for w in workers for times in (w.failures, w.preemptions)}
    assert len(gaps) == 6


def test_gaps_are_named_by_their_seed():
    assert Times(5.0, seed=1).gap_s() == Times(5.0, seed=1).gap_s() != Times(5.0, seed=2).gap_s()
    assert Times(math.inf, seed=1).gap_s() == math.inf


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean_between_failures_s": 0.0},
        {"mean_between_failures_s": math.nan},
        {"mean_between_preemptions_s": -1.0},
        {"repair_s": -1.0},
        {"notice_s": math.inf},
        {"replace_s": math.nan},
        {"stragglers": 1.5},
        {"stragglers": math.nan},
        {"slowdown": 0.5},
        {"slowdown": math.inf},
    ],
    ids=str,
)
def test_faults_that_make_no_sense(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Faults(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": 0},
        {"workers": 1.5},
        {"workers": True},
        {"epoch_s": 0.0},
        {"epoch_s": math.inf},
        {"start_s": -1.0},
        {"start_s": math.nan},
        {"checkpoint_bytes": -1},
    ],
    ids=str,
)
def test_options_that_make_no_sense(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        opened(**wrong)


def test_a_function_that_gives_no_time():
    executor = opened(epoch_s=lambda values: -1.0)
    executor.submit(assignment())
    with pytest.raises(UsageError, match=r"an epoch takes -1\.0 s"):
        executor.poll(0.1)


def test_a_real_task_is_refused():
    config = Simulated(workers=1, epoch_s=1.0, outcome=outcome)
    with pytest.raises(UsageError, match="train nothing"):
        config.open(LineTask(), checkpoints="", folder="")


def test_decisions_are_timed_from_asking_who_is_free():
    executor = opened(workers=2)
    executor.num_free()
    executor.submit(assignment(0))
    executor.num_free()
    executor.poll(0.1)  # one worker is free, and there is no work for it
    executor.submit(assignment(1))
    executor.num_free()  # no worker is free: nothing to decide
    executor.poll(0.1)
    assert len(executor.counts.decisions_s) == 2
    assert all(seconds >= 0 for seconds in executor.counts.decisions_s)
