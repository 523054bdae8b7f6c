"""Jobs with limits, and choices that are judged by known step times."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from bench.cloud.choices import Choice, Knowledge, judged, planner, summary
from bench.cloud.choices_peers import cheapest_listed
from bench.cloud.choices_report import nearly_true, rehearsed
from bench.cloud.clusters import CLUSTERS, Row
from bench.cloud.jobs import SETUP_S, Truth, drawn, true_s
from thrifty.cloud import NetworkPriors


pytestmark = pytest.mark.slow


SPEED = {"aws": 1.0, "azure": 2.0, "dgx": 4.0, "rtx": 1.5}


def rows():
    """Return steps that wait for nothing: a hundredth of a second a sample, by a GPU's speed."""
    return [
        Row(
            cluster=cluster,
            app="bert",
            placement=(per_node,) * nodes,
            batch=batch,
            step_s=0.01 * batch / SPEED[cluster],
        )
        for cluster, per_node, nodes, batch in product(CLUSTERS, (1, 2, 4), (1, 2, 4), (4, 8, 16))
    ]


@pytest.fixture(scope="module")
def jobs():
    return drawn(Truth(rows()), num=16, seed=0)


def best(job):
    return Choice(place=job.by_forecast(true_s(job)))


def test_steps_between_measured_ones_are_interpolated():
    found = {
        (each.cluster, each.per_node, each.nodes): each
        for each in Truth(rows()).candidates("bert", 36)
    }
    assert found["aws", 1, 3].batch == 12
    exponent = math.log(12 / 8) / math.log(2)
    assert found["aws", 1, 3].step_s == pytest.approx(0.08 * 2**exponent)


def test_candidates_have_a_measured_batch():
    for batch in (32, 64, 128):
        sizes = [each.batch for each in Truth(rows()).candidates("bert", batch)]
        assert sizes
        assert 4 <= min(sizes) <= max(sizes) <= 16


def test_a_limit_can_be_met_and_rules_something_out(jobs):
    for job in jobs:
        bound, aim = job.bound_and_aim(true_s(job))
        assert bound.min() < job.limit < bound[np.argmin(aim)]


def test_deadlines_and_budgets_and_profiles_go_in_turn(jobs):
    assert {(job.profiled, job.deadline_s is None) for job in jobs} == set(
        product(CLUSTERS, (True, False))
    )


def test_a_deadline_bounds_time_and_a_budget_dollars(jobs):
    job = replace(jobs[0], deadline_s=3600.0, budget_usd=None)
    time_s, usd = job.bound_and_aim(true_s(job))
    assert time_s[0] == pytest.approx(SETUP_S + job.steps * job.candidates[0].step_s)
    assert usd[0] == pytest.approx(time_s[0] / 3600 * job.candidates[0].usd_h)
    job = replace(job, deadline_s=None, budget_usd=1.0)
    assert job.bound_and_aim(true_s(job))[0] == pytest.approx(usd)


def test_who_knows_the_truth_has_no_regret_and_misses_nothing(jobs):
    found = summary(judged(jobs, best))
    assert found["regret, mean %"] == 0
    assert found["deadlines missed %"] == found["budgets missed %"] == 0
    assert found["met, within 5 % of the best, %"] == 100


def test_a_miss_for_less_is_a_miss_without_regret(jobs):
    deadlines = [job for job in jobs if job.deadline_s is not None]
    found = judged(deadlines, cheapest_listed)
    assert any(row["missed"] for row in found)
    assert min(row["regret"] for row in found) == 0


def test_a_planner_that_is_nearly_right_chooses_nearly_the_best(jobs):
    fast = NetworkPriors(tcp_share=1e6, tcp_gbps=1e6, fabric_share=1e6, pcie_gb_s=1e6)
    known = Knowledge(rows(), priors=dict.fromkeys(CLUSTERS, fast), speeds={})
    found = summary(judged(jobs, planner(known.each_gpu, conservative=False)))
    assert found["regret, median %"] < 5


@pytest.mark.parametrize("way", ["shipped", "left_out", "each_gpu"])
def test_a_plan_is_one_of_the_candidates(jobs, way):
    priors = dict.fromkeys(CLUSTERS, NetworkPriors())
    views = getattr(Knowledge(rows(), priors=priors, speeds={"T4": 0.4}), way)
    for job in jobs:
        assert 0 <= planner(views)(job).place < len(job.candidates)


def test_a_plan_that_was_not_measured_is_an_error(jobs):
    known = Knowledge(rows(), priors=dict.fromkeys(CLUSTERS, NetworkPriors()), speeds={})
    few = replace(
        jobs[0],
        candidates=tuple(replace(each, batch=each.batch + 1) for each in jobs[0].candidates),
    )
    with pytest.raises(LookupError, match="none of the measured ones"):
        planner(known.each_gpu)(few)


def test_a_margin_is_the_least_that_suffices_for_the_other_applications(jobs):
    both = [*jobs, *(replace(job, app="other") for job in jobs)]
    exact = rehearsed(lambda margin: nearly_true(0.0, margin=margin), both, risk=0.0)
    assert exact == {"bert": 1.0, "other": 1.0}
    assert rehearsed(too_short, both, risk=0.0) == {"bert": 1.3, "other": 1.3}


def too_short(margin):
    """Return choices by times that are a quarter too short."""
    return lambda job: Choice(place=job.by_forecast(true_s(job) / 1.25, margin=margin))
