"""Studies whose trials have horizons of their own: what they train, share, resume and show."""

from __future__ import annotations

import csv
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import thrifty as th
from tests.study.helpers import StopAfter, make_study, records, trained
from tests.study.processes import At, die, exit_code, started
from thrifty.cli import main
from thrifty.core import AlgorithmError, StudyMismatchError, TaskError
from thrifty.search import History, Proposal
from thrifty.space import Trunk
from thrifty.store import Store
from thrifty.study import _loop
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


HORIZONS = [2, 4, 6]
LADDER = {"horizons": HORIZONS, "rates": [0.1, 0.05], "cooldown": 1}
GRID = th.GridSearch(max_epochs=6)


class Averaging(LineTask):
    """A task that also averages its weights."""

    average = th.SWA()


def ladder_study(folder, *, shapes=("linear", "1-sqrt"), averages=(), **options) -> th.Study:
    space = th.Ladder(**LADDER, shapes=shapes, averages=averages)
    return make_study(folder, space=space, **{"algorithm": GRID, **options})


def test_sharing_changes_no_result(tmp_path):
    study = ladder_study(tmp_path)
    trained(study)
    for trial in study.trials:
        alone = make_study(
            tmp_path,
            space=th.Space(**trial.config),
            algorithm=th.GridSearch(max_epochs=trial.epochs),
            storage=f"sqlite:///{tmp_path}/{trial.number}.db",
        )
        trained(alone)
        assert alone.trials[0].curve == trial.curve
    assert [t.epochs for t in study.trials] == HORIZONS * 4
    assert {t.state for t in study.trials} == {"done"}


def test_a_ladder_trains_one_trunk_and_each_cooldown_once(tmp_path):
    study = ladder_study(tmp_path)
    forecast = study.plan()
    least = 2 * (5 + 2 * 3)  # for each rate: the trunk, and three cooldowns of two shapes
    assert (forecast.unique_epochs, forecast.trial_epochs, forecast.exact) == (least, 48, True)
    assert trained(study) == study.savings.unique_epochs == least
    assert study.savings.trial_epochs == 48


@pytest.mark.parametrize(("shapes", "units"), [(1, (55, 19)), (3, (165, 41))])
def test_the_arithmetic_of_ten_horizons(tmp_path, shapes, units):
    space = th.Ladder(
        horizons=[5 * unit for unit in range(1, 11)],
        rates=[0.1],
        shapes=["linear", "1-sqrt", "cosine"][:shapes],
    )
    found = make_study(tmp_path, space=space, algorithm=th.GridSearch(max_epochs=50)).plan()
    assert (found.trial_epochs / 5, found.unique_epochs / 5) == units


def test_a_ladder_that_was_stopped_goes_on_where_it_was(tmp_path):
    study = ladder_study(tmp_path)
    first = trained(study, observers=[StopAfter(7)])
    again = ladder_study(tmp_path)
    second = trained(again)
    assert 0 < first < 22
    assert first + second == 22
    assert trained(ladder_study(tmp_path)) == 0
    whole = ladder_study(tmp_path, storage=f"sqlite:///{tmp_path}/whole.db")
    trained(whole)
    assert [t.curve for t in again.trials] == [t.curve for t in whole.trials]


class Counting:
    """An observer that counts events."""

    events = 0

    def on_event(self, event) -> None:
        self.events += 1


def run_ladder(folder, observer) -> None:
    ladder_study(folder).run(progress=False, observers=[observer])


def run_to_be_killed(folder, observer) -> None:
    _loop.GROUP_S = 0.0  # what is trained is written at once, however short the run is
    run_ladder(folder, observer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_a_ladder_that_was_killed_leaves_the_same_records(tmp_path, share):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    count = Counting()
    run_ladder(tmp_path / "whole", count)
    child = started(run_to_be_killed, tmp_path / "killed", At(int(share * count.events), die))
    assert exit_code(child) == -signal.SIGKILL
    again = trained(ladder_study(tmp_path / "killed"))
    assert 0 < again < 22
    expected = records(ladder_study(tmp_path / "whole"))
    assert records(ladder_study(tmp_path / "killed")) == expected


class Stepped(LineTask):
    """A task whose epochs have two steps."""

    steps_per_epoch = 2


def test_horizons_in_steps_are_those_in_epochs(tmp_path):
    given = {
        "horizons": [th.steps(4), th.steps(8), th.steps(12)],
        "rates": [0.1],
        "cooldown": th.steps(2),
    }
    grid = th.GridSearch(max_epochs=th.steps(12))
    study = make_study(tmp_path, task=Stepped(), space=th.Ladder(**given), algorithm=grid)
    assert "16 unique steps" in str(study.plan())
    assert trained(study) == 8
    assert [t.epochs for t in study.trials] == HORIZONS


def test_random_search_follows_horizons(tmp_path):
    study = ladder_study(tmp_path, algorithm=th.RandomSearch(max_epochs=9, num_trials=8))
    trained(study)
    assert [t.epochs for t in study.trials] == [t.config["lr"].epochs for t in study.trials]
    assert {t.state for t in study.trials} == {"done"}


def test_averages_of_the_trunk_cost_nothing(tmp_path):
    plain = ladder_study(tmp_path, task=Averaging(), storage=f"sqlite:///{tmp_path}/plain.db")
    study = ladder_study(tmp_path, task=Averaging(), averages="swa")
    assert study.plan().unique_epochs == plain.plan().unique_epochs == 22
    assert trained(study) == 22
    free = [t for t in study.trials if isinstance(t.config["lr"], Trunk)]
    assert [t.epochs for t in free] == [2, 4, 2, 4]
    held = make_study(
        tmp_path,
        task=Averaging(),
        space=th.Space(lr=0.1),
        metric="swa_mse",
        algorithm=th.GridSearch(max_epochs=4),
        storage=f"sqlite:///{tmp_path}/held.db",
    )
    trained(held)
    assert held.trials[0].curve == free[1].curve


def test_averages_need_a_task_that_keeps_them(tmp_path):
    with pytest.raises(TaskError, match=r"'ema_mse'.*average = thrifty.EMA"):
        trained(ladder_study(tmp_path, task=Averaging(), averages="ema"))


@pytest.mark.parametrize(
    "algorithm",
    [
        th.ASHA(max_epochs=6, num_trials=4),
        th.Hyperband(max_epochs=6),
        th.SuccessiveHalving(max_epochs=6, num_trials=4),
        th.MedianStopping(max_epochs=6, num_trials=4),
        th.BOSS(max_epochs=6),
        th.WideBOSS(max_epochs=6),
        th.PopulationBasedTraining(max_epochs=6, population=4, interval=2, explore=("lr",)),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_algorithms_with_rungs_refuse_a_ladder(tmp_path, algorithm):
    with pytest.raises(AlgorithmError, match="end at horizons of their own"):
        ladder_study(tmp_path, algorithm=algorithm)
    with pytest.raises(AlgorithmError, match="end at horizons of their own"):
        th.simulate(algorithm, th.Ladder(**LADDER), workers=1, epoch_s=1.0)


def test_a_target_beyond_the_horizon_is_refused():
    history = History(max_epochs=9)
    with pytest.raises(
        AlgorithmError,
        match="asks for 5 epochs of trial 0, whose training ends at 4; lower the target",
    ):
        history.record_decision(Proposal(target=5, config={"lr": 0.1}, horizon=4))
    assert len(history) == history.num_decisions == 0


def test_a_simulation_ends_trials_at_their_horizons(tmp_path):
    found = ladder_study(tmp_path, task=Averaging(), averages="swa").simulate(
        workers=2, epoch_s=1.0
    )
    assert (found.trial_epochs, found.unique_epochs) == (48 + 12, 22)


def test_status_and_exports_say_that_trials_are_done(tmp_path, monkeypatch):
    study = ladder_study(tmp_path)
    trained(study)
    with Store.open(study.storage.url) as store:
        assert store.studies.summary("s").num_done == 12
    url, table = study.storage.url, str(tmp_path / "t.csv")
    monkeypatch.setattr(sys, "argv", ["thrifty", "export", "s", "--storage", url, "--csv", table])
    with suppress(SystemExit):
        main()
    rows = list(csv.DictReader(Path(table).read_text().splitlines()))
    assert [(row["state"], int(row["epochs"])) for row in rows] == [
        ("done", e) for e in HORIZONS
    ] * 4


def test_other_horizons_are_another_study(tmp_path):
    trained(ladder_study(tmp_path))
    other = make_study(
        tmp_path, space=th.Ladder(**{**LADDER, "horizons": [2, 4, 5]}), algorithm=GRID
    )
    with pytest.raises(StudyMismatchError, match="space was"):
        other.run(progress=False)
