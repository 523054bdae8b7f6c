"""What is known of a worker that has vanished."""

from __future__ import annotations

import pytest

from thrifty.core import EpochDone, StageDone, StageStarted
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, Report
from thrifty.run._executor import Seat
from thrifty.space import Timeline


STAGES = (
    Stage(node=0, start=0, stop=2),
    Stage(node=0, start=2, stop=4),
    Stage(node=3, start=4, stop=6),
)


def assignment(number=0):
    timeline = Timeline({"lr": 0.1}, epochs=6)
    return Assignment(
        number=number, chain=Chain(stages=STAGES, timeline=timeline, resume=None), seed=0
    )


def seat_with(*numbers):
    seat = Seat("w")
    for number in numbers:
        seat.take(assignment(number))
    return seat


def started(stage):
    return StageStarted(node=stage.node, start=stage.start, stop=stage.stop, worker="w")


def done(stage):
    return StageDone(node=stage.node, start=stage.start, stop=stage.stop, worker="w")


def epoch(node, number):
    return EpochDone(node=node, epoch=number, metrics={}, seconds=1.0, worker="w")


@pytest.mark.parametrize(
    ("heard", "at"),
    [
        ([], 0),
        ([started(STAGES[0])], 0),
        ([started(STAGES[0]), epoch(0, 1)], 0),
        ([epoch(0, 2)], 0),
        ([epoch(0, 3)], 1),
        ([epoch(0, 2), started(STAGES[1])], 1),
        ([epoch(0, 2), started(STAGES[1]), done(STAGES[0])], 1),
        ([started(STAGES[1]), epoch(0, 3)], 1),
        ([epoch(0, 4), started(STAGES[2]), epoch(3, 5)], 2),
        ([done(STAGES[1])], 2),
        ([done(STAGES[2])], 2),
    ],
)
def test_which_stage_it_was_at(heard, at):
    seat = seat_with(7)
    seat.note(Report(assignment=7, event=event) for event in heard)
    failed, last = seat.vanish("killed")
    stage = STAGES[at]
    assert (failed.event.node, failed.event.start, failed.event.stop) == (
        stage.node,
        stage.start,
        stage.stop,
    )
    assert failed.event.epoch == stage.start
    assert failed.event.kind == "lost"
    assert failed.event.worker == "w"
    assert "worker w ended unexpectedly (killed)" in failed.event.message
    assert last == Report(assignment=7)
    assert not seat.assignments


def test_each_assignment_is_remembered_by_itself():
    seat = seat_with(1, 2)
    seat.note([Report(assignment=1, event=started(STAGES[2]))])
    starts = {r.assignment: r.event.start for r in seat.vanish("killed") if r.event}
    assert starts == {1: 4, 2: 0}


def test_what_was_heard_of_another_assignment_of_that_number_is_forgotten():
    seat = seat_with(1)
    seat.note([Report(assignment=1, event=started(STAGES[2])), Report(assignment=1)])
    seat.take(assignment(1))
    assert seat.vanish("killed")[0].event.start == 0
    seat.take(assignment(1))
    seat.note([Report(assignment=1, event=started(STAGES[2]))])
    seat.clear()
    seat.take(assignment(1))
    assert seat.vanish("killed")[0].event.start == 0


def test_one_place_for_each_of_a_pack():
    seat = seat_with(1)
    assert seat.num_free(3) == 2
    assert seat.num_free(1) == 0
    seat.note([Report(assignment=1)])
    assert seat.num_free(1) == 1


def test_after_the_death_of_several_each_is_tried_alone():
    seat = seat_with(1, 2, 3)
    assert {r.event.kind for r in seat.vanish("killed") if r.event} == {"crowded"}
    free = []
    for number in (1, 2, 3):
        free.append(seat.num_free(3))
        seat.take(assignment(number))
        if number == 2:  # this one was at fault
            assert seat.vanish("killed")[0].event.kind == "lost"
        else:
            seat.note([Report(assignment=number)])
    assert [*free, seat.num_free(3)] == [1, 1, 1, 3]


@pytest.mark.parametrize("num", [1, 3])
def test_who_is_evicted_is_no_suspect(num):
    seat = seat_with(*range(num))
    assert {r.event.kind for r in seat.vanish("no power", evicted=True) if r.event} == {
        "evicted"
    }
    assert seat.num_free(3) == 3


def test_an_eviction_clears_no_suspect():
    seat = seat_with(1, 2)
    seat.vanish("killed")
    seat.take(assignment(1))
    seat.vanish("no power", evicted=True)
    for number in (1, 2):
        assert seat.num_free(3) == 1
        seat.take(assignment(number))
        seat.note([Report(assignment=number)])
    assert seat.num_free(3) == 3


def test_the_death_of_an_idle_worker_is_nobody_s_affair():
    seat = Seat("w")
    assert seat.vanish("killed") == []
    assert seat.num_free(3) == 3
