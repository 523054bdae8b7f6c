from __future__ import annotations

import functools
import math
import signal
import sqlite3
import sys
import time
from contextlib import closing

import numpy as np
import pytest
import torch

from tests.study.helpers import SOLO, SPACE, Count, StopAfter, make_study, records
from thrifty.core import (
    AlgorithmError,
    MissingExtraError,
    ScheduleError,
    StageDone,
    StoreBusyError,
    StoreError,
    StoreWriteError,
    StudyMismatchError,
    StudyNotFoundError,
    TaskError,
    ThriftyError,
    UsageError,
)
from thrifty.pack import SGD, Trainable
from thrifty.run import Local
from thrifty.search import GridSearch, Hyperband, RandomSearch, SuccessiveHalving
from thrifty.space import Choice, Constant, Float, MultiStep, Space, Step
from thrifty.store import Heartbeat, Store
from thrifty.study import Storage, Study
from thrifty.testing import FaultyTask, LineTask


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    """Prevent packing even on a slow machine, so that events come one by one."""
    monkeypatch.setattr("thrifty.pack.backends._fusion_policy.PRICE_S", math.inf)


def trained(study) -> int:
    count = Count()
    study.run(progress=False, observers=[count])
    return count.epochs


# -- before any training -------------------------------------------------------------------


def refuses(tmp_path, error, message, **changes) -> None:
    count = Count()
    with pytest.raises(error, match=message):
        make_study(tmp_path, **changes).run(progress=False, observers=[count])
    assert count.epochs == 0


def test_an_unknown_metric(tmp_path):
    refuses(tmp_path, TaskError, "'accurcy' is not among.*mse, train_loss", metric="accurcy")


def test_a_schedule_longer_than_the_run(tmp_path):
    space = Space(lr=Step(0.1, [30]))
    refuses(
        tmp_path, ScheduleError, "'lr'.*needs at least 31 epochs but the run has 6", space=space
    )


def test_a_task_without_the_named_hyper_parameter(tmp_path):
    refuses(tmp_path, TaskError, "optimizer follows hyper-parameter 'lr'", space=Space(width=3))


def test_a_tuple_where_the_optimizer_needs_a_number(tmp_path):
    message = r"'lr'.*value is the tuple \(0.1, 0.2\); .*write thrifty.Choice\(\[0.1, 0.2\]\)"
    refuses(tmp_path, TaskError, message, space=Space(lr=(0.1, 0.2)))


def test_a_batch_size_that_is_not_in_the_space(tmp_path):
    class Task(LineTask):
        batch_size = "size"

    refuses(tmp_path, TaskError, "batch_size follows hyper-parameter 'size'", task=Task())


def test_a_task_without_optimizer(tmp_path):
    class Task(LineTask):
        optimizer = None

    refuses(tmp_path, TaskError, "has no optimizer", task=Task())


@pytest.mark.parametrize("given", ["sgd", torch.optim.SGD], ids=["a name", "a class of torch"])
def test_an_optimizer_that_thrifty_cannot_make(tmp_path, given):
    class Task(LineTask):
        optimizer = given

    refuses(tmp_path, TaskError, "neither an optimizer of thrifty nor a method", task=Task())


def test_a_structural_schedule_that_nobody_follows(tmp_path):
    class Stiff(LineTask):
        adapt = LineTask.__mro__[1].adapt

    space = Space(lr=0.1, width=MultiStep([4, 8], milestones=[2]))
    refuses(tmp_path, TaskError, r"'width' has a schedule.*Task\.adapt", task=Stiff(), space=space)


def test_no_epochs(tmp_path):
    with pytest.raises(AlgorithmError, match="max_epochs"):
        GridSearch(max_epochs=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": LineTask}, r"class LineTask; give an instance: LineTask\(\)"),
        ({"task": None}, "task is None; give an instance of your thrifty.Task or thrifty.Tr"),
        ({"space": {"lr": 0.1}}, r"space is of type dict; give .* thrifty.Space\(lr=0.1\)"),
        ({"algorithm": "hyperband"}, r"algorithm is of type str; give .* thrifty.Hyperband\("),
        ({"mode": "best"}, '"max" or "min"'),
    ],
)
def test_arguments_of_the_wrong_kind(changes, message):
    arguments = {
        "task": LineTask(),
        "space": SPACE,
        "algorithm": GridSearch(max_epochs=2),
        "metric": "mse",
        "name": "s",
        **changes,
    }
    with pytest.raises(UsageError, match=message):
        Study(arguments.pop("task"), arguments.pop("space"), **arguments)


@pytest.mark.parametrize("has_database", [False, True])
def test_reading_a_study_that_was_not_run_says_what_to_do_in_python(tmp_path, has_database):
    if has_database:
        make_study(tmp_path, name="another").run(progress=False)
    study = make_study(tmp_path)
    for read in (lambda: study.trials, lambda: study.best_trial, study.importance):
        with pytest.raises(StudyNotFoundError, match=r"call study\.run\(\) first") as caught:
            read()
        assert f"study 's' is not in {study.storage.url}" in str(caught.value)
        assert "--storage" not in str(caught.value)


# -- what goes wrong on the way ------------------------------------------------------------


def faulty(*faults) -> Space:
    return Space(lr=0.05, fault=Choice([Constant(""), *faults]), width=Choice([0, 3]))


def test_an_exception_fails_its_trial_and_no_other(tmp_path):
    space = faulty(MultiStep(["", "raise"], milestones=[2]))
    study = make_study(tmp_path, task=FaultyTask(), space=space).run(progress=False)
    assert [t.state for t in study.trials] == ["done", "done", "failed", "failed"]
    assert "the task's own error" in study.trials[2].error
    assert "Traceback" in study.trials[2].error
    assert study.trials[2].value is None
    assert study.best_trial.state == "done"


def test_a_diverged_trial_is_never_the_best(tmp_path):
    space = faulty(MultiStep(["", "nan"], milestones=[1]))
    algorithm = SuccessiveHalving(max_epochs=6, num_trials=6, eta=2)
    study = make_study(tmp_path, task=FaultyTask(), space=space, algorithm=algorithm)
    study.run(progress=False)
    failed = [t for t in study.trials if t.state == "failed"]
    assert all("DivergedError" in t.error for t in failed)
    assert np.isfinite(study.best_trial.value)


def test_a_metric_that_is_no_number_fails_the_trial(tmp_path):
    class Nan(LineTask):
        def metrics(self, model, batch):
            return {"mse": float("nan")}

    study = make_study(tmp_path, task=Nan()).run(progress=False)
    assert {t.state for t in study.trials} == {"failed"}
    with pytest.raises(ThriftyError, match=r"all trials.*\n.*mse is nan after"):
        assert study.best_trial


def test_a_killed_worker_is_replaced(tmp_path):
    fuse = tmp_path / "fuse"
    fuse.write_text("")
    space = faulty(MultiStep(["", "die"], milestones=[2]))
    study = make_study(tmp_path, task=FaultyTask(fuse=str(fuse)), space=space)
    study.run(executor=Local(workers=2, threads=1), progress=False)
    assert {t.state for t in study.trials} == {"done"}
    assert not fuse.exists()


def test_a_stage_that_always_kills_its_worker_fails_in_the_end(tmp_path):
    space = Space(lr=0.05, fault=Choice([Constant(""), MultiStep(["", "die"], milestones=[2])]))
    study = make_study(tmp_path, task=FaultyTask(), space=space)
    study.run(executor=Local(workers=2, threads=1), progress=False)
    assert [t.state for t in study.trials] == ["done", "failed"]
    assert "killed by signal 9" in study.trials[1].error


def test_worker_processes_leave_the_same_records(tmp_path):
    algorithm = SuccessiveHalving(max_epochs=6, num_trials=12, eta=2)
    found = []
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        study = make_study(tmp_path / str(workers), algorithm=algorithm)
        study.run(executor=Local(workers=workers, threads=1), progress=False)
        found.append(records(study))
    assert found[0] == found[1]


class Damage:
    """Observer that damages every checkpoint as soon as it is written."""

    def __init__(self, study) -> None:
        self._root = study.storage.url.removeprefix("sqlite:///").replace("t.db", "t-checkpoints")
        self.num_damaged = 0

    def on_event(self, event) -> None:
        if isinstance(event, StageDone) and event.checkpoint and self.num_damaged < 20:
            with open(f"{self._root}/{event.checkpoint.path}", "r+b") as file:  # noqa: PTH123
                file.write(b"damage")
            self.num_damaged += 1


def test_damaged_checkpoints_are_trained_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("thrifty.run._running_chain.CACHE_BYTES", 0)
    algorithm = SuccessiveHalving(max_epochs=6, num_trials=8, eta=2)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = make_study(tmp_path / "a", algorithm=algorithm).run(progress=False)
    study = make_study(tmp_path / "b", algorithm=algorithm)
    study.run(progress=False, observers=[Damage(study)])
    assert [t.curve for t in study.trials] == [t.curve for t in whole.trials]
    assert "damaged" in caplog.text
    model = study.best_trial.load_model()  # its own checkpoint is damaged as well
    assert isinstance(model, torch.nn.Module)


def test_a_full_disk_stops_the_study_and_it_goes_on_later(tmp_path, monkeypatch):
    study = make_study(tmp_path)
    with monkeypatch.context() as patch:

        def full(*args, **kwargs):
            raise StoreWriteError("cannot write: free some disk space")

        patch.setattr("thrifty.store.CheckpointFolder.write", full)
        with pytest.raises(StoreWriteError, match="free some disk space"):
            study.run(progress=False)
    study.run(progress=False)
    assert {t.state for t in study.trials} == {"done"}


def test_a_disk_budget_is_kept_and_changes_nothing(tmp_path):
    algorithm = SuccessiveHalving(max_epochs=6, num_trials=12, eta=2)
    for name in ("free", "tight"):
        (tmp_path / name).mkdir()
    free = make_study(tmp_path / "free", algorithm=algorithm).run(progress=False)
    url = f"sqlite:///{tmp_path}/tight/t.db"
    tight = make_study(
        tmp_path, algorithm=algorithm, storage=Storage(url=url, disk_budget_bytes=4000)
    ).run(progress=False)
    assert [t.curve for t in tight.trials] == [t.curve for t in free.trials]
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / name).rglob("*.safetensors"))
        for name in ("free", "tight")
    ]
    assert sizes[1] < sizes[0]


# -- resuming ------------------------------------------------------------------------------


def test_ctrl_c_stops_cleanly_and_nothing_is_trained_again(tmp_path):
    (tmp_path / "a").mkdir()
    whole = make_study(tmp_path / "a")
    num_epochs = trained(whole)
    study = make_study(tmp_path)
    study.run(progress=False, observers=[StopAfter(7)])
    with Store.open(study.storage.url) as store:
        assert store.studies.get("s").state == "stopped"
        assert len(store.plans.load(1).epochs) == 7
    assert trained(make_study(tmp_path)) == num_epochs - 7
    assert [t.curve for t in make_study(tmp_path).trials] == [t.curve for t in whole.trials]


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    class Impatient:
        def on_event(self, event) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        make_study(tmp_path).run(progress=False, observers=[Impatient()])
    assert trained(make_study(tmp_path)) > 0


def test_a_study_that_is_done_is_only_read(tmp_path):
    assert trained(make_study(tmp_path)) > 0
    assert trained(make_study(tmp_path)) == 0
    assert make_study(tmp_path).best_trial.value is not None


def test_studies_of_the_same_task_share_what_was_trained(tmp_path):
    first = trained(make_study(tmp_path))
    assert trained(make_study(tmp_path, name="again")) == 0
    assert trained(make_study(tmp_path, name="another seed", seed=1)) == first


def test_a_different_study_of_the_same_name(tmp_path):
    make_study(tmp_path).run(progress=False)
    with pytest.raises(StudyMismatchError, match=r"algorithm was.*another name"):
        make_study(tmp_path, algorithm=GridSearch(max_epochs=5)).run(progress=False)
    said = r"the task has changed \(task was LineTask and is FaultyTask"
    with pytest.raises(StudyMismatchError, match=said):
        make_study(tmp_path, task=FaultyTask()).run(progress=False)
    with pytest.raises(StudyMismatchError, match=r": seed was 0 and is 1\. Give"):
        make_study(tmp_path, seed=1).run(progress=False)
    with pytest.raises(StudyMismatchError, match=r"and is {'lr': 'Choice\(options=\(0\.1,\)\)'}"):
        make_study(tmp_path, space=Space(lr=Choice([0.1]))).run(progress=False)


def test_a_study_whose_meaning_another_version_changed(tmp_path, monkeypatch):
    make_study(tmp_path).run(progress=False)
    monkeypatch.setattr("thrifty.study._identity.VERSION", -1)
    with pytest.raises(StudyMismatchError, match="another version of thrifty"):
        make_study(tmp_path).run(progress=False)


@pytest.mark.parametrize("shared", [False, True])
def test_two_processes_on_one_study(tmp_path, shared):
    storage = Storage(url=f"sqlite:///{tmp_path}/t.db", shared=shared)
    study = make_study(tmp_path, storage=storage)
    repository = study._repository()
    with repository.open() as store:
        plan = store.plans.open(repository.recipe.plan_identity(), task="T").id
        info = repository.make(store, plan=plan, file=None, enqueued=(), sources=())
        with store.lease(info, shared=shared), pytest.raises(StoreBusyError, match="being run"):
            study.run(progress=False)


def test_a_simulation_of_the_study(tmp_path, monkeypatch):
    study = make_study(tmp_path)
    with pytest.raises(UsageError, match=r"give simulate\(epoch_s=...\)"):
        study.simulate(workers=2)
    assert study.simulate(workers=2, epoch_s=1.0).unique_epochs == study.plan().unique_epochs
    study.run(progress=False)
    monkeypatch.setattr("thrifty.study._study.mean_epoch_s", lambda _: 100.0)
    measured = study.simulate(workers=1)
    assert measured.busy_s == pytest.approx(100.0 * study.savings.unique_epochs, rel=0.01)


# -- results -------------------------------------------------------------------------------


def test_the_best_model_is_the_one_that_was_trained(tmp_path):
    study = make_study(tmp_path).run(progress=False)
    best = study.best_trial
    assert best.value == min(t.value for t in study.trials)
    x = torch.linspace(-1, 1, 32)[:, None]
    with torch.no_grad():
        mse = torch.nn.functional.mse_loss(best.load_model()(x), 2 * x + 1)
    assert float(mse) == pytest.approx(best.value, rel=1e-5)


def test_savings_count_what_was_shared(tmp_path):
    space = Space(lr=Choice([0.1, Step(0.1, [2]), Step(0.1, [4])]))
    study = make_study(tmp_path, space=space)
    study.run(progress=False, executor=Local(pack="solo"))
    assert (study.savings.trial_epochs, study.savings.unique_epochs) == (18, 12)
    assert study.savings.epochs == 6
    assert study.savings.packed_epochs == 0
    assert study.savings.packed_factor == pytest.approx(
        1.0 - study.savings.seconds_checks / study.savings.seconds
    )
    assert "6 saved" in str(study.savings)


def test_the_plan_is_exact_where_nothing_depends_on_results(tmp_path):
    study = make_study(tmp_path)
    forecast = study.plan()
    assert forecast.exact
    assert forecast.seconds is None
    assert forecast.unique_epochs == trained(study)
    assert study.plan().seconds > 0


def test_the_plan_of_an_adaptive_study_holds_the_truth(tmp_path):
    study = make_study(tmp_path, algorithm=Hyperband(max_epochs=6, eta=2))
    low, high = study.plan().unique_range
    assert not study.plan().exact
    assert low <= trained(study) <= high * 1.5
    assert "merge rate" in str(study.plan())


class WithAccuracy(LineTask):
    """Reports more than the study compares."""

    def metrics(self, model, batch):
        return {**super().metrics(model, batch), "size": 1.0 + model.weight.square().sum()}


@pytest.mark.parametrize("seeds", [1, 2])
def test_metrics_that_are_no_objective_are_results_too(seeds, tmp_path):
    study = Study(
        WithAccuracy(),
        Space(lr=Choice([0.1, 0.2])),
        algorithm=GridSearch(max_epochs=3),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="more",
        seeds=seeds,
    )
    assert study.run(progress=False).best_trial.metrics.keys() == {"mse", "size", "train_loss"}
    for trial in study.trials:
        assert [each["mse"] for each in trial.history] == list(trial.curve)
        assert trial.metrics == trial.history[-1]
        assert trial.metrics["size"] > 1
    frame = study.trials_dataframe()
    assert list(frame["metrics_size"]) == [trial.metrics["size"] for trial in study.trials]
    assert "metrics_mse" not in frame


def test_tables_and_pictures(tmp_path):
    study = make_study(tmp_path).run(progress=False)
    frame = study.trials_dataframe()
    assert list(frame["number"]) == list(range(len(study.trials)))
    assert {"params_lr", "params_width", "value"} <= set(frame.columns)
    assert study.plot_forest().axes
    assert study.plot_learning_curves().axes
    assert sum(s.stop - s.start for s in study.forest()) == study.savings.unique_epochs
    assert study.trials_dataframe(backend="polars")["number"].to_list() == list(frame["number"])


@pytest.mark.parametrize(
    ("module", "call"), [("pandas", "trials_dataframe"), ("matplotlib", "plot_forest")]
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, module, call):
    study = make_study(tmp_path).run(progress=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match="pip install"):
        getattr(study, call)()


def test_results_before_any(tmp_path):
    with pytest.raises(StudyNotFoundError):
        assert make_study(tmp_path).trials
    with Store.open(f"sqlite:///{tmp_path}/t.db") as store:
        store.studies.create("s", plan=store.plans.open("x", task="T").id, spec={})
    with pytest.raises(ThriftyError, match="no results yet"):
        assert make_study(tmp_path).best_trial


def test_an_untrained_trial_has_no_model(tmp_path):
    study = make_study(tmp_path)
    study.run(progress=False, observers=[StopAfter(1)])
    with pytest.raises(UsageError, match="no model to load"):
        study.trials[-1].load_model()


def test_progress_is_shown(tmp_path, capsys):
    make_study(tmp_path).run()
    assert "unique epochs" in capsys.readouterr().err


def test_progress_fits_a_terminal_of_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    make_study(tmp_path).run()
    said = capsys.readouterr().err
    assert "unique epochs" in said
    assert "epochs saved" in said
    assert "…" not in said


class Counter(Trainable):
    """Trainable with a loop of its own: counts, and adds its hyper-parameter."""

    def setup(self, hp, *, seed, device):
        self.total = 0.0

    def train(self, epoch, hp):
        self.total += hp.add

    def evaluate(self):
        return {"mse": self.total}

    def state(self):
        return {"total": self.total, "history": [torch.tensor(self.total)]}

    def load_state(self, state):
        self.total = state["total"]


def test_a_loop_of_its_own_shares_stages_too(tmp_path):
    space = Space(add=Choice([1.0, MultiStep([1.0, 2.0], milestones=[4])]))
    study = make_study(tmp_path, task=Counter(), space=space).run(progress=False)
    assert [t.value for t in study.trials] == [6.0, 8.0]
    assert study.savings.unique_epochs == 8
    with pytest.raises(TaskError, match="has no model to load"):
        study.best_trial.load_model()
    with pytest.raises(TaskError, match="owns its loop, so thrifty averages none of its weights"):
        study.best_trial.load_model(average="ema")


def test_random_search_over_floats(tmp_path):
    algorithm = RandomSearch(max_epochs=2, num_trials=3)
    study = make_study(tmp_path, space=Space(lr=Float(0.01, 0.1)), algorithm=algorithm)
    assert len(study.run(progress=False).trials) == 3


def test_a_damaged_database_says_so(tmp_path):
    study = make_study(tmp_path)
    (tmp_path / "t.db").write_bytes(b"x" * 5000)
    with pytest.raises(StoreError, match="damaged"):
        study.run(progress=False)


def test_an_optimizer_may_depend_on_hyper_parameters(tmp_path):
    class Task(LineTask):
        def optimizer(self, hp):
            return SGD(lr="lr", momentum=hp.get("momentum", 0.0))

    study = make_study(tmp_path, task=Task(), space=Space(lr=0.1, momentum=Choice([0.0, 0.9])))
    first, second = study.run(progress=False).trials
    assert first.curve != second.curve


class UntilTheNextHeartbeat(LineTask):
    """A task whose first evaluation ends once the lease has another heartbeat."""

    not_state = ("path",)

    def __init__(self, path):
        super().__init__()
        self.path = path

    def identity(self):
        return {}

    def metrics(self, model, batch):
        with closing(sqlite3.connect(self.path)) as connection:
            first = self.beat(connection)
            while first is not None and self.beat(connection) == first:
                time.sleep(0.01)  # there is no lease in the dry run before
        return super().metrics(model, batch)

    def beat(self, connection):
        found = connection.execute("select heartbeat from leases").fetchall()
        return found[0] if found else None


def test_a_long_epoch_in_this_process_does_not_look_like_a_dead_one(tmp_path, monkeypatch):
    """Processes on other machines know of it only by its heartbeats."""
    often = functools.partial(Heartbeat, every_s=0.05)
    monkeypatch.setattr("thrifty.study._session.Heartbeat", often)
    study = Study(
        UntilTheNextHeartbeat(str(tmp_path / "t.db")),
        Space(lr=0.1),
        algorithm=GridSearch(max_epochs=1),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="slow",
    )
    assert study.run(progress=False, executor=SOLO).best_trial.epochs == 1
