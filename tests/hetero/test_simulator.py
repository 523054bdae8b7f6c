"""Simulated clusters advance time as specified."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from thrifty.core import HeteroError, TooFewWorkersError
from thrifty.hetero import Link, Load, Power, SimulatedWorker, StepCurve, simulate_job
from thrifty.hetero.balance._simulator import _pass, _stretch


ONE = SimulatedWorker(name="one", curve=StepCurve(sample_s=1.0))
TWO = SimulatedWorker(name="two", curve=StepCurve(sample_s=1.0))


def test_equal_workers_halve_the_time():
    assert simulate_job([ONE], batch=10, num_steps=4).seconds == 40.0
    assert simulate_job([ONE, TWO], batch=10, num_steps=4).seconds == 20.0


def test_the_ring_is_paid_for_at_each_step():
    link = Link(bytes_per_s=10.0, latency_s=0.5)
    run = simulate_job([ONE, TWO], batch=10, num_steps=4, link=link, gradient_bytes=20.0)
    assert run.seconds == 4 * (5.0 + 2 * (0.5 + 1.0))
    assert link.all_reduce_s(num_bytes=20.0, nodes=1) == 0.0


def test_a_trace_stretches_one_step_each():
    worker = SimulatedWorker(name="one", curve=StepCurve(sample_s=1.0), slowness=[1.0, 3.0])
    run = simulate_job([worker], batch=2, num_steps=3)
    assert [step.end_s for step in run.steps] == [2.0, 8.0, 10.0]


def test_a_load_counts_from_its_first_second_to_its_last():
    run = simulate_job(
        [ONE],
        batch=10,
        num_steps=2,
        loads=[Load(worker="one", begin_s=4.0, end_s=8.0, slowness=2.0)],
    )
    # The first step: 4 s at full speed, 4 s at half the speed, 4 s at full speed.
    assert [step.end_s for step in run.steps] == [12.0, 22.0]


@given(
    loads=st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(1, 8)).map(
            lambda t: Load(worker="one", begin_s=min(t[:2]), end_s=max(t[:2]), slowness=t[2])
        ),
        max_size=4,
    ),
    begin=st.floats(0, 40),
    work=st.floats(0.1, 40),
)
def test_passing_time_equals_small_steps(loads, begin, work):
    """Passed time equals the sum of the work in many short moments."""
    took = _pass(_stretch("one", loads), begin, work)
    moments = 4000
    length = took / moments
    done = sum(
        length
        / math.prod(
            load.slowness
            for load in loads
            if load.begin_s <= begin + (at + 0.5) * length < load.end_s
        )
        for at in range(moments)
    )
    # A moment that contains a change counts entirely before or after it.
    assert done == pytest.approx(work, rel=1e-3, abs=2 * len(loads) * length)


def test_the_split_follows_a_load_and_returns():
    loads = [Load(worker="two", begin_s=100.0, end_s=300.0, slowness=4.0)]
    run = simulate_job([ONE, TWO], batch=20, num_steps=60, loads=loads)
    reasons = [step.change.reason for step in run.steps if step.change]
    assert reasons == ["slower", "faster"]
    assert run.steps[-1].sizes == (10, 10)


def test_a_death_costs_its_step_and_a_newcomer_its_state():
    dying = SimulatedWorker(name="two", curve=StepCurve(sample_s=1.0), dies_s=12.0)
    late = SimulatedWorker(name="late", curve=StepCurve(sample_s=1.0), joins_s=25.0)
    run = simulate_job(
        [ONE, dying, late],
        batch=10,
        num_steps=5,
        detect_s=3.0,
        link=Link(bytes_per_s=2.0),
        state_bytes=8.0,
    )
    assert run.lost_steps == 1
    assert run.samples == 50
    # Two steps of two workers; a lost step and 3 s until it is noticed (15 s in all, including both
    # dates); one step alone; the state transfer in 4 s; two steps of two workers.
    assert [step.end_s for step in run.steps] == [5.0, 10.0, 25.0, 34.0, 39.0]
    assert [step.names for step in run.steps][-1] == ("one", "late")


def test_energy_is_of_waiting_and_of_working():
    watts = Power(idle_w=1.0, busy_w=3.0)
    fast = SimulatedWorker(name="fast", curve=StepCurve(sample_s=1.0), power=watts)
    slow = SimulatedWorker(name="slow", curve=StepCurve(sample_s=1.0, fixed_s=100.0), power=watts)
    run = simulate_job([fast, slow], batch=10, num_steps=2)
    assert run.steps[0].sizes == (10, 0)
    assert run.joules == 2 * (10 * 3.0 + 10 * 1.0)
    assert run.joules_per_sample == 4.0
    assert run.samples_per_s == 1.0


def test_all_dead():
    dying = SimulatedWorker(name="one", curve=StepCurve(sample_s=1.0), dies_s=12.0)
    with pytest.raises(TooFewWorkersError, match="after 1 steps all simulated workers"):
        simulate_job([dying], batch=10, num_steps=5)


def test_it_begins_when_the_first_worker_comes():
    late = SimulatedWorker(name="late", curve=StepCurve(sample_s=1.0), joins_s=7.0)
    assert simulate_job([late], batch=1, num_steps=1).seconds == 8.0


def test_what_makes_no_cluster():
    with pytest.raises(HeteroError, match="at least one worker"):
        simulate_job([], batch=1, num_steps=1)
    with pytest.raises(HeteroError, match="unique"):
        simulate_job([ONE, ONE], batch=1, num_steps=1)
    with pytest.raises(HeteroError, match=r"loads on \['three'\]"):
        simulate_job(
            [ONE],
            batch=1,
            num_steps=1,
            loads=[Load(worker="three", begin_s=0, end_s=1, slowness=2)],
        )
