"""How workers meet, and how late ones catch up."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.hetero.memberships import ThreadCluster
from thrifty.core import PeerLostError
from thrifty.hetero import Power, StepCurve, WorkerView
from thrifty.hetero._job import WorkerInfo
from thrifty.hetero.workers._group import WorkerGroup


class Counter:
    """A job that knows its number of steps."""

    def __init__(self, steps=0, value=0.0):
        self.steps, self.value = steps, value

    def state(self):
        return {"steps": self.steps, "value": torch.tensor(self.value)}

    def load_state(self, state):
        self.steps, self.value = state["steps"], state["value"].item()


def info(speed=1.0, new=True):
    return WorkerInfo(
        curve=StepCurve(sample_s=speed), num_private=0, power=Power(idle_w=0.0, busy_w=0.0), new=new
    )


def crew(members, job):
    return WorkerGroup(members, job, device=torch.device("cpu"))


def test_before_a_meeting_nobody_is_known():
    alone = crew(None, Counter())
    assert not alone.met
    assert alone.is_due(10)
    with pytest.raises(AssertionError, match="the workers have not met"):
        _ = alone.view


def test_workers_tell_each_other_of_themselves():
    def job(speed):
        def run(members):
            return crew(members, Counter()).meet(lambda: info(speed))

        return run

    done = ThreadCluster().run({"a": job(1.0), "b": job(2.0), "c": job(3.0)})
    assert all(told == (info(1.0), info(2.0), info(3.0)) for told in done.values())


@pytest.mark.parametrize("new", [True, False])
def test_those_behind_get_the_state_of_who_is_furthest(new):
    def job(steps):
        def run(members):
            counter = Counter(steps, value=10.0 * steps)
            crew(members, counter).meet(lambda: info(new=new))
            return counter.steps, counter.value

        return run

    done = ThreadCluster().run({"a": job(3), "b": job(7), "c": job(0)})
    assert set(done.values()) == {(7, 70.0)}


def test_newcomers_get_the_state_of_the_others_at_the_same_step():
    """All workers are at step 0, but only one of them has the right weights."""

    def job(value):
        def run(members):
            counter = Counter(0, value)
            crew(members, counter).meet(lambda: info(new=True))
            return counter.value

        return run

    assert ThreadCluster().run({"a": job(1.0), "b": job(2.0)}) == {"a": 1.0, "b": 1.0}


def test_who_knows_each_other_is_not_asked_again():
    def job(members):
        asked = []

        def me():
            asked.append(1)
            return info()

        mine = crew(members, Counter())
        first, again = mine.meet(me), mine.meet(me)
        return len(first), again, len(asked)

    assert set(ThreadCluster().run({"a": job, "b": job}).values()) == {(2, None, 1)}


def test_meetings_are_due_now_and_then():
    counter = Counter()

    def job(members):
        mine = crew(members, counter)
        mine.meet(info)
        due = []
        for counter.steps in range(7):
            due.append(mine.is_due(3))
            if due[-1]:
                mine.meet(info)
                assert not mine.is_due(3)
        return due

    due = ThreadCluster().run({"a": job})["a"]
    assert due == [False, False, False, True, False, False, True]


def test_who_is_lost_while_workers_meet_is_not_waited_for(caplog):
    """One of two workers leaves before it has sent anything."""

    class Members:
        def __init__(self):
            self.asked = []

        def agree(self, *, step, broken=False):
            self.asked.append(broken)
            names = ("a",) if broken else ("a", "b")
            return WorkerView(
                generation=len(self.asked), rank=0, names=names, steps=(0,) * len(names)
            )

        def all_reduce(self, tensor):
            if tensor.shape[0] > 1:
                raise PeerLostError("b is gone")

    members = Members()
    alone = crew(members, Counter())
    with caplog.at_level(logging.WARNING):
        assert len(alone.meet(info)) == 1
    assert members.asked == [False, True]
    assert alone.view.names == ("a",)
    assert "while workers met: b is gone" in caplog.text
