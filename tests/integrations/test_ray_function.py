"""Training functions of Ray Tune run unchanged: their values, their checkpoints, their spaces."""

from __future__ import annotations

import gc
import random
import re
import secrets
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import thrifty as th
from tests.study.helpers import Count, StopAfter
from thrifty.core import SpaceError, StateError, TaskError
from thrifty.integrations.functions import _ray_function
from thrifty.integrations.functions._loop_trial import MAX_WAITING
from thrifty.integrations.functions._ray_space import nested
from thrifty.store import Store


tune = pytest.importorskip("ray.tune")
from ray.train._internal import session as ray_session  # noqa: E402 (where Ray is installed)


pytestmark = pytest.mark.slow

EPOCHS = 6


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def train_with_checkpoints(config):
    """A function as Ray's guides write it: restore, train, save, report."""
    x, y = data()
    model = nn.Sequential(nn.Linear(4, config["model"]["width"]), nn.Dropout(0.2), nn.ReLU())
    model.append(nn.Linear(config["model"]["width"], 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    start = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1
    for epoch in range(start, EPOCHS):
        for batch in torch.randperm(len(x)).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                Path(folder) / "state.pt",
            )
            tune.report(
                {"loss": loss.item(), "epoch": epoch, "note": "only shown"},
                checkpoint=tune.Checkpoint.from_directory(folder),
            )


def train_without_checkpoints(config):
    value = 0.0
    for epoch in range(EPOCHS):
        value += config["lr"] + torch.rand(()).item()
        tune.report({"loss": value, "epoch": epoch})


SPACE = {
    "lr": tune.grid_search([0.1, 0.2, 0.4]),
    "model": {"width": tune.choice([4, 8]), "kind": "mlp"},
}


def study_of(folder, function, *, space=None, algorithm=None, resumes=False):
    return th.Study(
        th.RayFunction(function, resumes=resumes),
        th.ray_space(SPACE if space is None else space),
        algorithm=algorithm or th.GridSearch(max_epochs=EPOCHS),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{folder}/t.db",
        name="ray",
    )


def curves(study):
    return {str(dict(t.config)): t.curve for t in study.trials}


def test_a_function_trains_and_reports_numbers(tmp_path):
    study = study_of(tmp_path, train_with_checkpoints, resumes=True).run(progress=False)
    assert [t.state for t in study.trials] == ["done"] * 6
    assert all(len(t.curve) == EPOCHS for t in study.trials)
    with Store.open(study.storage.url) as store:
        epochs = store.plans.load(1).epochs
    assert {tuple(sorted(each.metrics)) for each in epochs} == {("epoch", "loss")}
    assert ray_session._session is None, "Ray's session is as it was"


def test_trials_go_on_from_checkpoints_as_if_they_had_not_stopped(tmp_path):
    whole = study_of(tmp_path / "whole", train_with_checkpoints, resumes=True).run(progress=False)
    halving = th.SuccessiveHalving(max_epochs=EPOCHS, eta=2, num_trials=6, min_epochs=2)
    count = Count()
    study = study_of(tmp_path, train_with_checkpoints, resumes=True, algorithm=halving)
    study.run(progress=False, observers=[count], executor=th.Local(workers=2))
    full = curves(whole)
    for trial in study.trials:
        wanted = full[str(dict(trial.config))]
        assert trial.curve == wanted[: len(trial.curve)]
    assert any(len(t.curve) == EPOCHS for t in study.trials)
    assert count.epochs == study.savings.unique_epochs < 36


def test_functions_with_long_epochs_go_on_from_checkpoints_too(tmp_path, monkeypatch):
    """Epochs that are too long to be trained again for the comparison with a restored trial."""
    monkeypatch.setattr("thrifty.pack.trial._state_check.SHORT_S", 0.0)
    study = study_of(tmp_path, train_with_checkpoints, resumes=True).run(progress=False)
    assert [t.state for t in study.trials] == ["done"] * 6


def test_a_stopped_study_goes_on_without_training_again(tmp_path):
    whole = study_of(tmp_path / "whole", train_with_checkpoints, resumes=True).run(progress=False)
    study_of(tmp_path, train_with_checkpoints, resumes=True).run(
        progress=False, observers=[StopAfter(8)]
    )
    count = Count()
    study = study_of(tmp_path, train_with_checkpoints, resumes=True)
    study.run(progress=False, observers=[count])
    assert curves(study) == curves(whole)
    assert count.epochs == 36 - 8


def forgets(config):
    """Restore the model but not the momentum of its optimizer."""
    forgets_if(0.9, config["lr"])


@pytest.fixture(autouse=True)
def _unverified():
    """Let each test be a process of its own."""
    _ray_function._VERIFIED.clear()
    _ray_function._NUMBERS.clear()


def lasting(config):
    """Keep what is counted in the process, which shows only in the third epoch."""
    start, counted = 0, 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            start = int((Path(folder) / "epoch").read_text())
    for epoch in range(start, EPOCHS):
        counted = counted + 1
        loss = config["lr"] if epoch < 2 else config["lr"] * counted
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "epoch").write_text(str(epoch + 1))
            (Path(folder) / "other").write_text(secrets.token_hex(4))
            tune.report({"loss": loss}, checkpoint=tune.Checkpoint.from_directory(folder))


def breaks(config):
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            (Path(folder) / "other").read_text()
    for epoch in range(EPOCHS):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "epoch").write_text(str(epoch))
            tune.report({"loss": 0.1}, checkpoint=tune.Checkpoint.from_directory(folder))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (forgets, "after epoch 3, 'loss' is .* if it was not interrupted"),
        (lasting, "after epoch 3"),
        (breaks, "cannot go on from its checkpoint: FileNotFoundError"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_an_error(tmp_path, function, message):
    """Also if each trial is trained in one stage and only a kill would need the checkpoint."""
    study = study_of(tmp_path, function, space={"lr": tune.choice([0.1, 0.2])}, resumes=True)
    with pytest.raises(StateError, match=message):
        study.run(progress=False)
    alone = study_of(tmp_path / "alone", function, space={"lr": tune.choice([0.1, 0.2])})
    assert [t.state for t in alone.run(progress=False).trials] == ["done"] * 2


def late_scheduler(config):
    """Restore all but the place of a scheduler that steps after four epochs."""
    x, y = data()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)
    start = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["epoch"] + 1
    for epoch in range(start, EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        loss = nn.functional.cross_entropy(model(x), y)
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder) / "state.pt")
            checkpoint = tune.Checkpoint.from_directory(folder)
            tune.report({"loss": loss.item()}, checkpoint=checkpoint)


def with_momentum(config):
    return forgets_if(config["momentum"], config["lr"])


def forgets_if(momentum, lr):
    x, y = data()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    start = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["epoch"] + 1
    for epoch in range(start, EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder) / "state.pt")
            checkpoint = tune.Checkpoint.from_directory(folder)
            tune.report({"loss": loss.item()}, checkpoint=checkpoint)


def test_what_shows_late_and_for_some_numbers_only(tmp_path):
    study = study_of(tmp_path, late_scheduler, space={"lr": tune.choice([0.1])}, resumes=True)
    with pytest.raises(StateError, match="after epoch 5"):
        study.run(progress=False)
    space = {"lr": tune.choice([0.1]), "momentum": tune.grid_search([0.0, 0.3])}
    study = study_of(tmp_path / "momentum", with_momentum, space=space, resumes=True)
    executor = th.Local(pack="solo")
    study.run(progress=False, executor=executor, observers=[StopAfter(EPOCHS + 3)])
    with pytest.raises(StateError, match="after epoch 3"):
        study.run(progress=False, executor=executor)


BEST = 10.0


def remembers(config):
    """Keep what the best trial of a process has reached."""
    global BEST
    for _ in range(EPOCHS):
        BEST = min(BEST, config["lr"])
        tune.report({"loss": BEST})


def by_a_helper(config):
    for _ in range(EPOCHS):
        count()
        tune.report({"loss": config["lr"] * COUNTED[0]})


COUNTED = [0]


def count():
    COUNTED[0] += 1


def with_a_closure():
    best = 10.0

    def closes(config):
        nonlocal best
        for _ in range(EPOCHS):
            best = min(best, config["lr"])
            tune.report({"loss": best})

    return closes


@pytest.mark.parametrize(
    ("function", "name"),
    [(remembers, "BEST"), (by_a_helper, "COUNTED"), (with_a_closure(), "best")],
)
def test_numbers_that_trials_leave_behind_are_an_error(tmp_path, function, name):
    """Ray gives each trial a process of its own, so such a function is right there.

    Both trials are made before one of them is trained, as in a pack.
    """
    tasks = [th.RayFunction(function) for _ in range(2)]
    values = [th.HyperParameters({"lr": lr}) for lr in (0.2, 0.1)]
    for task, hp in zip(tasks, values, strict=True):
        task.setup(hp, seed=0, device=torch.device("cpu"))
    tasks[0].train(0, values[0])
    with pytest.raises(StateError, match=f"has changed the variable '{name}'"):
        tasks[1].train(0, values[1])
    tasks[0]._run.stop()


def catches_all(config):
    """Go on after each report, whatever it raises."""
    while True:
        try:
            tune.report({"loss": config["lr"]})
        except:  # noqa: E722
            CAUGHT.append(1)


CAUGHT: list[int] = []


def test_a_function_that_cannot_be_ended_waits(tmp_path):
    task = th.RayFunction(catches_all)
    task.setup(th.HyperParameters({"lr": 0.1}), seed=0, device=torch.device("cpu"))
    task.train(0, th.HyperParameters({"lr": 0.1}))
    run = task._run
    run.stop()
    assert run.has_ended
    assert len(CAUGHT) == 3


def lists(config):
    """Use what Ray gives as lists as such."""
    sizes = config["sizes"] + [1]
    tune.report({"loss": float(sum(sizes) + len(config["deep"]["names"] + ["x"]))})


def test_lists_stay_lists(tmp_path):
    space = {"sizes": tune.grid_search([[16], [16, 32]]), "deep": {"names": ["a", "b"]}}
    study = study_of(tmp_path, lists, space=space, algorithm=th.GridSearch(max_epochs=1))
    assert [t.value for t in study.run(progress=False).trials] == [20.0, 52.0]


def by_optimizer(config):
    """Forget the momentum of one of two optimizers."""
    if config["optimizer"] == "sgd":
        return train_with_checkpoints({"lr": config["lr"], "model": {"width": 4}})
    return forgets(config)


def test_each_kind_of_configuration_is_compared(tmp_path):
    space = {"lr": tune.choice([0.1]), "optimizer": tune.grid_search(["sgd", "other"])}
    study = study_of(tmp_path, by_optimizer, space=space, resumes=True)
    executor = th.Local(pack="solo")
    study.run(progress=False, executor=executor, observers=[StopAfter(EPOCHS + 3)])
    with pytest.raises(StateError, match="after epoch 3"):
        study.run(progress=False, executor=executor)


def test_noise_is_said(caplog, monkeypatch):
    monkeypatch.setattr(secrets, "randbelow", lambda limit: limit - 1)  # never too little noise
    task = th.RayFunction(differs_each_time, resumes=True)
    task.setup(th.HyperParameters({"lr": 0.1}), seed=0, device=torch.device("cpu"))
    runs = [task._new_run() for _ in range(2)]
    for run, loss in zip(runs, (0.1, 0.1 + 1e-7), strict=True):
        run.metrics = {"loss": loss}
    files = {"epoch": torch.tensor(list(b"1"), dtype=torch.uint8)}
    task._judge(*runs, files, epoch=1)
    assert "gives other results each time" in caplog.text


def differs_each_time(config):
    start = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            start = int((Path(folder) / "epoch").read_text())
    for epoch in range(start, EPOCHS):
        loss = config["lr"] + 1e-9 * secrets.randbelow(1000)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "epoch").write_text(str(epoch + 1))
            tune.report({"loss": loss}, checkpoint=tune.Checkpoint.from_directory(folder))


def draws_numbers(config):
    """Draw from all streams, in the loop."""
    total, start = 0.0, 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            total, start = np.load(Path(folder) / "deep" / "state.npy").tolist()
    for epoch in range(int(start), EPOCHS):
        total += torch.rand(()).item() + random.random() + np.random.rand()  # noqa: NPY002
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "deep").mkdir()
            np.save(Path(folder) / "deep" / "state.npy", [total, epoch + 1])
            checkpoint = tune.Checkpoint.from_directory(folder)
            tune.report({"loss": total * config["lr"]}, checkpoint=checkpoint)


@pytest.mark.sample(1)
@pytest.mark.parametrize("executor", [th.Local(pack="solo"), th.Local(workers=2)])
def test_random_numbers_of_an_epoch_do_not_depend_on_where_it_is_trained(tmp_path, executor):
    space = {"lr": tune.choice([0.1, 0.2, 0.3, 0.4])}
    whole = study_of(tmp_path / "whole", draws_numbers, resumes=True, space=space).run(
        progress=False
    )
    halving = th.SuccessiveHalving(max_epochs=EPOCHS, eta=2, num_trials=4, min_epochs=1)
    study = study_of(tmp_path, draws_numbers, resumes=True, space=space, algorithm=halving)
    study.run(progress=False, executor=executor)
    full = curves(whole)
    assert len({tuple(curve) for curve in full.values()}) == 4
    for trial in study.trials:
        assert trial.curve == full[str(dict(trial.config))][: len(trial.curve)]


# -- functions without checkpoints ------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("executor", [th.Local(pack="solo"), th.Local(workers=2)])
def test_a_function_without_checkpoints_waits_at_its_reports(tmp_path, executor):
    space = {"lr": tune.choice([0.1, 0.2, 0.3])}
    whole = study_of(tmp_path / "whole", train_without_checkpoints, space=space)
    full = curves(whole.run(progress=False))
    halving = th.SuccessiveHalving(max_epochs=EPOCHS, eta=3, num_trials=3, min_epochs=2)
    study = study_of(tmp_path, train_without_checkpoints, space=space, algorithm=halving)
    study.run(progress=False, executor=executor)
    for trial in study.trials:
        assert trial.curve == full[str(dict(trial.config))][: len(trial.curve)]
    assert not study.task.can_resume


def test_it_is_trained_from_its_start_in_another_process(tmp_path):
    space = {"lr": tune.choice([0.1])}
    whole = study_of(tmp_path / "whole", train_without_checkpoints, space=space)
    whole.run(progress=False)
    study = study_of(tmp_path, train_without_checkpoints, space=space)
    study.run(progress=False, observers=[StopAfter(3)])
    _ray_function.WAITING.end_all()  # as if the process had ended
    assert curves(study.run(progress=False)) == curves(whole)


def test_few_runs_wait_at_a_time(tmp_path):
    space = {"lr": tune.uniform(0.1, 0.2)}
    num = MAX_WAITING + 3
    halving = th.SuccessiveHalving(max_epochs=EPOCHS, eta=2, num_trials=num, min_epochs=1)
    study = study_of(tmp_path, train_without_checkpoints, space=space, algorithm=halving)
    study.run(progress=False, executor=th.Local(pack="solo"))
    assert len(_ray_function.WAITING) <= MAX_WAITING
    assert any(t.state == "done" for t in study.trials)


def returns(config):
    return {"loss": (config["lr"] - 0.2) ** 2, "text": "x"}


def ends_early(config):
    tune.report({"loss": config["lr"]})


def test_functions_that_return_or_end_early(tmp_path):
    space = {"lr": tune.grid_search([0.1, 0.2])}
    study = study_of(tmp_path, returns, space=space, algorithm=th.GridSearch(max_epochs=1))
    assert study.run(progress=False).best_trial.config["lr"] == 0.2
    early = study_of(tmp_path / "early", ends_early, space=space).run(progress=False)
    assert [t.curve for t in early.trials] == [(lr,) * EPOCHS for lr in (0.1, 0.2)]


def test_what_the_context_says(tmp_path):
    found = [tmp_path]  # a list of numbers and texts would be an error

    def looks(config):
        context = tune.get_context()
        folder = Path(context.get_trial_dir())
        (folder / "seen").touch()
        found.append((context.get_trial_id(), context.get_trial_name(), folder.is_dir()))
        assert tune.get_checkpoint() is None
        tune.report({"loss": config["lr"]}, checkpoint=tune.Checkpoint.from_directory(folder))
        found.append(folder)

    space = {"lr": tune.choice([0.1])}
    algorithm = th.GridSearch(max_epochs=2)
    study = study_of(tmp_path, looks, space=space, algorithm=algorithm)
    study.run(progress=False, executor=th.Local(pack="solo"))
    (number, name, was_there), folder = found[-2:]
    assert number in name
    assert was_there
    del study
    gc.collect()
    assert not folder.exists(), "the folder goes with the trial"


# -- what is refused ---------------------------------------------------------------------------


def reports_nothing(config):
    pass


def reports_text(config):
    tune.report({"loss": "low"})


def returns_text(config):
    return "low"


def exits(config):
    raise SystemExit(3)


def no_checkpoint(config):
    tune.get_checkpoint()
    tune.report({"loss": 1.0})


def never_asks(config):
    for epoch in range(EPOCHS):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "x").touch()
            checkpoint = tune.Checkpoint.from_directory(folder)
            tune.report({"loss": float(epoch)}, checkpoint=checkpoint)


def asks_for_more(config):
    ray_session.get_session().dataset_shard  # noqa: B018


def error_of(study):
    """Return what a study says that cannot be trained."""
    try:
        study.run(progress=False)
    except (TaskError, StateError) as error:
        return str(error)
    return next(str(trial.error) for trial in study.trials if trial.error)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (reports_nothing, {}, "reported nothing"),
        (reports_text, {}, "reported no number"),
        (returns_text, {}, "returned str"),
        (exits, {}, "raise an Exception"),
        (no_checkpoint, {"resumes": True}, "has no checkpoint"),
        (never_asks, {"resumes": True}, "without asking for the checkpoint"),
        (asks_for_more, {}, "dataset_shard is not among"),
    ],
)
def test_a_function_that_does_something_else(tmp_path, function, options, message):
    study = study_of(tmp_path, function, space={"lr": tune.choice([0.1])}, **options)
    assert re.search(message, error_of(study))


def test_a_schedule_is_refused_where_it_would_be_read_once(tmp_path):
    space = {"lr": th.Choice([th.Step(0.1, [2]), 0.1])}
    study = study_of(tmp_path, train_with_checkpoints, resumes=True, space={**SPACE, **space})
    assert "lr" in error_of(study)


def test_a_function_says_what_it_is():
    task = th.RayFunction(partial(train_with_checkpoints), resumes=True)
    assert task.can_resume
    assert (task.name, task.module) == ("train_with_checkpoints", __name__)
    assert repr(task) == "<function of Ray Tune train_with_checkpoints>"
    with pytest.raises(TaskError, match=r"thrifty\.ray_space"):
        task.space()
    with pytest.raises(TaskError, match="give a function"):
        th.RayFunction("train")
    assert not th.RayFunction(print).can_resume


# -- spaces ------------------------------------------------------------------------------------


def test_spaces_have_the_values_of_ray():
    given = {
        "a": tune.uniform(0.5, 1.5),
        "b": tune.loguniform(1e-4, 1e-1),
        "c": tune.quniform(0.0, 1.0, 0.25),
        "d": tune.randint(1, 5),
        "e": tune.lograndint(1, 100),
        "f": tune.qrandint(2, 10, 2),
        "g": tune.choice(["x", None, True]),
        "h": tune.grid_search([1, 2]),
        "i": 7,
        "deep": {"er": {"j": tune.uniform(0.0, 1.0)}, "k": th.Int(1, 3)},
    }
    space = th.ray_space(given)
    wanted = th.Space(
        a=th.Float(0.5, 1.5),
        b=th.Float(1e-4, 1e-1, log=True),
        c=th.Float(0.0, 1.0, step=0.25),
        d=th.Int(1, 4),
        e=th.Int(1, 99, log=True),
        f=th.Int(2, 10, step=2),
        g=th.Choice(["x", None, True]),
        h=th.Choice([1, 2]),
        i=th.Choice([7]),
        **{"deep/er/j": th.Float(0.0, 1.0), "deep/k": th.Int(1, 3)},
    )
    assert repr(space) == repr(wanted)
    rng = np.random.default_rng(0)
    drawn = [nested(space.sample(rng)) for _ in range(200)]
    assert {config["d"] for config in drawn} == {1, 2, 3, 4}
    assert {config["f"] for config in drawn} == {2, 4, 6, 8, 10}
    assert all(0 <= config["deep"]["er"]["j"] <= 1 for config in drawn)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": tune.randn(0, 1)}, "Normal"),
        ({"a": tune.qloguniform(1e-2, 1, 1e-2)}, "LogUniform in steps of"),
        ({"a": tune.sample_from(lambda _: 1)}, "'a'"),
        ({"a": {}}, "'a' of the param_space is an empty dictionary"),
        ({"a/b": 1}, "'a/b' .* without slashes"),
        ({1: 2}, "1 of the param_space must be a text"),
        ("no dictionary", "give the dictionary"),
    ],
)
def test_what_has_no_equal_is_named(given, message):
    with pytest.raises(SpaceError, match=message):
        th.ray_space(given)


def powered(power):
    def train(config):
        for _ in range(2):
            tune.report({"loss": config["lr"] * power})

    return train


def test_functions_of_one_factory_do_not_meet(tmp_path):
    """Python gives the ids of what is gone to what comes."""
    for power in range(12):
        space = {"lr": tune.choice([0.1])}
        study = study_of(tmp_path / str(power), powered(power), space=space)
        study.run(progress=False)
        assert [trial.state for trial in study.trials] == ["done"]
        gc.collect()
