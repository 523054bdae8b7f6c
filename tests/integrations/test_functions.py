"""Training functions keep their loop: what they suggest is the space, and prefixes are shared."""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import queue
import random
import tempfile
import textwrap
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import cycle
from pathlib import Path
from types import MappingProxyType

import cloudpickle
import numpy as np
import pytest
import torch

import thrifty as th
from tests.study.processes import run_script
from thrifty.core import SpaceError, StateError, TaskError, UsageError, derive_seed
from thrifty.integrations.functions._exploration import explore, space_of
from thrifty.integrations.functions._exploration_main import suggested
from thrifty.integrations.functions._function_state import Kept
from thrifty.integrations.functions._loop_trial import Scheduled
from thrifty.pack._state import seed_everything
from thrifty.pack.trial._left_gradients import gradients_noted
from thrifty.pack.verify import tensor_content
from thrifty.space import Timeline
from thrifty.store import Store


pytestmark = pytest.mark.slow

ONE = th.Local(threads=1)


def points():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 4, generator=generator)
    return x, (x[:, :1] * 2 - x[:, 1:2]).tanh()


@th.trainable
def train(trial):
    lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]), th.Step(0.1, [3]))
    width = trial.suggest_int("width", 4, 8, step=4)
    x, y = points()
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width), torch.nn.Dropout(0.1), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr.value, momentum=0.9)
    for _epoch in trial.epochs({"model": model, "optimizer": optimizer}):
        for group in optimizer.param_groups:
            group["lr"] = lr.value
        model.train()
        for rows in torch.randperm(len(x)).split(16):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(x), y)
        yield {"loss": loss.item()}


def study_of(task, folder, *, name="s", epochs=4, **options):
    return th.Study(
        task,
        algorithm=th.GridSearch(max_epochs=epochs),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name=name,
        **options,
    )


# -- one trial -----------------------------------------------------------------------------


def test_prefixes_are_shared_and_each_trial_is_as_if_trained_alone(tmp_path):
    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    assert (study.savings.trial_epochs, study.savings.unique_epochs) == (24, 14)
    for trial in study.trials:
        (other,) = alone_trials(train, tmp_path, trial.config)
        assert other.curve == trial.curve


def test_functions_with_long_epochs_are_shared_too(tmp_path, monkeypatch, caplog):
    """Epochs that are too long to be trained again for the comparison with a restored trial."""
    monkeypatch.setattr("thrifty.pack.trial._state_check.SHORT_S", 0.0)
    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    assert study.savings.unique_epochs == 14
    assert [trial.state for trial in study.trials] == ["done"] * len(study.trials)
    assert "checkpoint" not in caplog.text


def test_the_same_as_a_plain_loop(tmp_path):
    config = {"lr": 0.1, "width": 4}
    (trial,) = (
        study_of(train, tmp_path, space=th.Space(**config)).run(progress=False, executor=ONE).trials
    )
    assert trial.curve == tuple(plain_losses(seed=0))


def plain_losses(*, seed, epochs=4):
    """Train as `train` does, in one piece and without thrifty but for its seeds."""
    seed_everything(derive_seed(seed, "model"))
    x, y = points()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        seed_everything(derive_seed(seed, "epoch", epoch))
        model.train()
        for rows in torch.randperm(len(x)).split(16):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            yield torch.nn.functional.mse_loss(model(x), y).item()


def test_the_best_model_is_loaded(tmp_path):
    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    model = study.best_trial.load_model()
    x, y = points()
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model.eval()(x), y).item()
    assert loss == study.best_trial.value


def test_a_study_goes_on_where_it_stopped(tmp_path):
    whole = study_of(train, tmp_path, name="whole").run(progress=False, executor=ONE)
    expected = [trial.curve for trial in whole.trials]
    (tmp_path / "parts").mkdir()
    for epochs in (3, 7, 100):
        study = study_of(train, tmp_path / "parts")
        study.run(progress=False, executor=ONE, stop=th.StopWhen(epochs=epochs))
    assert [trial.curve for trial in study.trials] == expected
    assert study.savings.unique_epochs == 14


def test_everything_that_can_be_kept(tmp_path):
    @th.trainable
    def noisy(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        state = {
            "torch": torch.Generator().manual_seed(3),
            "numpy": np.random.default_rng(3),
            "old": np.random.RandomState(3),
            "python": random.Random(3),
            "x": torch.zeros(2),
            "best": 1.0,
            "seen": [],
            "notes": {"text": "a"},
        }
        for epoch in trial.epochs(state):
            noise = torch.rand(2, generator=state["torch"]) + state["numpy"].random()
            noise = noise + state["old"].rand() + state["python"].random()
            state["x"] = state["x"] + lr.value * noise
            state["seen"].append(epoch)
            state["best"] = min(state["best"], float(state["x"].sum()))
            state["notes"]["text"] += "b"
            yield {
                "loss": float(state["x"].sum()) + state["best"],
                "seen": len(state["seen"]),
                "text": len(state["notes"]["text"]),
            }

    study = study_of(noisy, tmp_path).run(progress=False, executor=ONE)
    assert study.savings.unique_epochs == 6
    with Store.open(study.storage.url) as store:
        (last, *_) = [e.metrics for e in store.plans.load(1).epochs if e.epoch == 4]
    assert (last["seen"], last["text"]) == (4, 5)
    apart = study_of(noisy, tmp_path, name="apart", space=th.Space(lr=th.Step(0.1, [2])))
    assert apart.plan().epochs_to_train == 0


@th.trainable
def impatient(trial):
    lr = trial.suggest_schedule("lr", 0.3, th.Step(0.3, [2]), th.Step(0.3, [4]), th.Step(0.3, [5]))
    patience = trial.suggest_categorical("patience", [1, 2])
    state = {"x": 1.0, "bad": 0, "best": None}
    for _epoch in trial.epochs(state):
        if state["bad"] > patience:
            return
        state["x"] = abs(state["x"] - lr.value)
        better = state["best"] is None or state["x"] < state["best"]
        state["bad"] = 0 if better else state["bad"] + 1
        state["best"] = state["x"] if better else state["best"]
        yield {"loss": state["x"], "best": state["best"]}


def test_a_function_may_end_early(tmp_path):
    study = study_of(impatient, tmp_path, epochs=9).run(progress=False, executor=ONE)
    ends = set()
    for trial in study.trials:
        expected = plain_curve(trial.config)
        ends.add(len(expected))
        assert trial.curve == (*expected, *[expected[-1]] * (9 - len(expected)))
    assert len(ends) > 2
    parts = tmp_path / "parts"
    parts.mkdir()
    for limit in range(8, 90, 8):
        again = study_of(impatient, parts, epochs=9)
        again.run(progress=False, executor=ONE, stop=th.StopWhen(epochs=limit))
    assert [trial.curve for trial in again.trials] == [trial.curve for trial in study.trials]


def plain_curve(config):
    """Return the losses of `impatient` in a plain loop, up to its end."""
    timeline, losses = Timeline(config, epochs=9), []
    x, bad, best = 1.0, 0, None
    for epoch in range(9):
        if bad > config["patience"]:
            break
        x = abs(x - timeline.at(epoch)["lr"])
        better = best is None or x < best
        bad, best = (0, x) if better else (bad + 1, best)
        losses.append(x)
    return tuple(losses)


def test_layers_may_be_unfrozen_in_an_epoch(tmp_path):
    @th.trainable
    def unfreezes(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]), th.Step(0.1, [3]))
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        model[0].requires_grad_(False)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = points()
        for epoch in trial.epochs({"model": model, "sgd": sgd}):
            if epoch == 1:
                model[0].requires_grad_(True)
            sgd.param_groups[0]["lr"] = lr.value
            sgd.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            sgd.step()
            yield {"loss": loss}

    study = study_of(unfreezes, tmp_path, epochs=5).run(progress=False, executor=ONE)
    assert study.savings.unique_epochs == 10
    for trial in study.trials:
        (other,) = alone_trials(unfreezes, tmp_path, trial.config, epochs=5)
        assert other.curve == trial.curve


def test_what_is_in_the_state_may_have_other_names(tmp_path):
    @th.trainable
    def aliases(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        x, seen, notes = torch.ones(2), [], {}
        values = np.zeros(2)
        for epoch in trial.epochs({"x": x, "seen": seen, "notes": notes, "values": values}):
            x.sub_(lr.value * x)
            values += 1
            seen.append(epoch)
            notes[f"epoch {epoch}"] = epoch
            yield {"loss": float(x.sum()) + len(seen) + len(notes) + float(values.sum())}

    study = study_of(aliases, tmp_path).run(progress=False, executor=ONE)
    assert study.savings.unique_epochs == 6
    for trial in study.trials:
        (other,) = alone_trials(aliases, tmp_path, trial.config)
        assert other.curve == trial.curve


def alone_trials(task, folder, config, *, epochs=4):
    with tempfile.TemporaryDirectory(dir=folder) as other:
        study = study_of(task, other, name="alone", epochs=epochs, space=th.Space(**config))
        return study.run(progress=False, executor=ONE).trials


def test_nothing_is_said_about_a_good_function(tmp_path, caplog):
    study_of(train, tmp_path).run(progress=False, executor=ONE)
    assert not caplog.records


@pytest.mark.parametrize("module", ["__main__", "own"])
def test_workers_load_the_function(tmp_path, module):
    (tmp_path / "own.py").write_text(
        textwrap.dedent(f"""
        import sys
        import thrifty as th

        @th.trainable
        def train(trial):
            lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
            point = {{"x": 1.0}}
            for epoch in trial.epochs(point):
                point["x"] -= lr.value * 2 * point["x"]
                yield {{"loss": point["x"] ** 2}}

        study = th.Study(
            train, algorithm=th.GridSearch(max_epochs=4), metric="loss", mode="min",
            storage="sqlite:///{tmp_path}/t.db", name="square",
        )
        if __name__ == "__main__":
            study.run(progress=False, executor=th.Local(workers=2, threads=1))
            print(study.savings.unique_epochs)
        """)
    )
    if module == "own":
        words = f"['thrifty', 'run', '{tmp_path}/own.py', '--quiet']"
        path = tmp_path / "run.py"
        path.write_text(f"import sys, thrifty.cli\nsys.argv = {words}\nthrifty.cli.main()\n")
    else:
        path = tmp_path / "own.py"
    code, printed = run_script(path)
    assert code == 0, printed
    assert "6" in printed


# -- the space -----------------------------------------------------------------------------


def space_found(function):
    return space_of(explore(partial(suggested, function)).runs, function="f")


def test_names_and_ranges_are_those_of_optuna():
    def function(trial):
        trial.suggest_float("a", 0.5, 2.5)
        trial.suggest_float("b", 1e-4, 1.0, log=True)
        trial.suggest_float("c", 0.0, 1.0, step=0.25)
        trial.suggest_int("d", 1, 9, step=2)
        trial.suggest_int("e", 1, 1024, log=True)
        trial.suggest_categorical("f", ["x", None, True, 1, 2.5])
        trial.suggest_schedule("g", th.Cosine(th.Float(0.1, 1.0)))
        trial.suggest_schedule("h", 0.1)
        yield from trial.epochs()

    space = space_found(function)
    assert space["a"] == th.Float(0.5, 2.5)
    assert space["b"] == th.Float(1e-4, 1.0, log=True)
    assert space["c"] == th.Float(0.0, 1.0, step=0.25)
    assert space["d"] == th.Int(1, 9, step=2)
    assert space["e"] == th.Int(1, 1024, log=True)
    assert space["f"] == th.Choice(["x", None, True, 1, 2.5])
    assert space["g"] == th.Cosine(th.Float(0.1, 1.0))
    assert space["h"] == 0.1


def branches(trial):
    kind = trial.suggest_categorical("kind", ["sgd", "adam", "lion"])
    if kind == "sgd":
        nesterov = trial.suggest_categorical("nesterov", [False, True])
        if nesterov:
            trial.suggest_float("momentum", 0.5, 0.99)
    else:
        trial.suggest_float("beta", 0.5, 0.99)
    for layer in range(trial.suggest_int("layers", 1, 3)):
        trial.suggest_int(f"width_{layer}", 4, 64, log=True)
    deep = trial.suggest_categorical("deep", [False, True])
    if deep and kind == "lion":
        trial.suggest_float("both", 0.0, 1.0)
    yield from trial.epochs()


def test_conditions_are_found():
    space = space_found(branches)
    assert space["nesterov"] == th.Choice([False, True]).when(kind="sgd")
    assert space["momentum"] == th.Float(0.5, 0.99).when(nesterov=[True])
    assert space["beta"] == th.Float(0.5, 0.99).when(kind=["adam", "lion"])
    assert space["width_0"] == th.Int(4, 64, log=True)
    assert space["width_1"] == th.Int(4, 64, log=True).when(layers=[2, 3])
    assert space["width_2"] == th.Int(4, 64, log=True).when(layers=[3])
    assert {c.name for c in space["both"].conditions} == {"deep", "kind"}


def test_what_is_drawn_is_what_is_suggested():
    space, rng = space_found(branches), np.random.default_rng(0)
    for _ in range(200):
        config = space.sample(rng)
        asked = suggested(branches, config)
        assert {name: answer for name, _, answer in asked} == config


def test_a_threshold_of_a_real_number_needs_no_condition():
    def function(trial):
        if trial.suggest_float("rate", 0.0, 1.0) > 0.5:
            trial.suggest_int("extra", 1, 3)
        yield from trial.epochs()

    assert space_found(function)["extra"] == th.Int(1, 3)


def test_answers_that_the_function_refuses_are_left_to_the_trials():
    def function(trial):
        size = trial.suggest_int("size", 1, 3)
        if size == 2:
            raise ValueError("2 is odd")
        trial.suggest_int("other", 1, 3)
        yield from trial.epochs()

    assert space_found(function).names == ("size", "other")


def test_the_time_is_limited():
    def function(trial):
        for number in range(20):
            trial.suggest_int(f"x{number}", 1, 3)
        yield from trial.epochs()

    now = iter(range(0, 10_000, 8))
    found = explore(partial(suggested, function), clock=lambda: next(now))
    assert found.num_untried > 0
    assert len(found.runs) < 6


def after_the_loop(trial):
    for _ in trial.epochs():
        trial.suggest_int("late", 1, 3)
        yield {"loss": 1.0}


def in_two_ways(trial):
    trial.suggest_int("x", 1, 3)
    trial.suggest_int("x", 1, 4)
    yield from trial.epochs()


def ranges(trial):
    high = trial.suggest_int("high", 1, 3)
    trial.suggest_int("x", 1, 4 + high)
    yield from trial.epochs()


def no_loop(trial):
    trial.suggest_int("x", 1, 3)
    yield {"loss": 1.0}


def nothing(trial):
    yield from trial.epochs()


def fails(trial):
    trial.suggest_int("x", 1, 3)
    raise FileNotFoundError("no data")
    yield


@pytest.mark.parametrize(
    ("function", "error", "told"),
    [
        (after_the_loop, SpaceError, "suggests nothing before it trains"),
        (in_two_ways, TaskError, "suggested twice with different values"),
        (ranges, SpaceError, "use one range"),
        (no_loop, TaskError, "does not go through trial.epochs()"),
        (nothing, SpaceError, "suggests nothing"),
        (fails, TaskError, "FileNotFoundError: no data"),
    ],
)
def test_functions_without_a_space(tmp_path, function, error, told):
    with pytest.raises(error, match=told.replace("(", r"\(").replace(")", r"\)")):
        study_of(th.trainable(function), tmp_path).plan()


def test_a_process_that_ends_is_reported(tmp_path):
    @th.trainable
    def leaves(trial):
        os._exit(3)
        yield

    with pytest.raises(TaskError, match="ended its process"):
        study_of(leaves, tmp_path).plan()


def test_a_file_that_runs_its_study_while_it_is_imported(tmp_path):
    (tmp_path / "own.py").write_text(
        textwrap.dedent(f"""
        import thrifty as th

        @th.trainable
        def train(trial):
            trial.suggest_int("x", 1, 3)
            for epoch in trial.epochs():
                yield {{"loss": 1.0}}

        th.Study(
            train, algorithm=th.GridSearch(max_epochs=1), metric="loss", mode="min",
            storage="sqlite:///{tmp_path}/t.db", name="s",
        ).run(progress=False)
        """)
    )
    (tmp_path / "main.py").write_text("import own")
    _, printed = run_script(tmp_path / "main.py")
    assert "put what uses the study under" in printed


def best_of(study):
    return study.run(progress=False, executor=ONE).best_trial


# -- what could go wrong silently ----------------------------------------------------------


def one_epoch(body):
    """Return a function with some code in its loop, around its yield."""
    source = f"""
def made(trial):
    lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [1]))
    state = {{"x": 1.0}}
    for epoch in trial.epochs(state):
{textwrap.indent(textwrap.dedent(body), " " * 8)}
"""
    found = {"th": th, "torch": torch}
    exec(source, found)
    return th.trainable(found["made"])


@th.trainable
def gives_up_early(trial):
    width = trial.suggest_int("width", 1, 2)
    if width == 2:
        return
    for _ in trial.epochs({}):
        yield {"loss": 1.0}


@th.trainable
def loops_in_an_inner_function(trial):
    width = trial.suggest_int("width", 1, 2)

    def loop():
        for _ in trial.epochs({}):
            yield {"loss": width}

    loop()
    if not width:
        yield


def test_a_function_that_returns_before_its_loop_is_told_so():
    study = th.Study(
        gives_up_early,
        algorithm=th.GridSearch(max_epochs=2),
        metric="loss",
        mode="min",
        storage="sqlite://",
        name="early",
    )
    one, two = study.run(progress=False).trials
    assert one.state == "done"
    assert "returns before its loop over trial.epochs(), so this trial has no" in two.error
    with pytest.raises(TaskError, match=r"returns before a loop over .*, with width=1; write the"):
        loops_in_an_inner_function.space()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('yield {"loss": lr.value}\nstate["x"] += 1', "changes its state after the yield"),
        ('yield {"loss": lr.value}\nyield {"loss": 1.0}', "twice in one epoch"),
        ('if epoch != 1: yield {"loss": lr.value}', "goes on without a yield in epoch 1"),
        ('state["x"] += 1\nreturn\nyield', "leaves its loop in epoch 0, before its first yield"),
        (
            'if epoch: return {"loss": 1.0}\nyield {"loss": lr.value}',
            "returns its metrics in epoch 1",
        ),
        (
            'def report():\n    yield {"loss": 1.0}\nreport()\nif epoch > 9: yield',
            "a call of an inner function that yields runs nothing",
        ),
        ('yield {"loss": lr.value}\nif epoch == 1: break', "ends after its yield"),
        (
            'if epoch == 2:\n    state["x"] = 9\n    return\nyield {"loss": lr.value}',
            "changes its state after the yield",
        ),
        ('state["y"] = 1\nyield {"loss": 1.0}', "had x, and has x, y now"),
        ("yield lr.value", "yield"),
        ('with torch.no_grad(): yield {"loss": lr.value}', "yields within a context"),
        ('list(trial.epochs({}))\nyield {"loss": 1.0}', "is called twice"),
        ('trial.suggest_int("y", 1, 3)\nyield {"loss": 1.0}', "suggested after trial.epochs"),
    ],
)
def test_loops_that_would_give_wrong_answers(tmp_path, body, told):
    task = one_epoch(body)
    study = study_of(task, tmp_path, epochs=3, space=th.Space(lr=0.1))
    with pytest.raises(th.ThriftyError, match=told):
        best_of(study)


def test_a_schedule_that_is_read_only_before_the_loop(tmp_path):
    @th.trainable
    def once(trial):
        lr = trial.suggest_schedule("lr", th.Step(0.1, [1])).value
        for _epoch in trial.epochs():
            yield {"loss": lr}

    with pytest.raises(th.ThriftyError, match=r"read its \.value within the loop"):
        best_of(study_of(once, tmp_path))


def test_a_value_that_is_not_among_the_suggestions(tmp_path):
    study = study_of(train, tmp_path, space=th.Space(lr=0.1, width=5, other=1))
    assert study.run(progress=False, executor=ONE).best_trial.config["width"] == 5
    for space, told in ((th.Space(lr=0.1, width=16), "another one"), (th.Space(lr=0.1), "width")):
        with pytest.raises(th.ThriftyError, match=told):
            best_of(study_of(train, tmp_path, name=told, space=space))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (3, "an object of type int"),
        ({"file": open}, "whose state cannot be kept"),
        ({1: 2}, "is no text"),
    ],
)
def test_states_that_cannot_be_kept(tmp_path, state, told):
    @th.trainable
    def keeps(trial):
        trial.suggest_int("x", 1, 3)
        for _epoch in trial.epochs(state):
            yield {"loss": 1.0}

    with pytest.raises(th.ThriftyError, match=told):
        best_of(study_of(keeps, tmp_path, epochs=2))


def counts(trial, state):
    bad = 0
    for epoch in trial.epochs(state):
        bad += epoch % 2
        yield {"loss": bad}


def appends(trial, state):
    history = []
    for epoch in trial.epochs(state):
        history.append(epoch)
        yield {"loss": len(history)}


class Meter:
    def __init__(self):
        self.total = 0


def meters(trial, state):
    meter = Meter()
    for _epoch in trial.epochs(state):
        meter.total += 1
        yield {"loss": meter.total}


def schedules(trial, state):
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    falling = torch.optim.lr_scheduler.StepLR(sgd, 1)
    for _epoch in trial.epochs({"sgd": sgd}):
        sgd.step()
        falling.step()
        yield {"loss": sgd.param_groups[0]["lr"]}


def grows(trial, state):
    weights = torch.zeros(2)
    for _epoch in trial.epochs(state):
        weights += 1
        yield {"loss": weights.sum()}


def numbers(trial, state):
    x = 1.0
    state = {"x": x}
    for _epoch in trial.epochs(state):
        x /= 2
        state["x"] = x
        yield {"loss": x}


def encloses(trial, state):
    num = 0

    def count():
        nonlocal num
        num += 1

    for _epoch in trial.epochs(state):
        count()
        yield {"loss": num}


def iterates(trial, state):
    batches = cycle([1.0, 2.0, 3.0])
    for _epoch in trial.epochs(state):
        yield {"loss": next(batches)}


def averages(trial, state):
    recent = deque(maxlen=4)
    for _epoch in trial.epochs(state):
        recent.append(1.0)
        yield {"loss": 0.1 if len(recent) == 4 else 1.0}


class Patience:
    seen = 0

    def __init__(self):
        self.losses = []

    def add(self, loss):
        self.losses.append(loss)


def calls_a_method(trial, state):
    add = Patience().add
    for _epoch in trial.epochs(state):
        add(1.0)
        yield {"loss": 1.0}


def made():
    num = 0

    def count():
        nonlocal num
        num += 1
        return num

    return count


def calls_what_was_made(trial, state):
    count = made()
    for _epoch in trial.epochs(state):
        yield {"loss": 0.1 if count() > 3 else 1.0}


def calls_in_part(trial, state):
    add = partial(list.append, [])
    for _epoch in trial.epochs(state):
        add(1.0)
        yield {"loss": 1.0}


def draws(trial, state, make):
    stream = make()
    for _epoch in trial.epochs(state):
        if isinstance(stream, torch.Generator):
            torch.rand(1, generator=stream)
        else:
            stream.random()
        yield {"loss": 1.0}


def counts_in_a_class(trial, state):
    for _epoch in trial.epochs(state):
        Patience.seen += 1
        yield {"loss": 1.0}


LOSSES: list[float] = []


def appends_to_a_global(trial, state):
    for _epoch in trial.epochs(state):
        LOSSES.append(1.0)
        yield {"loss": 1.0}


def note_a_loss():
    LOSSES.append(1.0)


def calls_what_appends(trial, state):
    for _epoch in trial.epochs(state):
        note_a_loss()
        yield {"loss": 1.0}


def adds_an_attribute(trial, state):
    model = torch.nn.Linear(1, 1)
    for _epoch in trial.epochs({**state, "model": model}):
        model.num_calls = getattr(model, "num_calls", 0) + 1
        yield {"loss": 1.0}


def adds_to_an_optimizer(trial, state):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.num_calls = 0
    for _epoch in trial.epochs({**state, "model": model, "optimizer": optimizer}):
        optimizer.num_calls += 1
        yield {"loss": 1.0}


def counts_in_a_hook(trial, state):
    model, seen = torch.nn.Linear(1, 1), []
    model.register_forward_hook(lambda *_: seen.append(1))
    for _epoch in trial.epochs({**state, "model": model}):
        model(torch.ones(1))
        yield {"loss": 1.0}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (counts, "bad"),
        (appends, "history"),
        (meters, "meter"),
        (schedules, "falling"),
        (grows, "weights"),
        (numbers, "x"),
        (encloses, "num"),
        (iterates, "batches"),
        (averages, "recent"),
        (calls_a_method, "add"),
        (calls_what_was_made, "count"),
        (calls_in_part, "add"),
        (partial(draws, make=partial(np.random.default_rng, 0)), "stream"),
        (partial(draws, make=partial(np.random.RandomState, 0)), "stream"),
        (partial(draws, make=partial(random.Random, 0)), "stream"),
        (partial(draws, make=torch.Generator), "stream"),
        (counts_in_a_class, "Patience"),
        (appends_to_a_global, "LOSSES"),
        (calls_what_appends, "note_a_loss"),
        (adds_an_attribute, "model"),
        (adds_to_an_optimizer, "optimizer"),
        (counts_in_a_hook, "model"),
    ],
)
def test_variables_that_would_be_lost_are_named(function, name):
    with pytest.raises(TaskError, match=f"'{name}'"):
        lost_by(function)


class Inside:
    """An object that holds another one, deep inside of others."""

    def __init__(self, value):
        self.held = {"all": [Holder(Holder(value))]}

    @property
    def value(self):
        return self.held["all"][0].value.value


class Holder:
    def __init__(self, value):
        self.value = value


def naturals():
    num = 0
    while True:
        yield num
        num += 1


def add_in_place(value):
    value.data.mul_(0.5).add_(1.0)


def add_through_numpy(value):
    value.numpy()[-1] += 1


def overwrite(value):
    value.tail[0] = (1.0, -1)


def write(value):
    value.seek(0)
    value.write(b"x" * 2)


def read_a_part(value):
    value.read(2)


def count(value):
    value.value += 1


def frame():
    return pytest.importorskip("pandas").DataFrame({"loss": [0.0, 0.0]})


def write_to_a_frame(value):
    value.loc[0, "loss"] += 1.0


class Buffer:
    """A ring of many entries."""

    def __init__(self):
        self.tail = [(0.0, i) for i in range(30_000)]


HOLDERS = {
    "data": (lambda: torch.zeros(2000), add_in_place),
    "memory of an array": (lambda: torch.zeros(2000), add_through_numpy),
    "a network": (lambda: torch.nn.Linear(1, 1), lambda v: add_in_place(v.weight)),
    "array": (lambda: array("d"), lambda v: v.append(1.0)),
    "bytearray": (lambda: bytearray(2), lambda v: v.__setitem__(0, v[0] + 1)),
    "file in memory": (lambda: io.BytesIO(b"ab"), write),
    "text in memory": (io.StringIO, lambda v: v.write("x")),
    "ctypes": (lambda: ctypes.c_double(0.0), count),
    "shared memory": (lambda: multiprocessing.Value("d", 0.0), count),
    "seeds": (lambda: np.random.SeedSequence(3), lambda v: v.spawn(1)),
    "frame": (frame, write_to_a_frame),
    "many entries": (Buffer, overwrite),
}
ITERATORS = {
    "cycle": lambda: cycle([0.1, 0.5, 2.0]),
    "generator": naturals,
    "iterator of a list": lambda: iter([1.0] * 9),
}


def changes(trial, state, *, make, change):
    held = make()
    for _epoch in trial.epochs(state):
        change(held)
        yield {"loss": 1.0}


def changes_inside(trial, state, *, make, change):
    held = Inside(make())
    for _epoch in trial.epochs(state):
        change(held.value)
        yield {"loss": 1.0}


@pytest.mark.parametrize("function", [changes, changes_inside])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_compiled_code_keeps_is_looked_at(function, holder):
    make, change = HOLDERS[holder]
    with pytest.raises(TaskError, match="changes the variable 'held'"):
        lost_by(partial(function, make=make, change=change))
    assert unread_by(partial(function, make=make, change=lambda _: None)) == []


@pytest.mark.parametrize("iterator", ITERATORS)
def test_iterators_in_objects_are_looked_at(iterator):
    with pytest.raises(TaskError, match="changes the variable 'held'"):
        lost_by(partial(changes_inside, make=ITERATORS[iterator], change=next))


class Unreadable:
    """An object with something that says nothing of its content."""

    def __init__(self):
        self.queue = queue.SimpleQueue()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (queue.SimpleQueue, lambda v: v.put(1)),
        (Unreadable, lambda v: v.queue.put(1)),
        (lambda: io.BytesIO(b"abcdefgh"), read_a_part),
        (lambda: [Holder(i) for i in range(20_000)], lambda v: setattr(v[0], "value", 9)),
    ],
)
def test_what_cannot_be_read_is_named(make, change):
    assert unread_by(partial(changes, make=make, change=change)) == ["held"]
    ignoring = partial(ignores_what_it_changes, make=make, change=change)
    assert unread_by(ignoring) == []


def ignores_what_it_changes(trial, state, *, make, change):
    held = make()
    for _epoch in trial.epochs(state, ignore=["held"]):
        change(held)
        yield {"loss": 1.0}


@th.trainable
def queues(trial):
    width = trial.suggest_schedule("width", 1.0, th.Step(1.0, [2]))
    waiting, total = queue.SimpleQueue(), {"loss": 0.0}
    for _epoch in trial.epochs(total):
        total["loss"] += waiting.qsize() * width.value
        waiting.put(1)
        yield {"loss": total["loss"]}


def test_long_epochs_with_what_cannot_be_read_are_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr("thrifty.pack.trial._state_check.SHORT_S", 0.0)
    with pytest.raises(StateError, match=r"'waiting \(its content is hidden\)'"):
        study_of(queues, tmp_path).run(progress=False, executor=ONE)


class Lazy(Mapping):
    """A store that makes its values when they are read."""

    def __len__(self):
        return 10**6

    def __iter__(self):
        return iter(range(len(self)))

    def __getitem__(self, key):
        return torch.full((2,), float(key))


OPENED: list[np.lib.npyio.NpzFile] = []


@pytest.fixture
def closing():
    """Close the files that are opened while a test runs."""
    yield
    while OPENED:
        OPENED.pop().close()


def opened(folder):
    np.savez(folder / "d.npz", a=np.ones(3), b=np.zeros(5))
    OPENED.append(np.load(folder / "d.npz"))
    return OPENED[-1]


def kept_arrays(trial, state):
    model, bank = torch.nn.Linear(2, 2), np.zeros(3)
    weight, plain, view = model.weight.data, model.weight.detach().numpy(), bank[1:]
    for _epoch in trial.epochs({**state, "model": model, "bank": bank}):
        weight.add_(1.0)
        view += 1.0
        yield {"loss": float(plain.sum() + view.sum())}


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (opened, lambda v: v["a"]),
        (lambda _: Lazy(), lambda v: v[3]),
        (lambda _: infer(), torch.clone),
        (lambda _: torch.eye(3).to_sparse(), torch.Tensor.to_dense),
        (lambda _: np.array([{}, None]), len),
        (lambda _: MappingProxyType({"a": [1]}), len),
        (lambda _: threading.Lock(), lambda v: v.locked()),
        (lambda _: torch.zeros(3, device="meta"), len),
    ],
)
@pytest.mark.usefixtures("closing")
def test_what_is_only_read_may_be_lost(tmp_path, make, read):
    function = partial(changes, make=partial(make, tmp_path), change=read)
    assert unread_by(function) == []


def infer():
    with torch.inference_mode():
        return torch.ones(3)


def test_arrays_over_the_memory_of_what_is_kept_may_be_lost():
    lost_by(kept_arrays)


def swaps(trial, state):
    first, second = Holder([0]), Holder([0])
    held = [first, second, first]
    for _epoch in trial.epochs(state):
        held[2] = second
        yield {"loss": 1.0}


def moves_on(trial, state):
    bank = torch.zeros(4)
    held = bank[:2]
    for _epoch in trial.epochs({**state, "bank": bank}):
        held.add_(1.0)
        held = bank[2:]
        yield {"loss": 1.0}


@pytest.mark.parametrize("function", [swaps, moves_on])
def test_other_objects_of_equal_content_are_looked_at(function):
    with pytest.raises(TaskError, match="'held'"):
        lost_by(function)


class Frozen(ctypes.c_double):
    """A number of compiled code, to which the user adds something."""


def test_what_is_added_to_compiled_code_is_looked_at():
    def make():
        found = Frozen(0.0)
        found.seen = []
        return found

    with pytest.raises(TaskError, match="'held'"):
        lost_by(partial(changes, make=make, change=lambda v: v.seen.append(1)))


def test_large_tensors_are_read_in_the_first_look_only(monkeypatch):
    reads = []

    def read(one):
        reads.append(one)
        return tensor_content(one)

    monkeypatch.setattr("thrifty.integrations.functions._locals._MAX_BYTES", 8)
    monkeypatch.setattr("thrifty.integrations.functions._locals.tensor_content", read)
    lost_by(partial(changes, make=partial(torch.zeros, 2000), change=len), epochs=4)
    assert len(reads) == 2
    for change in (add_in_place, torch.Tensor.exp_):
        with pytest.raises(TaskError, match="'held'"):
            lost_by(partial(changes, make=partial(torch.zeros, 2000), change=change))


def names_parts(trial, state):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].register_forward_hook(lambda _module, _inputs, out: out + model[1].bias.sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, last, mean = list(model.parameters()), model[1], model[1].running_mean
    for _epoch in trial.epochs({**state, "model": model, "optimizer": optimizer}):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield {"loss": (last.weight.detach() + mean).sum().item()}


def loses_three(trial, state):
    best, bad_epochs, order = 0.0, 0, iter(range(100))
    for _epoch in trial.epochs(state):
        loss = next(order) + best + bad_epochs
        best, bad_epochs = best + 1, bad_epochs + 1
        yield {"loss": loss}


def test_all_variables_that_would_be_lost_are_named_at_once():
    with pytest.raises(TaskError) as caught:
        lost_by(loses_three)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for name in ("best", "bad_epochs", "order"):
        assert any(repr(name) in line for line in lines)


def test_other_names_of_what_is_restored_in_place():
    lost_by(names_parts)


def names_groups(trial, state):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = optimizer.param_groups
    for _epoch in trial.epochs({**state, "model": model, "optimizer": optimizer}):
        groups[0]["lr"] /= 2
        yield {"loss": 1.0}


def test_what_a_restored_optimizer_replaces_is_refused():
    """Its ``load_state_dict`` makes other groups, which the old name does not name."""
    with pytest.raises(TaskError, match="'groups'"):
        lost_by(names_groups)


def test_a_loop_in_an_inner_generator_is_refused():
    def outer(trial, state):
        def inner():
            for _epoch in trial.epochs(state):
                yield {"loss": 1.0}

        yield from inner()

    with pytest.raises(TaskError, match="write the loop in the function itself"):
        lost_by(outer)


@pytest.mark.parametrize("name", ["LOSSES", "model"])
def test_what_is_meant_to_be_lost_is_ignored(name):
    def counts_calls(trial, state):
        model = torch.nn.Linear(1, 1)
        for _epoch in trial.epochs({**state, "model": model}, ignore=[name]):
            if name == "LOSSES":
                LOSSES.append(1.0)
            else:
                model.num_calls = getattr(model, "num_calls", 0) + 1
            yield {"loss": 1.0}

    lost_by(counts_calls)


def unread_by(function):
    """Return the variables that could not be read after some epochs."""
    return lost_by(function).unread()


def lost_by(function, *, epochs=3):
    """Train a function by hand, keep its state after each epoch, and return the task."""
    task = th.trainable(partial(function, state={}))
    hp = th.HyperParameters({"width": 1})
    task.setup(hp, seed=0, device=torch.device("cpu"))
    for epoch in range(epochs):
        task.train(epoch, hp)
        task.state()
    return task


def reads_in_each_round(trial, state):
    loss, began, x = None, time.time(), torch.ones(2)
    for epoch in trial.epochs(state):
        loss = epoch + 1.0
        total = sum(number for number in range(3))
        if epoch > 5:
            loss -= began
        yield {"loss": loss + total + x.sum()}


def ignores(trial, state):
    began, history = time.time(), []
    for epoch in trial.epochs(state, ignore=["began", "history"]):
        history.append(time.time() - began)
        began = time.time()
        yield {"loss": epoch}


@pytest.mark.parametrize("function", [reads_in_each_round, ignores])
def test_variables_that_may_be_lost(function):
    lost_by(function)


def test_names_to_ignore_are_a_list():
    def function(trial, state):
        yield from trial.epochs(state, ignore="began")

    with pytest.raises(TaskError, match="give a list of names"):
        lost_by(function)


def accumulated(optimizer, model, *, every, to_none):
    """Take a step after some batches, as plain loops do; six batches are an epoch."""
    x, y = points()
    for number, rows in enumerate(torch.arange(60).split(10), start=1):
        (torch.nn.functional.mse_loss(model(x[rows]), y[rows]) / every).backward()
        if number % every == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x), y).item()


class MadeByHand:
    """An optimizer without hooks."""

    def __init__(self, parameters, lr, **_):
        self.parameters, self.lr = list(parameters), lr

    def step(self):
        with torch.no_grad():
            for each in self.parameters:
                each -= self.lr * each.grad

    def zero_grad(self, *, set_to_none=True):
        for each in self.parameters:
            each.grad = None if set_to_none else torch.zeros_like(each)

    def state_dict(self):
        return {"lr": self.lr}

    def load_state_dict(self, state):
        self.lr = state["lr"]


def linear(made):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, made(model.parameters(), lr=0.1)


@pytest.mark.parametrize("made", [partial(torch.optim.SGD, momentum=0.9), MadeByHand])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("every", [1, 4, 9])
def test_gradients_that_are_left_go_into_the_next_epoch(every, to_none, made, tmp_path):
    @th.trainable
    def train(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        model, optimizer = linear(made)
        for _epoch in trial.epochs({"model": model, "optimizer": optimizer}):
            if isinstance(optimizer, MadeByHand):
                optimizer.lr = lr.value
            else:
                optimizer.param_groups[0]["lr"] = lr.value
            yield {"loss": accumulated(optimizer, model, every=every, to_none=to_none)}

    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    for trial in study.trials:
        model, optimizer = linear(made)
        curve = []
        for epoch in range(4):
            rate = Timeline(trial.config, epochs=4).at(epoch)["lr"]
            if isinstance(optimizer, MadeByHand):
                optimizer.lr = rate
            else:
                optimizer.param_groups[0]["lr"] = rate
            curve.append(accumulated(optimizer, model, every=every, to_none=to_none))
        assert trial.curve == pytest.approx(curve, rel=1e-6)


def test_gradients_that_an_optimizer_has_used_are_not_in_the_state():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept({"model": model, "optimizer": optimizer})
    with gradients_noted():
        model(torch.ones(1, 1)).sum().backward()
        assert "gradients" in kept.state()["model"]
        optimizer.step()
        assert "gradients" not in kept.state()["model"]
        model(torch.ones(1, 1)).sum().backward()
        assert "gradients" in kept.state()["model"]
    kept.clear_gradients()
    assert model.weight.grad is not None
    with gradients_noted():
        optimizer.step()
    kept.clear_gradients()
    again = torch.nn.Linear(1, 1)
    Kept({"model": again, "optimizer": optimizer}).load(kept.state())
    for each in (model, again):
        with pytest.raises(TaskError, match=r"reads the gradient of 'model.weight'"):
            each.weight.grad.any()
        each.zero_grad(set_to_none=False)
        assert type(each.weight.grad) is torch.Tensor
        assert not each.weight.grad.any(), "with momentum, None would not move the weight"
    model.weight.grad = torch.zeros_like(model.weight).to_sparse()
    assert "gradients" not in kept.state()["model"]


class OwnStep(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class OwnName(torch.optim.SGD):
    pass


class Unused(torch.optim.Optimizer):
    """PyTorch adds hooks to ``step`` of a class at its first instance; this one must have none."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


class Shrinking(Unused):
    """Both classes have a ``step``, and only this one has instances."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99)
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which leaves out ``super().__init__()``."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("make", [Shrinking, lambda *a, **k: Around(torch.optim.SGD(*a, **k))])
def test_steps_of_own_optimizers_call_hooks_as_often_as_in_plain_pytorch(make, tmp_path):
    def loop(optimizer, model, steps):
        x, y = points()
        for rows in torch.arange(60).split(20):
            model.zero_grad()
            torch.nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return {"steps": steps.value, "loss": torch.nn.functional.mse_loss(model(x), y).item()}

    def begun():
        torch.manual_seed(0)
        model, steps = torch.nn.Linear(4, 1), Counted()
        optimizer = make(model.parameters(), lr=0.1)
        hooked = getattr(optimizer, "inner", optimizer)
        hooked.register_step_post_hook(lambda *_: setattr(steps, "value", steps.value + 1))
        return model, optimizer, steps

    @th.trainable
    def train(trial):
        trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        model, optimizer, steps = begun()
        for _ in trial.epochs({"model": model, "optimizer": optimizer, "steps": steps}):
            yield loop(optimizer, model, steps)

    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    model, optimizer, steps = begun()
    wanted = [loop(optimizer, model, steps) for _ in range(4)]
    assert [each["steps"] for each in wanted] == [3, 6, 9, 12]
    for trial in study.trials:
        assert [each["steps"] for each in trial.history] == [3, 6, 9, 12]
        assert trial.value == wanted[-1]["loss"]


class Counted:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Wrapping(torch.optim.Optimizer):
    """A wrapper like that of SAM: it has the groups of a base optimizer, which takes the step."""

    def __init__(self, parameters, base, **options):
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()


class SharingWrapping(Wrapping):
    def __init__(self, parameters, base, **options):
        super().__init__(parameters, base, **options)
        self.base.state = self.state


@pytest.mark.parametrize("kind", [Wrapping, SharingWrapping])
@pytest.mark.parametrize("names_base", [False, True])
def test_an_optimizer_that_wraps_another_one_goes_on_as_it_was(kind, names_base, tmp_path):
    def begun():
        model, _ = linear(torch.optim.SGD)
        return model, kind(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    @th.trainable
    def train(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        model, optimizer = begun()
        more = {"base": optimizer.base} if names_base else {}
        for _epoch in trial.epochs({"model": model, "o": optimizer, **more}):
            optimizer.param_groups[0]["lr"] = lr.value
            yield {"loss": accumulated(optimizer, model, every=1, to_none=True)}

    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    for trial in study.trials:
        model, optimizer = begun()
        curve = []
        for epoch in range(4):
            optimizer.param_groups[0]["lr"] = Timeline(trial.config, epochs=4).at(epoch)["lr"]
            curve.append(accumulated(optimizer, model, every=1, to_none=True))
        assert trial.curve == pytest.approx(curve, rel=1e-6)


def test_what_is_added_to_a_wrapped_optimizer_is_named():
    def function(trial, state):
        model = torch.nn.Linear(1, 1)
        optimizer = Wrapping(model.parameters(), torch.optim.SGD, lr=0.1)
        for epoch in trial.epochs({"o": optimizer, "model": model}):
            optimizer.base.count = epoch
            yield {"loss": epoch}

    with pytest.raises(TaskError, match=r"attribute or a hook of 'o\.base'"):
        lost_by(function)


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))


def in_turns(optimizer, model, epoch):
    """Train one head in each epoch; with momentum, gradients of zero move the other."""
    x, y = points()
    for rows in torch.arange(60).split(20):
        optimizer.zero_grad(set_to_none=False)
        torch.nn.functional.mse_loss(model.heads[epoch % 2](x[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return torch.nn.functional.mse_loss(sum(each(x) for each in model.heads), y).item()


@pytest.mark.parametrize("made", [OwnStep, OwnName, torch.optim.SGD])
def test_an_optimizer_of_the_users_own_moves_weights_without_gradients(made, tmp_path):
    def begun():
        torch.manual_seed(0)
        model = Heads()
        return model, made(model.parameters(), lr=0.1, momentum=0.9)

    @th.trainable
    def train(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        model, optimizer = begun()
        for epoch in trial.epochs({"model": model, "optimizer": optimizer}):
            optimizer.param_groups[0]["lr"] = lr.value
            yield {"loss": in_turns(optimizer, model, epoch)}

    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    for trial in study.trials:
        model, optimizer = begun()
        curve = []
        for epoch in range(4):
            optimizer.param_groups[0]["lr"] = Timeline(trial.config, epochs=4).at(epoch)["lr"]
            curve.append(in_turns(optimizer, model, epoch))
        assert trial.curve == pytest.approx(curve, rel=1e-6)


def test_sparse_gradients_may_be_left(tmp_path):
    def batches(optimizer, model):
        for number, rows in enumerate(torch.arange(12).split(4)):
            (model(rows).square().mean() / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach().square().sum().item()

    def begun():
        torch.manual_seed(0)
        model = torch.nn.Embedding(12, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1)

    @th.trainable
    def train(trial):
        lr = trial.suggest_schedule("lr", 0.1, th.Step(0.1, [2]))
        model, optimizer = begun()
        for _epoch in trial.epochs({"model": model, "optimizer": optimizer}):
            optimizer.param_groups[0]["lr"] = lr.value
            yield {"loss": batches(optimizer, model)}

    study = study_of(train, tmp_path).run(progress=False, executor=ONE)
    for trial in study.trials:
        model, optimizer = begun()
        curve = []
        for epoch in range(4):
            optimizer.param_groups[0]["lr"] = Timeline(trial.config, epochs=4).at(epoch)["lr"]
            curve.append(batches(optimizer, model))
        assert trial.curve == pytest.approx(curve, rel=1e-6)


def test_partial_functions(tmp_path):
    def function(trial, scale):
        x = trial.suggest_int("x", 1, 2)
        for epoch in trial.epochs():
            yield {"loss": scale * x + epoch}

    task = th.trainable(partial(function, scale=2))
    study = study_of(task, tmp_path).run(progress=False, executor=ONE)
    assert study.trials[0].curve == (2, 3, 4, 5)
    other = th.trainable(partial(function, scale=3))
    assert study_of(other, tmp_path, name="other").plan().epochs_to_train == 8


def test_the_first_answers_may_be_refused():
    def function(trial):
        width = trial.suggest_categorical("width", [32, 64])
        heads = trial.suggest_categorical("heads", [3, 4, 8])
        if width % heads:
            raise ValueError("heads")
        yield from trial.epochs()

    assert space_found(function).names == ("width", "heads")


def test_values_in_the_middle_of_a_range_are_tried():
    def function(trial):
        if 0.2 < trial.suggest_float("rate", 0.0, 1.0) < 0.3:
            trial.suggest_int("extra", 1, 3)
        yield from trial.epochs()

    assert space_found(function).names == ("rate", "extra")


def test_a_function_that_catches_everything():
    def function(trial):
        trial.suggest_int("x", 1, 2)
        try:
            yield from trial.epochs()
        except BaseException as error:
            raise RuntimeError("wrapped") from error

    assert space_found(function).names == ("x",)


def test_states_are_checked_before_training(tmp_path):
    def function(trial):
        trial.suggest_int("x", 1, 2)
        yield from trial.epochs({"lock": threading.Lock()})

    with pytest.raises(TaskError, match="whose state cannot be kept"):
        study_of(th.trainable(function), tmp_path).plan()


def test_what_is_no_training_function():
    with pytest.raises(TaskError, match="is no generator function"):
        th.trainable(lambda trial: {"loss": 1.0})

    def two(trial, other):
        yield

    with pytest.raises(TaskError, match="must take one argument"):
        th.trainable(two)
    with pytest.raises(UsageError, match="put @thrifty"):
        study_of(two, Path())


# -- identity ------------------------------------------------------------------------------


def test_another_function_shares_nothing(tmp_path):
    def made(factor):
        @th.trainable
        def function(trial):
            trial.suggest_int("x", 1, 2)
            for _epoch in trial.epochs():
                yield {"loss": factor}

        return function

    study_of(made(1.0), tmp_path, name="a").run(progress=False, executor=ONE)
    assert study_of(made(1.0), tmp_path, name="b").plan().epochs_to_train == 0
    assert study_of(made(2.0), tmp_path, name="c").plan().epochs_to_train == 8


def test_functions_travel(tmp_path):
    assert cloudpickle.loads(cloudpickle.dumps(train)) is train
    assert repr(train) == "<trainable function train>"


@pytest.mark.parametrize("used", [lambda lr: 2 * lr, lambda lr: lr / 2, lambda lr: lr > 0])
def test_a_hyper_parameter_that_may_follow_a_schedule_is_no_number(used):
    lr = Scheduled("lr", answers=None)
    with pytest.raises(TypeError, match=r"read lr\.value in each epoch"):
        used(lr)
