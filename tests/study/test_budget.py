"""The disk budget: what it frees, what stays, and the message when it cannot be kept."""

from __future__ import annotations

import logging

import pytest

from tests.study.helpers import SOLO, StopAfter, make_study
from thrifty.search import GridSearch
from thrifty.space import Choice, Space
from thrifty.store import Driver, Store
from thrifty.store._plans import Plans
from thrifty.study import Storage
from thrifty.study._housekeeping import DiskBudget


pytestmark = pytest.mark.slow


SPACE = Space(lr=Choice([0.1, 0.05, 0.02, 0.01]))


def study_of(folder, *, budget, epochs=2, **options):
    storage = Storage(url=f"sqlite:///{folder}/t.db", disk_budget_bytes=budget)
    return make_study(
        folder, space=SPACE, algorithm=GridSearch(max_epochs=epochs), storage=storage, **options
    )


def files(folder):
    return sorted(folder.rglob("*.safetensors"))


def size_of_one(folder):
    (folder / "one").mkdir()
    study_of(folder / "one", budget=float("inf")).run(progress=False, executor=SOLO)
    return max(file.stat().st_size for file in files(folder / "one"))


def test_states_of_trials_that_are_done_go_and_the_best_stays(tmp_path, caplog):
    budget = size_of_one(tmp_path) * 1.5
    study = study_of(tmp_path, budget=budget).run(progress=False, executor=SOLO)
    (left,) = [file for file in files(tmp_path) if "one" not in file.parts]
    with Store.open(study.storage.url) as store:
        (ref,) = store.plans.load(1).checkpoints
    assert left.name == f"{ref.node}-{ref.epoch}.safetensors"
    assert study._reader.current(study._repository()).nodes_of[study.best_trial.number] == (
        ref.node,
    )
    assert "cannot be held" not in caplog.text


def test_a_model_whose_state_is_gone_is_trained_again(tmp_path):
    whole = study_of(tmp_path, budget=float("inf"), name="whole")
    whole.run(progress=False, executor=SOLO)
    expected = [next(t.load_model().parameters()).item() for t in whole.trials]
    (tmp_path / "tight").mkdir()
    tight = study_of(tmp_path / "tight", budget=1).run(progress=False, executor=SOLO)
    assert [next(t.load_model().parameters()).item() for t in tight.trials] == expected


def test_a_node_that_another_process_has_just_added_does_not_disturb(tmp_path, monkeypatch):
    def with_news(*args, **options):
        asked.append(1)
        return [(99, 1)] if len(asked) == 1 else []

    asked = []
    monkeypatch.setattr(Plans, "standing", with_news)
    study = study_of(tmp_path, budget=1, epochs=4).run(progress=False, executor=SOLO)
    assert len(asked) > 1
    assert len(files(tmp_path)) == 1
    assert study.best_trial.epochs == 4


def test_the_last_deletion_knows_what_another_process_has_just_added(tmp_path, monkeypatch):
    """Nodes that this process does not know are read before the last deletion, not after it."""
    order = []
    for cls, name in ((Driver, "changes"), (DiskBudget, "hold")):
        meant = getattr(cls, name)

        def noting(self, *args, meant=meant, name=name, **options):
            order.append((name, options.get("done") or options.get("force")))
            return meant(self, *args, **options)

        monkeypatch.setattr(cls, name, noting)
    study_of(tmp_path, budget=1, epochs=2).run(progress=False, executor=SOLO)
    assert order[-2:] == [("changes", True), ("hold", True)]


def test_a_budget_that_cannot_be_held_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        study_of(tmp_path, budget=1).run(progress=False, executor=SOLO)
    said = [r.getMessage() for r in caplog.records if "cannot be held" in r.getMessage()]
    assert len(said) == 1
    assert "best trials" in said[0]


def test_what_killed_runs_left_counts(tmp_path, caplog):
    """Files of killed runs that cannot be removed safely count against the budget."""
    budget = 100_000
    study = study_of(tmp_path, budget=budget)
    study.run(progress=False, executor=SOLO, observers=[StopAfter(2)])
    folder = files(tmp_path)[0].parent
    (folder / ".9-9.safetensors.elsewhere-1-2-3.tmp").write_bytes(b"x" * 99_999)
    with caplog.at_level(logging.WARNING):
        study_of(tmp_path, budget=budget).run(progress=False, executor=SOLO)
    assert "99,999 bytes that killed runs have left" in caplog.text
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("budget", [1, 3_000])
def test_where_trials_may_go_on_stays(tmp_path, budget):
    """Another unfinished study of the plan keeps the checkpoints it needs."""
    first = study_of(tmp_path, budget=float("inf"), epochs=6, name="first")
    first.run(progress=False, executor=SOLO, observers=[StopAfter(8)])
    with Store.open(first.storage.url) as store:
        before = {(c.node, c.epoch) for c in store.plans.load(1).checkpoints}
        live = set(store.plans.standing(1, but=-1))
    study_of(tmp_path, budget=budget, epochs=2, name="second").run(progress=False, executor=SOLO)
    with Store.open(first.storage.url) as store:
        after = {(c.node, c.epoch) for c in store.plans.load(1).checkpoints}
    assert before & live <= after
