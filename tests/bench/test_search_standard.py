from dataclasses import replace

import numpy as np
import pytest

from bench.search.measuring import Kept, Unit, limit, measuring
from bench.search.report import SHARES
from bench.search.rung_orders import rung_orders
from bench.search.standard import (
    AUTO,
    EFFORTS,
    Regrets,
    by_setting,
    difference_rows,
    gaps,
    goals,
    lead,
    on_all_tasks,
    on_few_tasks,
    rank_lead,
    rows,
    single_ranks,
    slow_lead,
    slow_rows,
    units,
)

from ._toy import toy_task


TASKS = [replace(toy_task(num=num), name=f"toy {num}") for num in (20, 30, 40)]


def regrets(*ends, tasks=(0, 1, 2), repeats=2):
    """Return regrets that are 1 until the end, by task, equal in all repetitions."""
    values = np.ones((len(tasks), repeats, len(SHARES)))
    values[:, :, -1] = np.array(ends)[:, None]
    return Regrets(tasks, values, ms=1.0)


def studies(*ends):
    """Return one task's regrets at the end by repetition."""
    values = np.ones((1, len(ends), len(SHARES)))
    values[0, :, -1] = ends
    return Regrets((0,), values, ms=1.0)


def test_ranks_of_single_studies_use_repetitions_again():
    found = single_ranks([studies(0.1, 0.3), studies(0.2)])
    assert found.ravel().tolist() == [1.5, 1.5]


def test_ranks_of_single_studies_share_ties():
    assert single_ranks([studies(0.1), studies(0.1), studies(0.0)]).ravel().tolist() == [
        2.5,
        2.5,
        1,
    ]


def test_a_lead_is_sure_only_where_the_whole_interval_is():
    everywhere = np.ones(3, dtype=bool)
    better = {AUTO: regrets(0.4, 0.5, 0.6), "ASHA": regrets(0.3, 0.4, 0.5)}
    assert lead(better, everywhere) == (0.1, "ASHA", 1.0)
    mixed = {AUTO: regrets(0.4, 0.5, 0.6), "ASHA": regrets(0.2, 0.7, 0.5)}
    assert lead(mixed, everywhere).amount <= 0
    assert rank_lead(better).amount == 1


def test_gaps_name_the_best_of_a_family():
    here = {AUTO: regrets(0.4, 0.5, 0.6), "ASHA": regrets(0.3, 0.4, 0.5)}
    gap = gaps(here, TASKS)["toy"]
    assert (gap.best, gap.amount) == ("ASHA", pytest.approx(0.1))
    assert gaps({AUTO: regrets(0, 0, 0), "ASHA": regrets(1, 1, 1)}, TASKS)["toy"].best == AUTO


def test_slow_methods_are_compared_on_their_own_tasks():
    here = {AUTO: regrets(0.1, 0.5, 0.6), "Optuna GP": regrets(0.2, tasks=(0,))}
    assert list(on_all_tasks(here)) == [AUTO]
    slow = on_few_tasks(here)
    (row,) = slow_rows(slow, "1 worker, epochs")
    assert row["tasks"] == 1
    assert (row["Auto"], row["minus Auto"]) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (row["mean rank"], row["Auto's rank"]) == (2, 1)
    assert slow_lead(slow).amount == pytest.approx(-0.1)
    assert slow_lead({}) is None


def test_rows_are_ordered_by_rank_and_compare_with_auto():
    here = {AUTO: regrets(0.4, 0.5, 0.6), "ASHA": regrets(0.3, 0.4, 0.5)}
    first, second = rows(here, TASKS)
    assert (first["method"], second["method"]) == ("ASHA", AUTO)
    assert first["minus Auto"] == pytest.approx(-0.1)
    assert second["minus Auto"] is None
    assert first["crossing"] is None


def test_units_are_slowest_first_and_leave_out_what_is_not_installed():
    found = units([AUTO, "freeze-thaw", "ASHA"], TASKS, most=2)
    assert found[0].method == "freeze-thaw"
    assert found[0].num_workers == 32
    assert {unit.repeats for unit in found if unit.method == AUTO} == {2}
    assert len(found) == 27
    assert all(unit.in_epochs for unit in found)


def test_units_of_some_workers_with_more_repetitions():
    found = units([AUTO, "freeze-thaw"], TASKS, repetitions=10, workers=[1])
    assert {(unit.method, unit.repeats) for unit in found} == {(AUTO, 10), ("freeze-thaw", 1)}
    assert {unit.num_workers for unit in found} == {1}


def test_differences_by_group_of_tasks_have_intervals():
    here = {AUTO: regrets(0.4, 0.5, 0.6), "ASHA": regrets(0.3, 0.4, 0.5)}
    crossing = replace(TASKS[2], family="made up: crossing", name="crossing")
    real, made, everything = difference_rows(here, [*TASKS[:2], crossing])
    assert (real["tasks"], made["tasks"]) == ("2 real", "1 crossing")
    assert everything["minus Auto"] == "ASHA"
    assert everything["100%"] == "-0.100 (-0.100 - -0.100)"
    assert everything["10%"] == "0.000 (0.000 - 0.000)"


def test_every_method_of_the_standard_run_gets_something():
    assert all(any(effort.repeats for effort in efforts) for efforts in EFFORTS.values())


def test_epochs_of_the_limit_are_those_of_busy_workers():
    assert limit(8).epochs == 0
    assert limit(8, in_epochs=True).epochs == limit(1).epochs
    assert limit(32, in_epochs=True).epochs == 4 * limit(1).epochs


@pytest.mark.slow
def test_a_run_goes_on_from_its_file(tmp_path, capsys):
    wanted = [Unit("ASHA", w, t, 2, in_epochs=True) for w in (1, 8, 32) for t in range(3)]
    wanted += [wanted_unit._replace(method=AUTO) for wanted_unit in wanted]
    file = tmp_path / "kept.jsonl"
    with measuring(TASKS, 1, kept=Kept(file)) as measure_all:
        first = measure_all(wanted[:7])
    with file.open("a") as lines:
        lines.write('{"unit": ["half a line')
    kept = Kept(file)
    with measuring(TASKS, 1, kept=kept) as measure_all:
        found = measure_all(wanted)
    assert "7 of 18 units are known" in capsys.readouterr().out
    assert kept.earlier_seconds() > 0
    assert {m.unit for m in found} == set(wanted)
    known = {m.unit: m for m in found}
    assert all(np.array_equal(known[m.unit].by_time, m.by_time) for m in first)
    settings = by_setting(found)
    assert list(settings)[:3] == ["1 worker, epochs", "1 worker, seconds", "8 workers, epochs"]
    assert all(goal.name for goal in goals(settings, TASKS))
    one_worker = [m for m in found if m.unit.num_workers == 1]
    assert list(by_setting(one_worker)) == ["1 worker, epochs", "1 worker, seconds"]


@pytest.mark.slow
def test_early_scores_of_rising_curves_predict_later_ones():
    (row,) = rung_orders([toy_task(num=200)], repeats=1)
    assert row["family"] == "toy"
    assert row["50 %"] == 1
