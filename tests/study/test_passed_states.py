"""A running study deletes checkpoints that were only passed, and keeps all that may be needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.study.helpers import SOLO, StopAfter, make_study, trained
from tests.study.processes import At, die, started
from thrifty.core import CheckpointLost, EpochDone, SystemClock
from thrifty.search import GridSearch, MedianStopping, PopulationBasedTraining, SuccessiveHalving
from thrifty.space import Choice, Float, Space, Step
from thrifty.store import Store
from thrifty.study._housekeeping import PassedStates


pytestmark = pytest.mark.slow


SPACE = Space(lr=Float(0.01, 0.1))
MEDIAN = MedianStopping(max_epochs=8, num_trials=8, min_trials=3)


class Lost:
    """Counter of checkpoints that were missing when they were needed."""

    num = 0

    def on_event(self, event) -> None:
        self.num += isinstance(event, CheckpointLost)


def files(folder):
    return {path.stem for path in folder.glob("t-checkpoints/*/*.safetensors")}


def rows(study):
    with Store.open(study.storage.url, create=False) as store:
        plan = store.plans.load(store.studies.get(study.name).plan)
    return {f"{ref.node}-{ref.epoch}" for ref in plan.checkpoints}


def median(folder, **options):
    return make_study(folder, space=SPACE, algorithm=MEDIAN, **options)


def test_one_checkpoint_a_trial_is_left_where_every_epoch_is_looked_at(tmp_path):
    study = median(tmp_path)
    trained(study)
    assert files(tmp_path) == {f"{t.number}-{t.epochs}" for t in study.trials}
    assert rows(study) == files(tmp_path)
    assert len({t.epochs for t in study.trials}) > 1, "none was stopped"


def test_models_are_still_loaded_not_trained(tmp_path, monkeypatch):
    study = median(tmp_path)
    trained(study)
    monkeypatch.setattr("thrifty.run._alone.epoch_plan", None)
    for trial in study.trials:
        trial.load_model()


def test_nothing_is_trained_twice_when_a_study_goes_on(tmp_path):
    lost = Lost()
    first = trained(median(tmp_path), observers=[StopAfter(20), lost])
    rest = trained(median(tmp_path), observers=[lost])
    assert first + rest == sum(t.epochs for t in median(tmp_path).trials)
    assert not lost.num


def run_and_die(folder, count):
    median(folder).run(progress=False, observers=[At(count, die)], executor=SOLO)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [20, 61, 90])
def test_after_a_kill_no_epoch_before_a_kept_state_is_trained_again(tmp_path, count):
    child = started(run_and_die, tmp_path, count)
    child.join(timeout=90)
    assert child.exitcode < 0
    kept = rows(median(tmp_path))
    last = {int(n): int(e) for n, e in (name.split("-") for name in sorted(kept))}
    again = []

    class Watch:
        def on_event(self, event):
            if isinstance(event, EpochDone) and event.epoch <= last.get(event.node, 0):
                again.append(event)

    lost = Lost()
    median(tmp_path).run(progress=False, observers=[Watch(), lost], executor=SOLO)
    assert not again
    assert not lost.num


def test_states_at_which_the_space_may_branch_stay(tmp_path):
    space = Space(lr=Choice([0.1, Step(0.1, [2]), Step(0.1, [5])]))
    study = make_study(tmp_path, space=space, algorithm=MedianStopping(max_epochs=8, num_trials=3))
    trained(study)
    kept = {tuple(map(int, name.split("-"))) for name in files(tmp_path)}
    # 0.1 continues after 2 epochs on one node only, and that is where 5 matters.
    follows = [t for t in study.trials if t.config["lr"] != Step(0.1, [2]) and t.epochs > 5]
    assert follows, "no trial follows 0.1 that far"
    assert {epoch for _, epoch in kept} >= {2, 5}
    assert len([node for node, epoch in kept if epoch == 5]) == 1


def test_states_that_other_trials_branched_off_stay(tmp_path):
    algorithm = PopulationBasedTraining(
        max_epochs=9, population=4, interval=3, explore=("lr",), resample=1.0
    )
    study = make_study(tmp_path, space=SPACE, algorithm=algorithm)
    trained(study)
    with Store.open(study.storage.url, create=False) as store:
        nodes = store.plans.load(1).nodes
    branches = {f"{node.parent}-{node.start}" for node in nodes if node.parent is not None}
    assert branches
    assert branches <= files(tmp_path)


def test_where_trials_of_another_study_ended_stays(tmp_path):
    space = Space(lr=Choice([0.1, 0.05]))
    halving = SuccessiveHalving(max_epochs=6, num_trials=2, min_epochs=3, eta=2)
    study = make_study(tmp_path, space=space, algorithm=halving, name="first")
    trained(study)
    (stopped,) = (t.number for t in study.trials if t.state == "stopped")
    watched = MedianStopping(max_epochs=6, num_trials=2)
    trained(make_study(tmp_path, space=space, algorithm=watched, name="second"))
    assert files(tmp_path) == {"0-6", "1-6", f"{stopped}-3"}


def test_checkpoints_that_an_earlier_version_left_are_deleted_too(tmp_path, monkeypatch):
    monkeypatch.setattr(PassedStates, "find", lambda self, ledger: ())
    trained(median(tmp_path), observers=[StopAfter(30)])
    before = len(files(tmp_path))
    monkeypatch.undo()
    trained(median(tmp_path))
    assert len(files(tmp_path)) == MEDIAN.num_trials < before


def test_paused_trials_keep_their_states(tmp_path):
    algorithm = SuccessiveHalving(max_epochs=4, num_trials=8, eta=2)
    study = make_study(tmp_path, space=SPACE, algorithm=algorithm)
    trained(study)
    assert files(tmp_path) == {f"{t.number}-{t.epochs}" for t in study.trials}


class Watch:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def ledger_and_store(tmp_path):
    """Return the ledger of a study with two checkpoints on one node, the first of them passed."""
    study = make_study(tmp_path, space=Space(lr=Choice([0.1])), algorithm=GridSearch(max_epochs=3))
    trained(study)
    repository = study._repository()
    with repository.open() as store:
        info = store.studies.get(study.name)
        ledger = repository.load(store, info)
        (ref,) = ledger.plan.checkpoints()
        ledger.plan.restore(replace(ref, epoch=1))
        yield ledger, store


def test_a_shared_plan_is_asked_where_others_stand_now_and_then(ledger_and_store):
    ledger, store = ledger_and_store
    clock = Watch()
    passed = PassedStates(store, clock=clock, shared=True)
    assert [ref.epoch for ref in passed.find(ledger)] == [1]
    ledger.touched.add(0)
    assert not passed.find(ledger), "others may stand there by now"
    clock.now_s = 6.0
    assert [ref.epoch for ref in passed.find(ledger)] == [1]


def test_what_others_have_added_is_learned_first(ledger_and_store, monkeypatch):
    ledger, store = ledger_and_store
    monkeypatch.setattr(store.plans, "ends", lambda plan, *, but: {(7, 1)})
    passed = PassedStates(store, clock=SystemClock(), shared=True)
    assert not passed.find(ledger)
    assert ledger.touched
