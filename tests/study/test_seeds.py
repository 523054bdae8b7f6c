"""Several seeds for each configuration: replicas, their means, and what they share."""

from __future__ import annotations

import math
from statistics import mean, stdev

import pytest
from torch import nn

import thrifty as th
from tests.depth import draws
from tests.study.helpers import StopAfter, make_study, trained
from thrifty.core import StudyMismatchError, ThriftyError, UsageError, replica_seed
from thrifty.store import Store
from thrifty.store.queries import Views
from thrifty.study import Storage
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


SPACE = th.Space(lr=th.Choice([0.1, 0.05, th.Step(0.1, [2])]))
GRID = th.GridSearch(max_epochs=4)
HALVING = th.SuccessiveHalving(max_epochs=4, num_trials=6, eta=2)


def seeded(folder, *, seeds: int = 3, algorithm=GRID, space=SPACE, **options) -> th.Study:
    return make_study(folder, space=space, algorithm=algorithm, seeds=seeds, **options)


class RefusesHalf(LineTask):
    """A task that cannot train a model that begins with a positive slope."""

    def model(self, hp):
        model = super().model(hp)
        if model.weight.item() > 0:
            raise ValueError("a positive slope")
        return model


class DivergesHalf(LineTask):
    """A task whose metric is not finite for a model that ends above a threshold."""

    def metrics(self, model, batch):
        mse = super().metrics(model, batch)["mse"]
        return {"mse": math.nan if mse > 0.1 else mse}


def test_each_replica_is_what_a_study_of_its_seed_trains(tmp_path):
    study = seeded(tmp_path)
    trained(study)
    for replica in range(3):
        alone = seeded(
            tmp_path,
            seeds=1,
            seed=replica_seed(0, replica),
            storage=f"sqlite:///{tmp_path}/r.db",
            name=f"r{replica}",
        )
        trained(alone)
        assert [t.curve for t in alone.trials] == [t.curves[replica] for t in study.trials]


def test_packed_replicas_are_those_trained_alone_up_to_rounding(tmp_path):
    alone, packed = seeded(tmp_path / "a"), seeded(tmp_path / "p")
    trained(alone)
    packed.run(progress=False, executor=th.Local(pack="fused", pack_size=9))
    assert packed.savings.packed_epochs > 0
    for one, other in zip(alone.trials, packed.trials, strict=True):
        for a, b in zip(one.curves, other.curves, strict=True):
            assert b == pytest.approx(a, rel=1e-4)


def test_a_trial_reports_mean_deviation_and_number_of_its_seeds(tmp_path):
    study = seeded(tmp_path)
    trained(study)
    for trial in study.trials:
        last = [curve[-1] for curve in trial.curves]
        assert trial.num_seeds == 3
        assert len(set(last)) == 3
        assert trial.value == pytest.approx(mean(last))
        assert trial.sd == pytest.approx(stdev(last))
        low, high = trial.interval
        assert (low + high) / 2 == pytest.approx(trial.value)
        assert high - low == pytest.approx(2 * 4.303 * stdev(last) / math.sqrt(3))
    frame = study.trials_dataframe()
    assert list(frame["sd"]) == [trial.sd for trial in study.trials]
    assert "sd over 3 seeds" in study.trials[0]._repr_html_()


def test_a_study_of_one_seed_says_nothing_of_seeds(tmp_path):
    study = seeded(tmp_path, seeds=1)
    trained(study)
    trial = study.best_trial
    assert (trial.num_seeds, trial.sd, trial.interval, trial.certainty) == (1, None, None, None)
    assert trial.curves == (trial.curve,)
    assert "sd" not in study.trials_dataframe()
    assert "seeds" not in study._repository().recipe.spec()


def test_a_study_of_the_first_seed_is_reused(tmp_path):
    first = trained(seeded(tmp_path, seeds=1, name="one"))
    three = seeded(tmp_path, seeds=3, name="three")
    assert (three.plan().known_epochs, three.plan().unique_epochs) == (first, 3 * first)
    assert trained(three) == 2 * first
    assert trained(seeded(tmp_path, seeds=2, name="two")) == 0


def test_the_plan_counts_each_seed(tmp_path):
    study = seeded(tmp_path)
    foreseen = study.plan()
    assert foreseen.exact
    trained(study)
    assert study.savings.unique_epochs == foreseen.unique_epochs == 30
    assert study.savings.trial_epochs == foreseen.trial_epochs == 36
    assert study.plan().known_epochs == 30


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", [GRID, HALVING], ids=["grid", "halving"])
def test_a_study_stopped_between_replicas_goes_on_where_it_was(tmp_path, algorithm):
    whole, broken = (seeded(tmp_path / name, algorithm=algorithm) for name in ("whole", "broken"))
    num = trained(whole)
    counts = []
    while not counts or counts[-1]:
        broken = seeded(tmp_path / "broken", algorithm=algorithm)
        counts.append(trained(broken, observers=[StopAfter(5)]))
    assert sum(counts) == num
    assert len(counts) > 3
    assert [t.curves for t in broken.trials] == [t.curves for t in whole.trials]
    assert [t.state for t in broken.trials] == [t.state for t in whole.trials]


def test_a_trial_fails_if_one_of_its_seeds_does(tmp_path, caplog):
    study = seeded(tmp_path, task=RefusesHalf(), seeds=4, seed=1)
    trained(study)
    assert "no trial" not in caplog.text  # its other seeds fail with it
    assert [trial.state for trial in study.trials] == ["failed"] * 3
    assert all("a positive slope" in trial.error for trial in study.trials)
    assert study.run(progress=False).trials[0].error == study.trials[0].error


def test_a_diverged_seed_is_counted_in_the_error(tmp_path):
    study = seeded(tmp_path, task=DivergesHalf())
    trained(study)
    errors = {trial.error for trial in study.trials}
    assert "mse is nan after epoch 4 (1 of 3 seeds)" in errors


def test_the_database_has_the_means(tmp_path):
    study = seeded(tmp_path)
    trained(study)
    with Store.open(study.storage.url) as store:
        info = store.studies.get("s")
        curves = store.studies.curves(info.id, "mse")
        summary = store.studies.summary("s")
    for trial in study.trials:
        assert curves[trial.number] == pytest.approx(trial.curve)
    assert summary.best_value == study.best_trial.value


def test_other_studies_keep_the_states_of_all_replicas(tmp_path):
    study = seeded(tmp_path, algorithm=HALVING)
    trained(study, observers=[StopAfter(30)])
    ledger = study._current_ledger()
    with Store.open(study.storage.url) as store:
        places = store.plans.standing(ledger.plan_id, but=-1)
        ends = store.plans.ends(ledger.plan_id, but=-1)
    assert set(ledger.live()) <= set(places)
    assert {place for place in places if place[1]} <= ends
    assert len({node for node, _ in places}) % 3 == 0


def test_two_studies_share_what_a_shared_plan_knows(tmp_path):
    storage = Storage(url=f"sqlite:///{tmp_path}/t.db", shared=True)
    one = seeded(tmp_path, storage=storage, name="one")
    num = trained(one)
    two = seeded(tmp_path, storage=storage, name="two")
    assert num
    assert trained(two) == 0
    assert [t.curves for t in two.trials] == [t.curves for t in one.trials]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2), (1, 3)])
def test_another_number_of_seeds_needs_another_name(tmp_path, before, now):
    num = trained(seeded(tmp_path, seeds=before)) // before
    with pytest.raises(StudyMismatchError, match=f"seeds was {before} and is {now}.*another name"):
        seeded(tmp_path, seeds=now).run(progress=False)
    assert trained(seeded(tmp_path, seeds=now, name="other")) == max(now - before, 0) * num


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (0, "seeds is 0; it must be from 1"),
        (1001, "1 to 1,000"),
        (True, "an integer"),
        ([1, 2], "the number of seeds"),
    ],
)
def test_seeds_is_a_number_from_1(tmp_path, seeds, message):
    with pytest.raises(UsageError, match=message):
        seeded(tmp_path, seeds=seeds)


def test_the_model_of_each_seed_is_loaded(tmp_path):
    study = seeded(tmp_path)
    trained(study)
    best = study.best_trial
    x, y = LineTask().data(None).valid
    for replica, curve in enumerate(best.curves):
        model = best.load_model(replica=replica)
        assert ((model(x) - y) ** 2).mean().item() == pytest.approx(curve[-1], rel=1e-5)
    with pytest.raises(UsageError, match="a number from 0 to 2"):
        best.load_model(replica=3)


@pytest.mark.parametrize("algorithm", [GRID, HALVING], ids=["grid", "halving"])
def test_a_simulation_trains_what_the_plan_foresees(tmp_path, algorithm):
    study = seeded(tmp_path, algorithm=algorithm)
    foreseen = study.plan()
    shared, alone = (study.simulate(workers=2, epoch_s=1.0, share=s) for s in (True, False))
    low, high = foreseen.unique_range
    assert low <= shared.unique_epochs == shared.busy_s <= high
    assert alone.unique_epochs == alone.trial_epochs == shared.trial_epochs
    assert shared.unique_epochs % 3 == 0


def test_a_simulated_population_continues_each_seed_from_its_own(tmp_path):
    population = th.PopulationBasedTraining(max_epochs=4, population=4, interval=2, explore=("lr",))
    study = seeded(tmp_path, space=th.Space(lr=th.Float(0.01, 0.1)), algorithm=population)
    alone = study.simulate(workers=1, epoch_s=1.0, share=False)
    assert alone.unique_epochs == 3 * 4 * 4


def test_the_best_trial_says_how_sure_it_is(tmp_path):
    clear = seeded(tmp_path, space=th.Space(lr=th.Choice([0.1, 1e-5])))
    trained(clear)
    assert clear.best_trial.certainty > 0.9
    alike = seeded(tmp_path, space=th.Space(lr=th.Choice([0.1, 0.1001])), name="alike")
    trained(alike)
    assert 0.4 < alike.best_trial.certainty < 0.6
    assert "probability of being the best" in clear.best_trial._repr_html_()


def test_a_rung_stops_what_is_surely_worse_and_keeps_the_rest(tmp_path):
    rates = [0.1, 0.1001, 0.1002, 1e-5, 2e-5, 3e-5]
    space = th.Space(lr=th.Choice(rates))
    halving = th.SuccessiveHalving(
        max_epochs=4, num_trials=6, eta=4, min_epochs=1, sampler=th.search.samplers.GridSampler()
    )
    one, several = (
        seeded(tmp_path, seeds=n, space=space, algorithm=halving, name=f"n{n}") for n in (1, 4)
    )
    trained(one)
    trained(several)
    kept = {
        study.name: [t.config["lr"] for t in study.trials if t.epochs > 1]
        for study in (one, several)
    }
    assert len(kept["n1"]) == 1
    assert len(kept["n4"]) == 2
    assert max(kept["n4"]) - min(kept["n4"]) < 0.001


def test_asha_promotes_what_is_not_surely_worse(tmp_path):
    asha = th.ASHA(max_epochs=4, num_trials=8, eta=4)
    space = th.Space(lr=th.Float(0.09, 0.1))
    reached = {}
    for seeds in (1, 4):
        study = seeded(tmp_path, seeds=seeds, space=space, algorithm=asha, name=f"n{seeds}")
        trained(study)
        reached[seeds] = sum(trial.epochs == 4 for trial in study.trials)
    assert reached[4] > reached[1]


class Dropping(LineTask):
    """A task with dropout, whose masks differ between seeds."""

    def model(self, hp):
        return nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))


def test_packed_replicas_have_initial_weights_order_and_masks_of_their_own(tmp_path):
    study = seeded(tmp_path, task=Dropping(), space=th.Space(lr=0.01))
    study.run(progress=False, executor=th.Local(pack="fused", pack_size=3, threads=1))
    (trial,) = study.trials
    assert study.savings.packed_epochs == 12
    assert len(set(trial.curves)) == 3
    for replica, curve in enumerate(trial.curves):
        alone = seeded(
            tmp_path,
            task=Dropping(),
            space=th.Space(lr=0.01),
            seeds=1,
            seed=replica_seed(0, replica),
            storage=f"sqlite:///{tmp_path}/alone.db",
            name=f"r{replica}",
        )
        alone.run(progress=False, executor=th.Local(pack="solo", threads=1))
        assert curve == pytest.approx(alone.trials[0].curve, rel=1e-4)


WIDE = th.Space(lr=th.Float(0.01, 0.1))
ALGORITHMS = [
    th.RandomSearch(max_epochs=2, num_trials=6, sampler=th.search.TPESampler(num_startup=3)),
    th.MedianStopping(max_epochs=4, num_trials=5, grace_epochs=1),
    th.Hyperband(max_epochs=4, eta=2),
    th.ASHA(max_epochs=4, num_trials=6, eta=2),
    th.search.SubSampling(max_epochs=4, num_trials=5, eta=2),
    th.search.FreezeThaw(max_epochs=4, num_trials=5, eta=2),
    th.PopulationBasedTraining(max_epochs=4, population=4, interval=2, explore=("lr",)),
    # these decide by the rules of the ones above
    th.RandomSearch(max_epochs=4, num_trials=4),
    th.SuccessiveHalving(max_epochs=4, num_trials=6, eta=2),
    th.BOHB(max_epochs=4, eta=2),
    th.search.BOSS(max_epochs=4, eta=2),
    th.search.WideBOSS(max_epochs=4, eta=2),
    th.search.CheckedBOSS(max_epochs=4, eta=2),
    th.search.FixedWidthSubSampling(max_epochs=4, num_trials=5, eta=2),
][: draws(7, 13)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: type(each).__name__)
def test_every_algorithm_decides_by_means_and_goes_on_after_a_stop(tmp_path, algorithm):
    whole = seeded(tmp_path / "whole", seeds=2, space=WIDE, algorithm=algorithm)
    num = trained(whole)
    counts = []
    while not counts or counts[-1]:
        broken = seeded(tmp_path / "broken", seeds=2, space=WIDE, algorithm=algorithm)
        counts.append(trained(broken, observers=[StopAfter(9)]))
    assert sum(counts) == num
    assert [(t.state, t.curves) for t in broken.trials] == [
        (t.state, t.curves) for t in whole.trials
    ]
    for trial in whole.trials:
        assert trial.value == pytest.approx(mean(curve[-1] for curve in trial.curves))
    assert max(trial.epochs for trial in whole.trials) == algorithm.max_epochs


class Sized(LineTask):
    """A task whose second metric is the same for all seeds."""

    def metrics(self, model, batch):
        slope = model.weight.detach().abs().item()
        return {**super().metrics(model, batch), "slope": slope}


def test_objectives_and_constraints_are_means_over_seeds(tmp_path):
    study = seeded(
        tmp_path,
        task=Sized(),
        metric=["mse", "slope"],
        mode=["min", "max"],
        constraints={"slope": 100.0},
    )
    trained(study)
    assert all(trial.certainty is None for trial in study.best_trials)
    for trial in study.trials:
        assert trial.violation == 0
        assert (
            trial.values["mse"]
            == trial.value
            == pytest.approx(mean(curve[-1] for curve in trial.curves))
        )
    with Store.open(study.storage.url) as store:
        slopes = store.studies.seed_curves(store.studies.get("s").id, "slope")
    for trial in study.trials:
        assert trial.values["slope"] == pytest.approx(
            mean(curve[-1] for curve in slopes[trial.number])
        )


def test_a_constraint_is_checked_on_the_mean(tmp_path):
    study = seeded(tmp_path, task=Sized(), constraints={"slope": 1e-6})
    trained(study)
    assert all(trial.violation > 0 for trial in study.trials)
    with pytest.raises(ThriftyError, match="feasible"):
        _ = study.best_trial


def test_notebooks_and_plots_show_the_seeds(tmp_path):
    study = seeded(tmp_path)
    trained(study)
    shown = study._repr_html_()
    assert "probability of being the best" in shown
    assert "95 % interval of the mean" in shown
    assert "sd over seeds" in study.trials._repr_html_()
    (axes,) = study.plot_learning_curves().axes
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "its 3 seeds"


def test_the_stored_counts_of_epochs_are_those_of_all_seeds(tmp_path):
    study = seeded(tmp_path)
    trained(study)
    savings = study.savings
    with Store.open(study.storage.url, create=False) as store:
        assert store.studies.summary(study.name).trial_epochs == savings.trial_epochs
    with Views.open(study.storage.url) as views:
        (view,) = views.studies.list()
    assert view.asked_epochs == view.reached_epochs == savings.trial_epochs
