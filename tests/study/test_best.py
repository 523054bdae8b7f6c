"""Everything that names a best trial follows one rule, also while rungs are under way."""

from __future__ import annotations

import pytest

from tests.study.helpers import SOLO, make_study
from thrifty.pack import Trainable
from thrifty.search import SuccessiveHalving
from thrifty.space import Choice, Space
from thrifty.store import Store, Views, best_trials
from thrifty.study import StopWhen, StudyEnded


pytestmark = pytest.mark.slow


CURVES = {
    "spoils": (0.1, 0.5, 0.9),
    "breaks": (0.05, None, None),
    "good": (0.2, 0.2, 0.2),
    "bad": (0.6, 0.6, 0.6),
}


class Scripted(Trainable):
    """Trainable that reports the values of ``CURVES``, and fails where there is none."""

    def setup(self, hp, *, seed, device) -> None:
        self.curve, self.epoch = CURVES[hp["curve"]], 0

    def train(self, epoch, hp) -> None:
        self.epoch = epoch + 1
        if self.curve[epoch] is None:
            raise ValueError("broken")

    def evaluate(self):
        return {"mse": self.curve[self.epoch - 1]}

    def state(self):
        return {"epoch": self.epoch}

    def load_state(self, state) -> None:
        self.epoch = state["epoch"]


class Ending:
    """Observer that keeps how the run ended."""

    def on_event(self, event) -> None:
        if isinstance(event, StudyEnded):
            self.event = event


def study_of(folder, *names: str):
    study = make_study(
        folder,
        task=Scripted(),
        space=Space(curve=Choice(list(CURVES))),
        algorithm=SuccessiveHalving(max_epochs=3, num_trials=len(names), eta=3),
    )
    for name in names:
        study.enqueue_trial({"curve": name})
    return study


def stories(study, ended: StudyEnded) -> set[tuple[int, float]]:
    """Return number and value of the best trial, as each reader tells them."""
    url, ledger = study.storage.url, study._current_ledger()
    with Store.open(url, create=False) as store:
        summary, info = store.studies.summary("s"), store.studies.get("s")
        (recorded,) = best_trials(info, store.studies.load(info.id).trials)
    assert summary.best_epochs == recorded.reached == study.best_trial.epochs
    with Views.open(url) as views:
        (view,) = views.studies.list()
    return {
        (study.best_trial.number, study.best_trial.value),
        (summary.best_trial, summary.best_value),
        (recorded.number, recorded.value),
        (view.best_trial, view.best_value),
        (ended.best_trial, ended.best_value),
        (ledger.best_trial.number, ledger.best_value),
    }


@pytest.mark.parametrize(
    ("first", "under_way", "at_the_end"),
    [("spoils", (0, 0.1), (1, 0.2)), ("breaks", (0, 0.05), (1, 0.2))],
)
def test_a_promoted_trial_counts_at_the_epoch_that_it_has_reached(
    tmp_path, first, under_way, at_the_end
):
    study = study_of(tmp_path, first, "good", "bad")
    watch = Ending()
    study.run(progress=False, executor=SOLO, observers=[watch], stop=StopWhen(epochs=3))
    assert stories(study, watch.event) == {under_way}
    study.run(progress=False, executor=SOLO, observers=[watch])
    assert watch.event.state == "done"
    assert stories(study, watch.event) == {at_the_end}


def test_a_target_that_only_an_earlier_epoch_met_is_not_met(tmp_path):
    study = study_of(tmp_path, "spoils", "good", "bad").run(progress=False, executor=SOLO)
    ledger = study._current_ledger()
    assert StopWhen(target=0.15).watch(ledger, study._clock)() == ""
    assert StopWhen(target=0.2).watch(ledger, study._clock)() == "mse is 0.2"


def test_of_equally_good_trials_the_first_is_the_best(tmp_path):
    study = study_of(tmp_path, "bad", "good", "good")
    watch = Ending()
    study.run(progress=False, executor=SOLO, observers=[watch])
    assert stories(study, watch.event) == {(1, 0.2)}
