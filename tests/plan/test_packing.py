from __future__ import annotations

import pytest

from tests.plan._drive import Driver
from thrifty.perf import PackCurve
from thrifty.plan import Measured, SearchPlan, pack_size
from thrifty.space import Constant, Timeline


FAST = (
    PackCurve(backend="solo", step_s={1: 1.0}),
    PackCurve(backend="fused", step_s={1: 1.2, 4: 1.6, 16: 3.2}),
)
SLOW = (
    PackCurve(backend="solo", step_s={1: 1.0}),
    PackCurve(backend="fused", step_s={1: 3.0, 4: 12.0}),
)


def plan_of(*schedules, epochs=12):
    plan = SearchPlan()
    for trial, schedule in enumerate(schedules):
        node = plan.insert(Timeline({"lr": schedule}, epochs=epochs))
        plan.request(trial, node, epochs)
    return plan


def size(plan, *each, **options):
    return pack_size(plan, [Measured(curves=curves) for curves in each], **options)


def siblings(num):
    return plan_of(*[Constant(1.0 + k) for k in range(num)])


def test_nothing_measured():
    assert size(siblings(20)) == 1


def test_many_siblings_are_packed_as_is_best():
    assert size(siblings(64), FAST) == 16


def test_no_fewer_than_there_are_if_all_gain():
    assert size(siblings(3), FAST) >= 3


def test_a_chain_is_not_packed():
    assert size(plan_of(Constant(1.0)), FAST) == 1


def test_one_long_path_beside_short_ones_keeps_packs_small():
    plan = SearchPlan()
    for trial, epochs in enumerate([200, *[1] * 20]):
        node = plan.insert(Timeline({"lr": Constant(1.0 + trial)}, epochs=200))
        plan.request(trial, node, epochs)
    assert size(plan, FAST) < size(siblings(64), FAST)


def test_where_packs_are_slower_there_are_none():
    assert size(siblings(64), SLOW) == 1


def test_the_structure_that_gains_most_decides():
    assert size(siblings(64), SLOW, FAST) == 16


def test_more_workers_share_the_siblings():
    assert size(siblings(16), FAST, workers=8) < size(siblings(16), FAST)


def test_nothing_left_to_do():
    plan = siblings(8)
    Driver(plan).run()
    assert size(plan, FAST) == 1


def test_what_is_running_counts():
    plan = siblings(1)
    chain = plan.next_chain()
    assert size(plan, FAST, running=[chain]) == 1


@pytest.mark.parametrize(("room", "largest"), [(1600.0, 16), (450.0, 4), (10.0, 1)])
def test_memory_limits_a_pack(room, largest):
    fused = PackCurve(
        backend="fused",
        step_s={1: 1.2, 4: 1.6, 16: 3.2},
        memory_bytes={1: 100.0, 4: 400.0, 16: 1600.0},
    )
    measured = Measured(curves=(fused,), memory_bytes=room)
    assert pack_size(siblings(64), [measured], memory_margin=1.0) == largest
