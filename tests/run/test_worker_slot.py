"""What is known of a worker that has vanished."""

from __future__ import annotations

import pytest

from thrifty.core import EpochDone, StageDone, StageStarted
from thrifty.plan import Chain, Stage
from thrifty.run import Assignment, Report
from thrifty.run._executor import WorkerSlot
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


def slot_with(*numbers):
    slot = WorkerSlot("w")
    for number in numbers:
        slot.take(assignment(number))
    return slot


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
    slot = slot_with(7)
    slot.note(Report(assignment=7, event=event) for event in heard)
    failed, last = slot.vanish("killed")
    stage = STAGES[at]
    assert (failed.event.node, failed.event.start, failed.event.stop) == (
        stage.node,
        stage.start,
        stage.stop,
    )
    assert failed.event.epoch == stage.start
    heard_last = heard[-1] if heard else None
    is_epoch = isinstance(heard_last, EpochDone)
    assert failed.event.reached == (heard_last.epoch if is_epoch else stage.start)
    assert failed.event.kind == "lost"
    assert failed.event.worker == "w"
    assert "worker w ended unexpectedly (killed)" in failed.event.message
    assert last == Report(assignment=7)
    assert not slot.assignments


def test_each_assignment_is_remembered_by_itself():
    slot = slot_with(1, 2)
    slot.note([Report(assignment=1, event=started(STAGES[2]))])
    starts = {r.assignment: r.event.start for r in slot.vanish("killed") if r.event}
    assert starts == {1: 4, 2: 0}


def test_what_was_heard_of_another_assignment_of_that_number_is_forgotten():
    slot = slot_with(1)
    slot.note([Report(assignment=1, event=started(STAGES[2])), Report(assignment=1)])
    slot.take(assignment(1))
    assert slot.vanish("killed")[0].event.start == 0
    slot.take(assignment(1))
    slot.note([Report(assignment=1, event=started(STAGES[2]))])
    slot.clear()
    slot.take(assignment(1))
    assert slot.vanish("killed")[0].event.start == 0


def test_one_place_for_each_of_a_pack():
    slot = slot_with(1)
    assert slot.num_free(3) == 2
    assert slot.num_free(1) == 0
    slot.note([Report(assignment=1)])
    assert slot.num_free(1) == 1


def test_after_the_death_of_several_each_is_tried_alone():
    slot = slot_with(1, 2, 3)
    assert {r.event.kind for r in slot.vanish("killed") if r.event} == {"crowded"}
    free = []
    for number in (1, 2, 3):
        free.append(slot.num_free(3))
        slot.take(assignment(number))
        if number == 2:  # this one was at fault
            assert slot.vanish("killed")[0].event.kind == "lost"
        else:
            slot.note([Report(assignment=number)])
    assert [*free, slot.num_free(3)] == [1, 1, 1, 3]


@pytest.mark.parametrize("num", [1, 3])
def test_who_is_evicted_is_no_suspect(num):
    slot = slot_with(*range(num))
    assert {r.event.kind for r in slot.vanish("no power", evicted=True) if r.event} == {"evicted"}
    assert slot.num_free(3) == 3


def test_an_eviction_clears_no_suspect():
    slot = slot_with(1, 2)
    slot.vanish("killed")
    slot.take(assignment(1))
    slot.vanish("no power", evicted=True)
    for number in (1, 2):
        assert slot.num_free(3) == 1
        slot.take(assignment(number))
        slot.note([Report(assignment=number)])
    assert slot.num_free(3) == 3


def test_the_death_of_an_idle_worker_is_nobody_s_affair():
    slot = WorkerSlot("w")
    assert slot.vanish("killed") == []
    assert slot.num_free(3) == 3
