"""Studies share equal work, re-evaluate where only metrics differ, and report both."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pack.identity._projects import load, write
from tests.study.helpers import SOLO, StopAfter, make_study, trained
from tests.study.legacy_task import legacy_study
from thrifty.core import EpochDone, StudyMismatchError, TaskError
from thrifty.run import Local
from thrifty.search import (
    BOSS,
    FixedWidthSubSampling,
    GridSearch,
    QuantizedSampler,
    RandomSampler,
    RandomSearch,
    SubSampling,
    WideBOSS,
)
from thrifty.space import Choice, Constant, Space, Step
from thrifty.store import Store
from thrifty.study import Storage, Study
from thrifty.study._reader import Provenance
from thrifty.testing import LineTask


pytestmark = pytest.mark.slow


TASK = """
import torch
import helpers
from thrifty import SGD
from thrifty.testing import LineTask

class Mine(LineTask):
    optimizer = SGD(lr="lr", momentum=0.9)
    scale = 1.0

    def loss(self, model, batch):
        x, y = batch
        return self.scale * helpers.error(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"mse": (model(x) - y).square().mean()}
"""
HELPERS = """
def error(out, y):
    return (out - y).square().mean()
"""
METRIC = ('{"mse": (model(x) - y).square().mean()}', '{"mse": (model(x) - y).abs().mean()}')
TRAINING = ("scale = 1.0", "scale = 2.0")
SPACE = Space(lr=Choice([Constant(0.1), Step(0.1, [2]), Step(0.1, [2, 4])]))


class Seen:
    """Observer that counts trained epochs and epochs that were only evaluated again."""

    def __init__(self) -> None:
        self.trained = self.evaluated = 0

    def on_event(self, event) -> None:
        if isinstance(event, EpochDone):
            self.trained += not event.evaluated
            self.evaluated += event.evaluated


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Return a function that makes a study of the task with some text replaced.

    The study may have a database of its own.
    """

    def make(*edits, name="a", folder="common", space=SPACE, epochs=6, **options) -> Study:
        texts = {"task": TASK, "helpers": HELPERS}
        for old, new in edits:
            assert any(old in text for text in texts.values())
            texts = {key: text.replace(old, new) for key, text in texts.items()}
        write(tmp_path / "code", **texts)
        mine = load(tmp_path / "code", "task", monkeypatch=monkeypatch)
        storage = Storage(url=f"sqlite:///{tmp_path}/{folder}.db", **options)
        return Study(
            mine.Mine(),
            space,
            algorithm=GridSearch(max_epochs=epochs),
            metric="mse",
            mode="min",
            storage=storage,
            name=name,
        )

    return make


def run(study: Study, **options) -> Seen:
    seen = Seen()
    observers = [seen, *options.pop("observers", ())]
    study.run(progress=False, observers=observers, **{"executor": SOLO, **options})
    return seen


def curves(study: Study) -> list:
    return [(trial.curve, trial.value) for trial in study.trials]


def kept(study: Study) -> set[tuple[int, int]]:
    with Store.open(study.storage.url, create=False) as store:
        plan = store.plans.load(store.studies.get(study.name).plan)
    return {(ref.node, ref.epoch) for ref in plan.checkpoints}


# -- sharing --------------------------------------------------------------------------


def test_equal_tasks_share_everything(project):
    assert run(project()).trained == 6 + 4 + 2
    assert run(project(("    scale", "    # one\n    scale"), name="b")).trained == 0


def test_a_change_of_training_shares_nothing(project):
    run(project())
    seen = run(project(TRAINING, name="b"))
    assert (seen.trained, seen.evaluated) == (12, 0)


def test_a_change_in_a_helper_shares_nothing(project):
    run(project())
    assert run(project((".square()", ".abs()"), name="b")).trained == 12


def test_after_a_change_of_metrics_only_what_is_kept_is_evaluated_again(project):
    first = project()
    run(first)
    states = kept(first)
    second = project(METRIC, name="b")
    forecast = second.plan()
    assert (forecast.known_epochs, forecast.evaluated_epochs) == (0, len(states))
    assert forecast.epochs_to_train == 12 - len(states)
    assert "5 epochs evaluated again with kept states: 7 left to train" in str(forecast)
    seen = run(second)
    assert seen.evaluated == len(states) == forecast.evaluated_epochs
    assert seen.trained == forecast.epochs_to_train
    afresh = project(METRIC, name="b", folder="afresh")
    run(afresh)
    assert curves(second) == curves(afresh)
    assert (second.savings.unique_epochs, second.savings.evaluated_epochs) == (7, 5)
    assert "7 epochs trained, 5 evaluated again for 18 trial-epochs" in str(second.savings)
    assert second.plan().known_epochs == 12
    assert second.plan().epochs_to_train == 0


def test_metrics_that_come_back_are_known(project):
    run(project())
    run(project(METRIC, name="b"))
    assert run(project(name="c")).trained == 0


def test_states_are_handed_on_from_plan_to_plan(project):
    first = project()
    run(first)
    run(project(METRIC, name="b"))
    third = project((METRIC[0], '{"mse": (model(x) - y).abs().max()}'), name="c")
    seen = run(third)
    assert seen.evaluated == len(kept(first))
    afresh = project((METRIC[0], '{"mse": (model(x) - y).abs().max()}'), folder="afresh")
    run(afresh)
    assert curves(third) == curves(afresh)


def test_metrics_that_change_the_task_are_a_part_of_training(project):
    impure = (METRIC[0], '{"mse": self.note((model(x) - y).square().mean())}')
    note = "    log = []\n    def note(self, x):\n        self.log.append(1)\n        return x\n"
    helper = ("    def loss", f"{note}    def loss")
    run(project(impure, helper))
    other = (METRIC[0], '{"mse": self.note((model(x) - y).abs().mean())}')
    seen = run(project(other, helper, name="b"))
    assert (seen.trained, seen.evaluated) == (12, 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "line",
    [
        "model.weight.data.add_(0.1)",
        "torch.rand(1)",
        "model.seen = 1",
        "helpers.error.__dict__.update(x=len(vars(helpers.error)))",
    ],
)
def test_metrics_that_change_what_is_trained_share_no_training(project, line):
    space = Space(lr=Choice([0.1]))
    impure = ("        return {", f"        {line}\n        return {{")
    run(project(impure, space=space, epochs=2))
    seen = run(project(METRIC, impure, name="b", space=space, epochs=2))
    assert (seen.trained, seen.evaluated) == (2, 0)


# -- states of other plans ---------------------------------------------------------------


def test_a_state_that_is_gone_is_trained_again(project, tmp_path, caplog):
    first = project()
    run(first)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    second = project(METRIC, name="b")
    seen = run(second)
    assert (seen.trained, seen.evaluated) == (12, 0)
    assert "cannot be read" in caplog.text
    afresh = project(METRIC, name="b", folder="afresh")
    run(afresh)
    assert curves(second) == curves(afresh)


def test_files_of_another_plan_are_never_deleted(project, tmp_path):
    run(project())
    files = set(tmp_path.rglob("*.safetensors"))
    run(project(METRIC, name="b", disk_budget_bytes=1))
    assert all(file.exists() for file in files)


def test_a_run_that_was_interrupted_goes_on(project):
    run(project())
    second = project(METRIC, name="b")
    before = run(second, observers=[StopAfter(4)])
    after = run(project(METRIC, name="b"))
    assert (before.trained + after.trained, before.evaluated + after.evaluated) == (7, 5)
    afresh = project(METRIC, name="b", folder="afresh")
    run(afresh)
    assert curves(project(METRIC, name="b")) == curves(afresh)


@pytest.mark.parametrize(
    "executor", [Local(workers=2, threads=1, pack="solo"), Local(pack="concatenated", pack_size=3)]
)
def test_on_other_executors(project, executor):
    run(project())
    second = project(METRIC, name="b")
    seen = run(second, executor=executor)
    assert (seen.trained, seen.evaluated) == (7, 5)
    afresh = project(METRIC, name="b", folder="afresh")
    run(afresh, executor=executor)
    assert curves(second) == curves(afresh)


def test_metrics_that_fail_are_the_trials_failure(project):
    run(project())
    broken = (METRIC[0], '{"mse": (model(x) - y).abs().mean() / (1 if model.training else fail)}')
    second = project(broken, name="b")
    run(second)
    assert {trial.state for trial in second.trials} == {"failed"}
    assert "NameError" in second.trials[0].error


def test_models_of_evaluated_epochs_can_be_loaded(project):
    run(project())
    second = project(METRIC, name="b")
    run(second)
    afresh = project(METRIC, name="b", folder="afresh")
    run(afresh)
    one, two = (s.trials[0].load_model().state_dict() for s in (second, afresh))
    assert all((one[key] == two[key]).all() for key in one)


# -- where results come from ---------------------------------------------------------------


def said(caplog) -> str:
    text = [r.message for r in caplog.records if r.name == "thrifty.study._session"]
    return re.sub(r"\d{4}-\d\d-\d\d", "DAY", text[-1])


def test_a_run_says_where_its_results_come_from(project, caplog):
    caplog.set_level(logging.INFO)
    run(project())
    assert said(caplog) == "study 'a': 12 epochs trained"
    run(project())
    assert said(caplog) == (
        "study 'a': 12 of 12 epochs known from this study (DAY); nothing to train"
    )
    run(project(name="b"))
    assert said(caplog) == (
        "study 'b': 12 of 12 epochs known from study 'a' (DAY); nothing to train"
    )
    more = Space(lr=Choice([Constant(0.1), Step(0.1, [2]), Constant(0.05)]))
    run(project(name="c", space=more))
    assert said(caplog) == "study 'c': 10 of 16 epochs known from study 'a' (DAY), 6 trained"
    run(project(METRIC, name="d"))
    assert said(caplog) == ("study 'd': 5 of 12 epochs evaluated again with kept states, 7 trained")
    both = Space(lr=Choice([Constant(0.1), Constant(0.05), Constant(0.02)]))
    run(project(name="e", space=both))
    assert said(caplog) == (
        "study 'e': 12 of 18 epochs known from study 'a' (DAY) and another one, 6 trained"
    )


def where_from(caplog) -> str:
    """Return the line of a run that says where its results come from; "to go on" is the last."""
    lines = [r.message for r in caplog.records if r.name == "thrifty.study._session"]
    (found,) = [line for line in lines if line.endswith((" trained", " yet)", "to train"))]
    return re.sub(r"\d{4}-\d\d-\d\d", "DAY", found)


def test_a_run_that_was_stopped_counts_what_no_trial_has_reported(project, caplog):
    caplog.set_level(logging.INFO)
    one = Space(lr=Choice([0.1]))
    seen = run(project(space=one), observers=[StopAfter(4)])
    study = project(space=one)
    num_reported = study.savings.unique_epochs
    assert num_reported < seen.trained == 4
    assert where_from(caplog) == (
        f"study 'a': 4 epochs trained ({4 - num_reported} of them not reported by a trial yet)"
    )
    with Store.open(study.storage.url, create=False) as store:
        assert store.studies.summary("a").plan_epochs == 4
    caplog.clear()
    assert run(study).trained == 2
    assert where_from(caplog) == ("study 'a': 4 of 6 epochs known from this study (DAY), 2 trained")


def test_it_is_said_on_the_terminal(project, capsys):
    project().run(executor=SOLO)
    assert "study 'a': 12 epochs trained" in capsys.readouterr().err
    project(name="[b]").run(executor=SOLO)
    assert "study '[b]': 12 of 12 epochs known from study 'a'" in capsys.readouterr().err


def test_epochs_of_a_study_that_was_deleted(project, caplog):
    caplog.set_level(logging.INFO)
    study = project()
    run(study)
    with Store.open(study.storage.url) as store:
        store.trash.put(store.studies.get("a"), who="me")
    run(project(name="b"))
    assert said(caplog) == (
        "study 'b': 12 of 12 epochs known from a study that was deleted; nothing to train"
    )


def test_one_epoch_and_many_sources_in_words():
    assert Provenance(trained=1, evaluated=0, known={}).text({}, own=1) == "1 epoch trained"
    assert Provenance(trained=0, evaluated=0, known={}).text({}, own=1) == ""
    text = Provenance(trained=0, evaluated=2, known={None: 3, 1: 2, 2: 1}).text({}, own=1)
    assert text == (
        "6 of 8 epochs known from a study that was deleted and 2 others, "
        "2 evaluated again with kept states; nothing to train"
    )


# -- mismatches ----------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (TRAINING, r"the task has changed \(attribute Mine.scale was 1.0 and is 2.0\)"),
        ((".square()", ".abs()"), "function helpers.error changed"),
        (("momentum=0.9", "momentum=0.8"), "optimizer changed"),
        (("    scale = 1.0", "    scale = 1.0\n    rate = 2"), "attribute Mine.rate is new"),
        (METRIC, r"its metrics have changed \(function Mine.metrics changed\); under another name"),
    ],
)
def test_a_mismatch_names_what_changed(project, edit, message):
    run(project())
    with pytest.raises(StudyMismatchError, match=message):
        run(project(edit))


def test_many_changes_are_counted(project):
    run(project())
    lines = "".join(f"    rate{n} = 2\n" for n in range(9))
    with pytest.raises(StudyMismatchError, match="and 3 more"):
        run(project(("    scale = 1.0\n", f"    scale = 1.0\n{lines}")))


# -- resuming ------------------------------------------------------------------------------


SCRIPT = """
from pathlib import Path
import thrifty as th
from thrifty.testing import LineTask

class Thing:
    def __init__(self, x):
        self.x = x

class Mine(LineTask):
    def __init__(self):
        self.thing, self.function, self.names = Thing(1), lambda x: 2 * x, {"a", "b", "c", "d"}

study = th.Study(
    Mine(), th.Space(lr=th.Choice([0.1])), metric="mse", mode="min", name="s",
    algorithm=th.GridSearch(max_epochs=2), storage=f"sqlite:///{Path(__file__).parent}/s.db",
)
if __name__ == "__main__":
    study.run(progress=False)
    print(study.savings.unique_epochs)
"""


def test_addresses_and_hash_seeds_never_stop_a_study_from_being_resumed(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, path],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip() == "2"


CACHE: dict = {}


class Caching(LineTask):
    """Task that fills a cache while it runs."""

    def data(self, hp):
        CACHE["data"] = super().data(hp)
        self.rows = len(CACHE["data"].train[0])
        return CACHE["data"]


def caching(tmp_path, name="a") -> Study:
    return Study(
        Caching(),
        SPACE,
        algorithm=GridSearch(max_epochs=6),
        metric="mse",
        mode="min",
        storage=Storage(url=f"sqlite:///{tmp_path}/t.db"),
        name=name,
    )


def test_a_task_that_changes_itself_while_it_runs_is_still_the_same(tmp_path):
    study = caching(tmp_path)
    assert run(study).trained == 12
    assert run(study).trained == 0
    assert run(caching(tmp_path, "b")).trained == 0


def test_a_task_without_content_is_an_error_before_training(tmp_path):
    study = caching(tmp_path)
    study.task.stream = iter([1])
    with pytest.raises(TaskError, match=r"Caching\.stream is an iterator"):
        run(study)
    with Store.open(study.storage.url) as store:
        assert store.studies.list() == []


# -- databases of older versions -------------------------------------------------------------


@pytest.fixture
def legacy(tmp_path):
    with sqlite3.connect(tmp_path / "legacy.db") as connection:
        connection.executescript(Path(__file__).with_name("legacy.sql").read_text())
    connection.close()
    return tmp_path


def test_a_study_of_an_older_version_is_the_same_study(legacy):
    study = legacy_study(legacy)
    assert run(study).trained == 0
    assert study.best_trial.value == pytest.approx(0.005878460127860308)


def test_a_study_of_an_older_version_goes_on_in_its_plan(legacy):
    study = legacy_study(legacy, name="stopped")
    seen = run(study)
    assert seen.trained == 10 - 5 + 3  # three lost their checkpoint files
    with Store.open(study.storage.url) as store:
        assert store.studies.get("stopped").plan == 2
        assert "class" in store.studies.get("stopped").spec["task"]
        assert store.plans.get(2).family is None


def test_a_study_of_an_older_version_whose_task_changed(legacy):
    with pytest.raises(StudyMismatchError, match=r"attributes was .*'0.0'.* and is .*'1.0'"):
        run(legacy_study(legacy, shift=1.0))


def test_a_new_study_shares_nothing_with_an_older_version(legacy):
    assert run(legacy_study(legacy, name="new")).trained == 10


def test_a_study_of_an_older_version_needs_no_content(legacy, monkeypatch):
    def fails(task):
        raise TaskError("no content")

    monkeypatch.setattr("thrifty.study._identity.task_identity", fails)
    assert run(legacy_study(legacy)).trained == 0
    assert run(legacy_study(legacy, name="stopped")).trained > 0


@pytest.mark.parametrize(
    ("algorithm", "removed"),
    [
        (
            FixedWidthSubSampling(max_epochs=6, num_trials=3),
            ", threshold='sqrt-log', width='fixed', levels='round'",
        ),
        (
            WideBOSS(max_epochs=6, sampler=RandomSampler()),
            ", threshold='sqrt-log', width='fixed', ladder='widest'",
        ),
    ],
)
def test_a_study_that_names_removed_options_of_its_algorithm_is_resumed(
    tmp_path, algorithm, removed
):
    assert trained(make_study(tmp_path, algorithm=algorithm)) > 0
    before = repr(algorithm).replace(", sampler=", f"{removed}, sampler=")
    write_algorithm(tmp_path / "t.db", repr(algorithm), before)
    assert trained(make_study(tmp_path, algorithm=algorithm)) == 0


@pytest.mark.parametrize(
    ("algorithm", "name", "earlier"),
    [
        (
            RandomSearch(max_epochs=6, num_trials=3, sampler=QuantizedSampler(levels=2)),
            "QuantizedSampler",
            "GriddedSampler",
        ),
        (SubSampling(max_epochs=6, num_trials=3), "SubSampling", "AsyncSubSampling"),
        (FixedWidthSubSampling(max_epochs=6, num_trials=3), "FixedWidthSubSampling", "SubSampling"),
        (WideBOSS(max_epochs=6, sampler=RandomSampler()), "WideBOSS", "BOSS"),
    ],
)
def test_a_study_that_names_a_class_as_it_was_called_before_is_resumed(
    tmp_path, algorithm, name, earlier
):
    assert trained(make_study(tmp_path, algorithm=algorithm)) > 0
    before = repr(algorithm).replace(name, earlier)
    write_algorithm(tmp_path / "t.db", repr(algorithm), before)
    assert trained(make_study(tmp_path, algorithm=algorithm)) == 0


def test_an_earlier_boss_is_not_taken_for_the_one_that_has_its_name_now(tmp_path):
    algorithm = WideBOSS(max_epochs=6, sampler=RandomSampler())
    trained(make_study(tmp_path, algorithm=algorithm))
    write_algorithm(tmp_path / "t.db", repr(algorithm), repr(algorithm).replace("WideBOSS", "BOSS"))
    with pytest.raises(StudyMismatchError):
        make_study(tmp_path, algorithm=BOSS(max_epochs=6, sampler=RandomSampler())).run()


def write_algorithm(database: Path, now: str, before: str) -> None:
    """Write the algorithm of the only study as an older version did."""
    assert before != now
    with sqlite3.connect(database) as connection:
        (text,) = connection.execute("SELECT spec FROM studies").fetchone()
        assert now in text
        connection.execute("UPDATE studies SET spec = ?", (text.replace(now, before),))
    connection.close()
