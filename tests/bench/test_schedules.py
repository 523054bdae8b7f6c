"""The bench of schedules: targets, costs, and when a search has found what it looks for."""

import numpy as np
import pytest

from bench import bench_schedules
from bench.schedules.samplers import NUM_TRIALS, SAMPLERS, costs_of_sharing
from bench.schedules.searches import OWN_BUDGETS, Found, algorithms, ended, optuna, ours, ray_asha
from bench.schedules.workloads import Table, Workload, key_of, workloads


@pytest.fixture(scope="module")
def table():
    """Return a table of made-up curves: the rate decides, and each later drop is better."""
    workload = Workload(space_name="WSD", is_tuning=False, seed=0, epochs=9)
    curves = {}
    for config in workload.space().grid():
        schedule = config["lr"]
        values = [schedule.values(e, e + 1, epochs=9, steps_per_epoch=1)[0] for e in range(9)]
        distance = abs(np.log10(schedule.value / 0.05))
        curves[key_of(config)] = tuple(
            float(1.0 + distance + 1.0 / (e + 1) + values[e]) for e in range(9)
        )
    return Table(workload=workload, curves=curves, unique_epochs=210, seconds=1.0)


@pytest.mark.parametrize("name", algorithms(9, 3))
def test_our_searches_pay_for_unique_epochs_until_they_have_found_the_best(table, name):
    found = ours(name, table, regret=0.0, order=0)
    assert found.is_found or name == "Hyperband"
    assert 9 <= found.epochs <= table.unique_epochs
    assert found.seconds == found.epochs


@pytest.mark.parametrize("name", OWN_BUDGETS)
def test_our_searches_end_by_themselves(table, name):
    found = ended(name, table, order=0, workers=2)
    assert 9 <= found.epochs < table.unique_epochs
    assert 0.0 <= found.regret <= 1.0


def test_samplers_are_compared_with_themselves_without_sharing(table, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "TPE", {0: SAMPLERS["TPE"][0]})
    rows = costs_of_sharing([table], orders=1)
    assert len(rows) == len(NUM_TRIALS) * sum(len(each) for each in SAMPLERS.values())
    for row in rows:
        if not row["share"]:
            assert row["more regret"] == "0.000 (0.000 - 0.000)"
            assert row["epochs saved"] == "0.0% (0.0% - 0.0%)"


def test_peers_pay_for_all_epochs_of_each_trial(table):
    whole = 9 * len(table.curves)
    for found in (
        optuna("halving", table, regret=0.0, order=0),
        ray_asha(table, regret=0.0, order=0),
    ):
        assert 9 <= found.epochs < whole + 9


def test_easier_targets_are_found_no_later(table):
    for name in ("ASHA", "freeze-thaw"):
        epochs = [ours(name, table, regret=r, order=1).epochs for r in (0.0, 0.1, 1.0)]
        assert epochs == sorted(epochs, reverse=True)


def test_regrets_of_the_best_and_the_median(table):
    assert table.target(0.0) == table.ends[0]
    assert table.regret(table.ends[0]) == 0.0
    assert table.regret(table.target(1.0)) == pytest.approx(1.0)
    assert table.regret(99.0) == 1.0


def test_search_without_success_costs_the_grid_too():
    found = [Found(5, 5.0, True), Found(7, 7.0, False)]
    assert bench_schedules._costs(found, [100, 100]).tolist() == [5, 107]


def test_order_changes_the_order_of_options_alone():
    for workload in workloads(is_tuning=True, seeds=1, quick=True):
        first, second = (
            [key_of(config) for config in workload.space(order).grid()] for order in (None, 3)
        )
        assert first != second
        assert sorted(first) == sorted(second)
