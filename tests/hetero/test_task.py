"""A trial of several processes equals the task's own trial."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

import thrifty as th
from thrifty.core import HeteroError, TrainingError, WorkerLostError
from thrifty.core._child import ChildEndedError
from thrifty.hetero import BatchScaling, HeteroOptions, HeteroTask
from thrifty.hetero._hetero_task import _Processes
from thrifty.run import train_alone


pytestmark = pytest.mark.slow


class Line(th.Task):
    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = 16

    def data(self, hp):
        x = torch.linspace(-1, 1, 90)[:, None].repeat(1, 3)
        return th.ArrayData(train=(x[:70], x[:70].sin()), valid=(x[70:], x[70:].sin()))

    def model(self, hp):
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


class Broken(Line):
    def loss(self, model, batch):
        raise ValueError("no loss today")


def run(task, folder, name, **options):
    study = th.Study(
        task,
        th.Space(lr=th.Choice([0.1, 0.05])),
        algorithm=th.GridSearch(max_epochs=3),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/{name}.db",
        name=name,
        seed=0,
        **options,
    )
    study.run()
    return study


def found(study):
    return sorted((trial.config["lr"], trial.value) for trial in study.trials)


def test_a_study_of_jobs_finds_what_a_study_of_trials_finds(tmp_path):
    alone = found(run(Line(), tmp_path, "alone"))
    spread = found(run(HeteroTask(Line(), workers=2, devices=["cpu", "cpu:0"]), tmp_path, "spread"))
    assert [lr for lr, _ in spread] == [lr for lr, _ in alone]
    assert [value for _, value in spread] == pytest.approx([v for _, v in alone], rel=1e-5)


class Grouped(Line):
    optimizer = th.SGD(
        lr="lr", momentum=0.9, clip_norm=0.02, groups={"*.bias": {"lr": th.times("lr", 2)}}
    )


def test_groups_and_clipping_are_those_of_the_trial_alone(tmp_path):
    alone = found(run(Grouped(), tmp_path, "alone"))
    spread = found(run(HeteroTask(Grouped(), workers=2), tmp_path, "spread"))
    assert [value for _, value in spread] == pytest.approx([v for _, v in alone], rel=1e-5)
    assert alone != found(run(Line(), tmp_path, "plain"))


def test_a_schedule_is_followed_from_epoch_to_epoch_also_after_an_interruption():
    """After an interruption the schedule's learning rate counts, not the one in the checkpoint."""
    rates = th.MultiStep([0.1, 0.01, 0.1], milestones=[1, 2])
    timeline = th.Timeline({"lr": rates}, epochs=3)
    _, whole = train_alone(Grouped(), timeline, seed=0, epochs=3)
    task = HeteroTask(Grouped(), workers=2)
    half, _ = train_alone(task, timeline, seed=0, epochs=2)
    _, rest = train_alone(task, timeline, seed=0, epochs=3, state=(2, half.state(0)))
    assert rest[0]["mse"] == pytest.approx(whole[2]["mse"], rel=1e-5)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"model": lambda self, hp: torch.nn.Linear(3, int(hp.x))}, "model reads it only once"),
        ({"batch_size": "x"}, "batch_size reads it only once"),
    ],
)
def test_what_moves_and_is_read_once_is_refused(attributes, message):
    task = type("Task", (Line,), attributes)()
    timeline = th.Timeline({"lr": 0.1, "x": th.MultiStep([3, 6], milestones=[1])}, epochs=2)
    with pytest.raises(th.TrainingError, match=message):
        train_alone(HeteroTask(task, workers=1), timeline, seed=0, epochs=2)


def test_an_error_in_a_worker_is_told(tmp_path):
    task = HeteroTask(Broken(), workers=2)
    study = run(task, tmp_path, "broken")
    with pytest.raises(th.ThriftyError, match="no loss today"):
        study.best_trial  # noqa: B018 (it raises)


def test_options_are_checked():
    with pytest.raises(HeteroError, match="must be at least 1"):
        HeteroTask(Line(), workers=0)
    with pytest.raises(HeteroError, match="1 sets of cores"):
        HeteroTask(Line(), workers=2, cores=[[0]])
    with pytest.raises(HeteroError, match="one device for each of 2 workers, got 1"):
        HeteroTask(Line(), workers=2, devices=["cpu"])
    with pytest.raises(HeteroError, match="`reduction` must be"):
        HeteroTask(Line(), workers=2, reduction="none")


class Noisy(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.rng = x, y, np.random.default_rng(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + float(self.rng.normal()), self.y[index]


class OwnGenerator(Line):
    def data(self, hp):
        found = super().data(hp)
        valid = torch.utils.data.TensorDataset(*found.valid)
        return th.DatasetPair(train=Noisy(*found.train), valid=valid)


def test_noise_from_a_data_sets_own_generator_is_that_of_the_epoch_and_step():
    timeline = th.Timeline({"lr": 0.1}, epochs=3)
    task = HeteroTask(OwnGenerator(), workers=1)
    _, whole = train_alone(task, timeline, seed=0, epochs=3)
    half, _ = train_alone(task, timeline, seed=0, epochs=2)
    _, rest = train_alone(task, timeline, seed=0, epochs=3, state=(2, half.state(0)))
    assert rest[0]["mse"] == pytest.approx(whole[2]["mse"], rel=1e-5)


class Weighted(Line):
    """A task where some samples count more than others."""

    def loss(self, model, batch):
        x, y = batch
        weight = self.weight((x, y))
        error = (model(x) - y).square().mean(1)
        return (error * (x[:, 0] > 0)).sum() / weight

    @staticmethod
    def weight(batch):
        return (batch[0][:, 0] > 0).sum()

    def metrics(self, model, batch):
        return {"mse": Line.loss(self, model, batch)}


class Drawing(Line):
    """A task whose model is initialised from NumPy's stream."""

    def model(self, hp):
        net = super().model(hp)
        with torch.no_grad():
            net[0].weight.copy_(torch.from_numpy(np.random.randn(8, 3)))  # noqa: NPY002
        return net


def test_a_weighted_mean_is_that_of_one_process(tmp_path):
    alone = found(run(Weighted(), tmp_path, "alone"))
    task = HeteroTask(Weighted(), workers=2, weight=lambda batch: Weighted.weight(batch))
    spread = found(run(task, tmp_path, "spread"))
    assert [value for _, value in spread] == pytest.approx([v for _, v in alone], rel=1e-5)


def test_a_loss_that_cannot_be_split_fails_its_trial(tmp_path):
    study = run(HeteroTask(Weighted(), workers=2), tmp_path, "refused")
    with pytest.raises(th.ThriftyError, match="cannot be split over workers"):
        study.best_trial  # noqa: B018 (it raises)


def test_a_model_is_drawn_as_in_one_process(tmp_path):
    alone = found(run(Drawing(), tmp_path, "alone"))
    spread = found(run(HeteroTask(Drawing(), workers=2), tmp_path, "spread"))
    assert [value for _, value in spread] == pytest.approx([v for _, v in alone], rel=1e-5)


def test_workers_count_for_the_identity_where_they_change_the_answer():
    plain = HeteroTask(Line(), workers=2).identity()
    assert plain == HeteroTask(Line(), workers=3).identity()
    for options in ({"verify": False}, {"batch_norm": "local"}, {"growth": BatchScaling()}):
        made = HeteroTask(Line(), workers=2, options=HeteroOptions(**options)).identity()
        assert made != plain


UNCHANGED = {
    *("objective", "power", "subsample", "balancing", "curve", "bucket_cap_mb", "admit_every"),
    *("stand_by", "micro_batch"),
}
"""Options by which a trial's result does not change; ``micro_batch`` only with local statistics."""
CHANGING = {"batch_norm": "local", "clip_norm": 0.1, "growth": BatchScaling(), "verify": False}


def test_each_option_is_known_to_change_the_answer_or_not():
    names = {each.name for each in dataclasses.fields(HeteroOptions)}
    assert names == UNCHANGED | CHANGING.keys()
    plain = HeteroTask(Line(), workers=2).identity()
    for name, value in CHANGING.items():
        options = HeteroOptions(**{name: value})
        assert HeteroTask(Line(), workers=2, options=options).identity() != plain, name


class Thousandfold(HeteroTask):
    def evaluate(self):
        return {name: 1000 * value for name, value in super().evaluate().items()}


class Millionfold(HeteroTask):
    def evaluate(self):
        return {name: 10**6 * value for name, value in super().evaluate().items()}


def test_code_of_a_subclass_its_attributes_and_the_version_count_for_the_identity():
    made = [kind(Line(), workers=2) for kind in (HeteroTask, Thousandfold, Millionfold)]
    versioned, noted = HeteroTask(Line(), workers=2), HeteroTask(Line(), workers=2)
    versioned.version, noted.note = "2", 1
    made += [versioned, noted]
    assert len({tuple(sorted(each.identity().items())) for each in made}) == len(made)
    wider = Thousandfold(Line(), workers=3)
    assert wider.identity() == made[1].identity(), "workers do not change the result"


class Pair(Line):
    """Reads data sets through a loader."""

    options: ClassVar[dict[str, object]] = {}

    def data(self, hp):
        data = super().data(hp)
        sets = (torch.utils.data.TensorDataset(*part) for part in (data.train, data.valid))
        return th.DatasetPair(**dict(zip(("train", "valid"), sets, strict=True)), **self.options)


def halved(rows):
    x, y = torch.utils.data.default_collate(rows)
    return x / 2, y


@pytest.mark.parametrize("options", [{"drop_last": True}, {"collate_fn": halved}])
def test_a_loader_reads_as_in_one_process(options, tmp_path):
    kind = type("Pair", (Pair,), {"options": options, "__module__": __name__})
    alone = found(run(kind(), tmp_path, "alone"))
    spread = found(run(HeteroTask(kind(), workers=2), tmp_path, "spread"))
    assert [value for _, value in spread] == pytest.approx([v for _, v in alone], rel=1e-5)
    assert alone != found(run(Pair(), tmp_path, "plain"))


def test_what_a_loaders_processes_would_do_is_refused():
    options = {"num_workers": 1, "worker_init_fn": print}
    kind = type("Pair", (Pair,), {"options": options})
    timeline = th.Timeline({"lr": 0.1}, epochs=1)
    with pytest.raises(th.TrainingError, match=r"worker_init_fn of the .* would never be called"):
        train_alone(HeteroTask(kind(), workers=1), timeline, seed=0, epochs=1)


def test_how_losses_are_weighted_counts_for_the_identity():
    def tokens(batch):
        return batch[0].numel()

    def all_tokens(batch):
        return 2 * batch[0].numel()

    made = [
        HeteroTask(Line(), workers=2, **options).identity()
        for options in ({}, {"reduction": "sum"}, {"weight": tokens}, {"weight": all_tokens})
    ]
    assert all(one != two for i, one in enumerate(made) for two in made[:i])


class Scripted:
    """A process of a trial that says what a test has written down."""

    def __init__(self, *said):
        self.said = list(said)

    def send(self, message):
        pass

    def receive(self):
        found = self.said.pop(0)
        if isinstance(found, Exception):
            raise found
        return [found]

    def end(self):
        pass


GONE = ChildEndedError("killed by signal 9")
LOST, ERROR = ("lost", "PeerLostError: gone"), ("error", "ValueError: mine")


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        # The cause is heard of after its effect, or before.
        (([LOST], [GONE]), WorkerLostError, "worker 1 of 2 of this trial ended without a word"),
        (([LOST], [ERROR]), TrainingError, "worker 1 of 2: ValueError: mine"),
        (([ERROR], [LOST]), TrainingError, "worker 0 of 2: ValueError: mine"),
        (([ERROR], [GONE]), WorkerLostError, "worker 1 of 2 of this trial ended without a word"),
        # No process is gone: a network fails, or a time runs out.
        (([LOST], [LOST]), WorkerLostError, "workers of this trial have lost each other; worker 0"),
        (([("done", {})], [LOST]), WorkerLostError, "lost each other; worker 1 of 2: PeerLost"),
        (([LOST], [("done", {})]), WorkerLostError, "lost each other; worker 0 of 2: PeerLost"),
    ],
)
def test_the_cause_is_told_from_its_effects(monkeypatch, said, error, message):
    def those_that_say_something(children, _):
        found = [child for child in children if child.said]
        assert found, "it would wait for ever"
        return found[:1]

    monkeypatch.setattr("thrifty.hetero._hetero_task.wait_for", those_that_say_something)
    crew = _Processes(2)
    crew._children = [Scripted(*each) for each in said]
    crew.tell("epoch")
    with pytest.raises(error, match=message):
        crew.hear()


def test_the_loss_of_an_epoch_is_that_of_a_process_that_trained_all_steps():
    """The first process stood by after three of twelve steps, and evaluates all the same."""
    task = HeteroTask(Line(), workers=2)
    answers = [(3, {"train_loss": 9.0, "mse": 0.5}), (12, {"train_loss": 1.0})]
    task._crew = SimpleNamespace(tell=lambda *_: None, hear=lambda: answers)
    task.train(0, {})
    assert task.evaluate() == {"train_loss": 1.0, "mse": 0.5}
