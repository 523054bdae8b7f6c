"""Several drivers on one plan: each stage is trained once, and no study's answer changes."""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest

from tests.depth import draws
from tests.servers import needs_postgresql, postgresql, server  # noqa: F401 (fixtures)
from tests.study.helpers import SOLO, make_study
from tests.study.processes import FORK, At, die, exit_code, started
from thrifty.core import EpochDone
from thrifty.plan import SearchPlan
from thrifty.search import ASHA, GridSearch, RandomSearch, SuccessiveHalving
from thrifty.space import Choice, MultiStep, Space, Timeline
from thrifty.store import Store
from thrifty.study import Storage
from thrifty.testing import FaultyTask


pytestmark = pytest.mark.slow


ALGORITHMS = {
    "grid": GridSearch(max_epochs=6),
    "halving": SuccessiveHalving(max_epochs=6, num_trials=12, eta=2),
    "random": RandomSearch(max_epochs=6, num_trials=10),
    "asha": ASHA(max_epochs=6, num_trials=12, eta=2),
    "longer": GridSearch(max_epochs=8),
}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=needs_postgresql)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/t.db"
    return request.getfixturevalue("postgresql")


class Trained:
    def __init__(self) -> None:
        self.epochs: Counter[tuple[int, int]] = Counter()

    def on_event(self, event) -> None:
        if isinstance(event, EpochDone):
            self.epochs[event.node, event.epoch] += 1


def study_of(folder, url, name):
    storage = Storage(url=url, checkpoints=str(folder / "checkpoints"), shared=True)
    return make_study(folder, name=name, algorithm=ALGORITHMS[name], storage=storage)


def run(folder, url, name, barrier=None, observers=()) -> None:
    """Run a study and write how often it trained each epoch."""
    if barrier is not None:
        barrier.wait()
    trained = Trained()
    study_of(folder, url, name).run(progress=False, observers=[trained, *observers], executor=SOLO)
    counts = [[*key, count] for key, count in trained.epochs.items()]
    (folder / f"{name}.json").write_text(json.dumps(counts))


def killed(folder, url, name, count) -> None:
    run(folder, url, name, observers=[At(count, die)])


def run_together(folder, url, names) -> None:
    barrier = FORK.Barrier(len(names))
    children = [started(run, folder, url, name, barrier) for name in names]
    for child in children:
        assert exit_code(child) == 0


def counts_of(folder, names) -> Counter[tuple[int, int]]:
    total: Counter[tuple[int, int]] = Counter()
    for name in names:
        for node, epoch, count in json.loads((folder / f"{name}.json").read_text()):
            total[node, epoch] += count
    return total


def least_epochs(url, names) -> int:
    """Return the fewest epochs that the union of the studies' trials takes."""
    plan = SearchPlan()
    with Store.open(url, create=False) as store:
        for name in names:
            for trial in store.studies.load(store.studies.get(name).id).trials:
                epochs = ALGORITHMS[name].max_epochs
                node = plan.insert(Timeline(trial.config, epochs=epochs))
                plan.request((name, trial.number), node, trial.target)
    return plan.num_epochs_needed


def answers(study):
    return [(t.number, t.config, t.curve, t.state) for t in study.trials]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "names", [("grid", "halving", "random"), ("halving", "random")][: draws(1, 2)]
)
def test_no_stage_is_trained_twice(tmp_path, url, names):
    run_together(tmp_path, url, names)
    trained = counts_of(tmp_path, names)
    assert set(trained.values()) == {1}
    assert len(trained) == least_epochs(url, names)
    for name in names:
        alone = make_study(tmp_path / "alone", name=name, algorithm=ALGORITHMS[name])
        alone.run(progress=False, executor=SOLO)
        assert answers(study_of(tmp_path, url, name)) == answers(alone)
        with Store.open(url) as store:
            assert store.studies.summary(name).state == "done"


@pytest.mark.sample(1)
def test_studies_of_different_length_and_order(tmp_path, url):
    """Each study gets the answers that it gets alone, whatever the other one does."""
    run_together(tmp_path, url, ("asha", "longer"))
    alone = make_study(tmp_path / "alone", name="longer", algorithm=ALGORITHMS["longer"])
    alone.run(progress=False, executor=SOLO)
    assert answers(study_of(tmp_path, url, "longer")) == answers(alone)


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [17, 40, 3][: draws(2, 3)])
def test_a_driver_dies_beside_another(tmp_path, url, count):
    dying = started(killed, tmp_path, url, "halving", count)
    living = started(run, tmp_path, url, "grid")
    assert (exit_code(dying), exit_code(living)) == (-signal.SIGKILL, 0)
    run(tmp_path, url, "halving")
    for name in ("grid", "halving"):
        alone = make_study(tmp_path / "alone", name=name, algorithm=ALGORITHMS[name])
        alone.run(progress=False, executor=SOLO)
        assert answers(study_of(tmp_path, url, name)) == answers(alone)


def faulty_of(folder, url, name):
    return make_study(
        folder,
        name=name,
        task=FaultyTask(),
        space=Space(lr=Choice([0.1]), fault=MultiStep(["", "raise"], milestones=[3])),
        storage=Storage(url=url, checkpoints=str(folder / "checkpoints"), shared=True),
    )


def run_faulty(folder, url, name, barrier) -> None:
    barrier.wait()
    faulty_of(folder, url, name).run(progress=False, executor=SOLO)


@pytest.mark.sample(1)
def test_what_fails_elsewhere_is_tried_here(tmp_path, url):
    """A driver that waits for a stage which fails elsewhere trains it itself, and fails alike."""
    barrier = FORK.Barrier(2)
    children = [started(run_faulty, tmp_path, url, name, barrier) for name in ("a", "b")]
    for child in children:
        assert exit_code(child) == 0
    for name in ("a", "b"):
        (trial,) = faulty_of(tmp_path, url, name).trials
        assert trial.state == "failed"
        assert "the task's own error" in trial.error


@pytest.mark.sample(1)
def test_a_study_beside_one_that_is_done_trains_nothing_again(tmp_path, url):
    run(tmp_path, url, "grid")
    run(tmp_path, url, "halving")
    assert not counts_of(tmp_path, ["halving"])
