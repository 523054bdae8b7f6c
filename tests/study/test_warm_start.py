from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.study.helpers import SOLO, SPACE, Sized, StopAfter, make_study, trained
from thrifty.core import StudyMismatchError, StudyNotFoundError, UsageError
from thrifty.search import RandomSearch, Sampler, SuccessiveHalving
from thrifty.space import Choice, Constant, MultiStep, Space, Step
from thrifty.store import Store
from thrifty.study import at_least
from thrifty.testing import FaultyTask


pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFirst(Sampler):
    """Sampler of all known configurations, best first: it depends only on the prior."""

    adapts: ClassVar[bool] = True

    def sample(self, history, space, *, num, rng) -> Sequence:
        known = sorted(history.prior, key=lambda t: -t.scores[-1] if t.scores else 1e9)
        return [t.config for t in known[len(history) : len(history) + num]]


EARLIER = SuccessiveHalving(max_epochs=6, num_trials=8, eta=2)
LATER = RandomSearch(max_epochs=6, num_trials=4, sampler=BestFirst())


def earlier(folder, **options):
    study = make_study(folder, **{"name": "earlier", "algorithm": EARLIER, **options})
    return study.run(progress=False, executor=SOLO)


def later(folder, **options):
    return make_study(folder, **{"algorithm": LATER, "warm_start": "earlier", **options})


def prior(study):
    return study._current_ledger().history.prior


def test_samplers_see_the_trials_of_the_earlier_study(tmp_path):
    source, study = earlier(tmp_path), later(tmp_path)
    trained(study)
    assert [t.config for t in prior(study)] == [t.config for t in source.trials]
    for seen, trial in zip(prior(study), source.trials, strict=True):
        assert seen.scores == tuple(-value for value in trial.curve)
        assert seen.objectives == (-trial.value,)
        assert (seen.reached, seen.target, seen.state) == (trial.epochs, trial.epochs, "waiting")
    by_value = sorted(source.trials, key=lambda t: t.value)
    assert [t.config for t in study.trials] == [t.config for t in by_value[:4]]


def test_what_the_earlier_study_trained_is_not_trained_again(tmp_path):
    earlier(tmp_path)
    study = later(tmp_path)
    assert (
        trained(study) == study._current_ledger().epochs.num_trained < study.savings.unique_epochs
    )


def test_a_resumed_study_sees_the_same_whatever_became_of_the_earlier_one(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        earlier(tmp_path / name)
    # Another seed leaves something to train.
    whole = later(tmp_path / "whole", seed=1).run(progress=False, executor=SOLO)
    study = later(tmp_path / "cut", seed=1)
    study.run(progress=False, executor=SOLO, observers=[StopAfter(8)])
    with Store.open(study.storage.url) as store:
        store.trash.put(store.studies.get("earlier"), who="me")
    earlier(tmp_path / "cut", algorithm=RandomSearch(max_epochs=6, num_trials=3))
    resumed = later(tmp_path / "cut", seed=1).run(progress=False, executor=SOLO)
    assert prior(resumed) == prior(whole)
    assert [(t.config, t.curve) for t in resumed.trials] == [
        (t.config, t.curve) for t in whole.trials
    ]


def test_studies_of_other_databases_and_several_of_them(tmp_path):
    (tmp_path / "far").mkdir()
    near = earlier(tmp_path)
    far = earlier(tmp_path / "far", seed=3)
    memory = earlier(tmp_path, storage="sqlite://", name="memory", seed=4)
    study = later(tmp_path, warm_start=["earlier", far, memory]).run(progress=False)
    sources = (near, far, memory)
    assert [t.config for t in prior(study)] == [t.config for s in sources for t in s.trials]
    fresh = later(tmp_path / "far", storage=f"sqlite:///{tmp_path}/none/t.db", warm_start=far)
    assert fresh.plan().num_trials == 4


def test_what_is_not_of_the_space_is_left_out_with_one_line(tmp_path, caplog):
    source = earlier(tmp_path)
    space = Space(lr=SPACE["lr"], width=Choice([0]))
    fits = [t.config for t in source.trials if t.config["width"] == 0]
    study = later(tmp_path, space=space).run(progress=False)
    assert [t.config for t in prior(study)] == fits
    lines = [r.getMessage() for r in caplog.records if "warm_start" in r.getMessage()]
    assert lines == [
        (
            f"warm_start: {8 - len(fits)} trials of study 'earlier' are not of this study's "
            f"space and were left out"
        )
    ]


def test_failures_are_known_too(tmp_path):
    fault = Choice([Constant(""), MultiStep(["", "raise"], milestones=[2])])
    space = Space(lr=0.05, fault=fault)
    options = {"task": FaultyTask(), "space": space}
    algorithm = RandomSearch(max_epochs=6, num_trials=6)
    source = earlier(tmp_path, **options, algorithm=algorithm)
    study = later(tmp_path, **options).run(progress=False, executor=SOLO)
    assert [t.state == "failed" for t in prior(study)] == [
        t.state == "failed" for t in source.trials
    ]
    assert {(t.target, t.reached) for t in prior(study) if t.state == "failed"} == {(6, 0)}


def test_objectives_and_constraints_of_the_new_study_judge(tmp_path):
    options = {"task": Sized(), "metric": ["mse", "size"], "mode": ["min", "min"]}
    source = earlier(tmp_path, **options)
    study = later(tmp_path, **options, constraints={"size": 5.0}).run(progress=False)
    for seen, trial in zip(prior(study), source.trials, strict=True):
        assert seen.objectives == (-trial.value, -trial.values["size"])
        assert (seen.violation > 0) == (trial.values["size"] > 5)
    assert [t.violation for t in prior(later(tmp_path, **options, constraints={"size": 5.0}))] == [
        t.violation for t in prior(study)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "train_loss"},
        {"mode": "max"},
        {"metric": ["mse", "train_loss"], "mode": ["min"] * 2},
    ],
)
def test_another_goal_is_an_error(tmp_path, changes):
    earlier(tmp_path)
    with pytest.raises(StudyMismatchError, match=r"optimised mse \(min\), this one"):
        trained(later(tmp_path, **changes))
    with pytest.raises(StudyMismatchError):
        later(tmp_path, **changes).plan()


def test_a_constraint_that_was_never_measured_is_an_error(tmp_path):
    earlier(tmp_path)
    study = later(tmp_path, task=Sized(), constraints={"size": at_least(1)})
    with pytest.raises(StudyMismatchError, match="have no metric 'size'"):
        trained(study)


def test_an_earlier_study_that_is_not_there(tmp_path):
    earlier(tmp_path)
    with pytest.raises(StudyNotFoundError, match="did you mean 'earlier'"):
        trained(later(tmp_path, warm_start="earlie"))
    with pytest.raises(StudyNotFoundError):
        later(tmp_path, storage=f"sqlite:///{tmp_path}/none.db").plan()
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        assert store.studies.find("s") is None


def test_another_warm_start_is_another_study(tmp_path):
    earlier(tmp_path)
    trained(later(tmp_path))
    with pytest.raises(StudyMismatchError, match="warm_start was"):
        trained(later(tmp_path, warm_start=()))


@pytest.mark.parametrize("given", [3, ["a", 3], None])
def test_what_is_no_study(tmp_path, given):
    with pytest.raises(UsageError, match="warm_start is"):
        later(tmp_path, warm_start=given)


def test_the_plan_knows_what_is_known(tmp_path):
    source = earlier(tmp_path)
    study = later(tmp_path)
    best = min(source.trials, key=lambda t: t.value)
    forecast = study.plan()
    assert forecast.num_trials == 4
    trained(study)
    assert study.trials[0].config == best.config
    assert later(tmp_path).plan().num_trials == 4


def test_trials_that_were_not_trained_are_not_known(tmp_path):
    space = Space(lr=Choice([0.1, Step(0.1, [2])]), width=Choice([0, 4]))
    algorithm = RandomSearch(max_epochs=6, num_trials=4)
    source = make_study(tmp_path, name="earlier", space=space, algorithm=algorithm)
    source.run(progress=False, executor=SOLO, observers=[StopAfter(6)])
    reported = [t for t in source.trials if t.epochs]
    assert 0 < len(reported) < 4
    study = later(tmp_path, space=space)
    study.run(progress=False)
    assert len(prior(study)) == len(reported)
