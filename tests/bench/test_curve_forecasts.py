"""Made-up curves, the calibration of the curve model, and the time of its decisions."""

import numpy as np
import pytest

from bench.search.curve_forecasts import AHEAD, calibration, decision_times
from bench.search.curves import MAX_EPOCHS
from bench.search.made_up_curves import FAMILIES, made_up, made_up_task


@pytest.mark.parametrize("family", FAMILIES)
def test_made_up_curves_improve_and_have_a_best(family):
    task = made_up_task(family, 0)
    final = task.scores[:, -1]
    finite = np.isfinite(final)
    assert task.scores.shape == (len(task.values), MAX_EPOCHS)
    assert finite.all() == (family != "divergence")
    assert np.median(final[finite]) > np.median(task.scores[finite, 0])
    assert min(task.regrets) == 0


def test_crossing_curves_cross():
    task = made_up_task("crossing", 1)
    first, last = task.scores[:, 0], task.scores[:, -1]
    assert np.corrcoef(first.argsort().argsort(), last.argsort().argsort())[0, 1] < 0


def test_tasks_for_development_and_for_judging_differ():
    names = [{task.name for task in made_up(judged=judged)} for judged in (False, True)]
    assert not names[0] & names[1]
    assert all(len(each) == 4 * len(FAMILIES) for each in names)


def test_calibration_counts_scores_within_intervals():
    rows = calibration([made_up_task("noisy", 1)], repeats=1)
    assert [row["ahead"] for row in rows] == [f"{times} x" for times in AHEAD]
    for row in rows:
        assert 0 <= row["50% interval"] <= row["90% interval"] <= 1
        assert row["mean deviation"] > 0


def test_decisions_are_timed():
    (row,) = decision_times([30])
    assert row["trials"] == 30
    assert 0 < row["later decisions [s], median"] <= row["later decisions [s], longest"]
