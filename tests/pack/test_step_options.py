"""Precision, parts of a batch, several optimizers, averages and own steps, against plain loops."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import thrifty as th
from thrifty.core import DivergedError, TaskError, derive_seed, step_seed
from thrifty.pack import Member, TaskReport, check_usual_step, inspect_task
from thrifty.pack._backend import EpochPlan
from thrifty.pack._state import seed_everything
from thrifty.pack.task._data import open_source, train_batches
from thrifty.pack.task._step_options import split_batch
from thrifty.pack.task._task import options_of
from thrifty.pack.trial._trial import TaskTrial
from thrifty.pack.trial._update import _no_compiler


pytestmark = pytest.mark.slow


CPU = torch.device("cpu")
EPOCHS = 3


def rows(num, *, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 6, generator=generator)
    return x, x[:, 0] * 2 - x[:, 1]


class Net(th.Task):
    """A small network; 20 rows in batches of 8, so that the last one is smaller."""

    batch_size = 8
    optimizer = th.SGD(lr=0.1, momentum=0.9)

    def data(self, hp):
        return th.ArrayData(train=rows(20, seed=1), valid=rows(10, seed=2))

    def model(self, hp):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def loss(self, model, batch):
        x, y = batch
        return functional.mse_loss(model(x)[:, 0], y)

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


def task_of(base=Net, **attributes):
    return type("Own", (base,), attributes)()


def trained(task, *, epochs=EPOCHS, values=None, start=0, state=None):
    """Return a trial after some epochs, and the metrics after each."""
    values = values or {"lr": 0.1}
    trial = TaskTrial(task, CPU)
    trial.begin(Member(values=values, seed=0, epoch=start, state=state))
    plans = [EpochPlan(epoch=epoch, values=values) for epoch in range(start, epochs)]
    return trial, [dict(trial.epoch(plan)) for plan in plans]


def plain(task, step, *, epochs=EPOCHS):
    """Return the mean losses of a plain loop with the same seeds and batches.

    ``step(model)`` returns a function that takes a step with a batch and returns its loss.
    """
    hp = th.HyperParameters({"lr": 0.1})
    source = open_source(task.data(hp), device=CPU)
    seed_everything(derive_seed(0, "model"))
    model = task.model(hp)
    update, curve = step(model), []
    for epoch in range(epochs):
        epoch_seed = derive_seed(0, "epoch", epoch)
        seed_everything(epoch_seed)
        model.train()
        losses = []
        batches = train_batches(source, seed=0, epoch=epoch, batch_size=task.batch_size)
        for number, batch in enumerate(batches):
            torch.default_generator.manual_seed(step_seed(epoch_seed, number))
            losses.append(update(batch).detach())
        curve.append(float(torch.stack(losses).float().mean()))
    return curve, model


def curve_of(metrics):
    return [each["train_loss"] for each in metrics]


def same_state(a, b):
    return a.tree == b.tree and all(torch.equal(t, b.tensors[n]) for n, t in a.tensors.items())


# -- every option: against a plain loop, and across a stop ---------------------------------------


def usual(model, task, *, loss=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(batch):
        optimizer.zero_grad()
        found = task.loss(model, batch) if loss is None else loss(batch)
        found.backward()
        optimizer.step()
        return found

    return update


def mixed_bf16(model, task):
    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return task.loss(model, batch)

    return usual(model, task, loss=loss)


def mixed_fp16(model, task):
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = task.loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return update


def whole_bf16(model, task):
    model.to(torch.bfloat16)
    return usual(
        model, task, loss=lambda b: task.loss(model, tuple(t.to(torch.bfloat16) for t in b))
    )


def in_two_parts(model, task):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(batch):
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
            loss = task.loss(model, (x, y)) / (len(batch[0]) / len(x))
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return update


def clipped(model, task):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def update(batch):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        return loss

    return update


def two_optimizers(model, task):
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    adam = torch.optim.AdamW(model[3].parameters(), lr=0.01)

    def update(batch):
        sgd.zero_grad()
        adam.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model[3].parameters(), 0.5)
        sgd.step()
        adam.step()
        return loss

    return update


def sharpness_aware(model, task):
    """Foret et al., 2021: the gradient at the worst point near by."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(batch):
        optimizer.zero_grad()
        return sam(model, batch, task=task, optimizer=optimizer)

    return update


def sam(model, batch, *, task, optimizer):
    loss = task.loss(model, batch)
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [0.05 * p.grad / norm for p in model.parameters()]
        for p, move in zip(model.parameters(), moves, strict=True):
            p += move
    optimizer.zero_grad()
    task.loss(model, batch).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p -= move
    optimizer.step()
    return loss


class Sam(Net):
    optimizer = th.SGD(lr=0.1)

    def step(self, model, batch):
        return sam(model, batch, task=self, optimizer=self.optimizers["optimizer"])


TWO = th.Optimizers(first=th.SGD(lr=0.1, params="0.*"), last=th.AdamW(lr=0.01, clip_norm=0.5))
CASES = {
    "bf16-mixed": (task_of(precision="bf16-mixed"), mixed_bf16),
    "fp16-mixed": (task_of(precision="fp16-mixed"), mixed_fp16),
    "bf16": (task_of(precision="bf16"), whole_bf16),
    "accumulate": (task_of(accumulate=2), in_two_parts),
    "clip_value": (task_of(optimizer=th.SGD(lr=0.1, momentum=0.9, clip_value=0.01)), clipped),
    "two optimizers": (task_of(optimizer=TWO), two_optimizers),
    "a method of two": (task_of(optimizer=lambda self, hp: TWO), two_optimizers),
    "own step": (Sam(), sharpness_aware),
    "averages": (task_of(average=[th.EMA(0.9), th.SWA(start=2)]), usual),
}
every_case = pytest.mark.parametrize(("task", "step"), CASES.values(), ids=CASES)


@every_case
def test_a_trial_trains_as_a_plain_loop(task, step):
    _, metrics = trained(task)
    curve, _ = plain(task, lambda model: step(model, task))
    assert curve_of(metrics) == curve


@every_case
def test_a_trial_goes_on_from_its_state_as_if_it_was_never_interrupted(task, step):
    whole, metrics = trained(task)
    first, _ = trained(task, epochs=1)
    second, rest = trained(task, start=1, state=first.state())
    assert rest == metrics[1:]
    assert same_state(second.state(), whole.state())


@pytest.mark.parametrize(
    ("task", "step"), [case for name, case in CASES.items() if name != "clip_value"]
)
def test_what_no_fused_rule_knows_is_trained_alone_and_the_reason_is_said_once(task, step, caplog):
    backend = th.pack.AutoBackend(task, prefer="fused")
    for slot in range(2):
        backend.put(slot, Member(values={"lr": 0.1}, seed=0))
    assert not any(backend.is_fused(slot) for slot in range(2))
    said = [r.getMessage() for r in caplog.records if "trained by plain PyTorch" in r.getMessage()]
    assert len(said) == 1
    outcomes = {}
    while len(outcomes) < 2:
        begins = {s: EpochPlan(epoch=0, values={"lr": 0.1}) for s in range(2) if not outcomes}
        outcomes |= backend.step(begins)
    _, metrics = trained(task, epochs=1)
    assert [dict(outcomes[slot]) for slot in range(2)] == metrics * 2


@every_case
def test_tools_that_take_other_steps_refuse_the_task(task, step):
    if callable(task.optimizer):
        pytest.skip("a method is asked when the optimizer is made")
    with pytest.raises(TaskError, match=r"a tool cannot train .*, because (it|the task)"):
        check_usual_step(task, where="a tool")


# -- parts of a batch ----------------------------------------------------------------------------


class Exact(Net):
    """Without dropout and in double precision, parts and whole give the same gradient."""

    def data(self, hp):
        train, valid = (tuple(t.double() for t in rows(n, seed=n)) for n in (20, 10))
        return th.ArrayData(train=train, valid=valid)

    def model(self, hp):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_the_number_of_parts_does_not_change_the_gradient_of_the_whole_batch(parts):
    _, whole = trained(task_of(Exact))
    _, split = trained(task_of(Exact, accumulate="parts"), values={"lr": 0.1, "parts": parts})
    assert curve_of(split) == pytest.approx(curve_of(whole), rel=1e-12)


class Masked(Exact):
    """A mean over the rows whose target is positive, as over tokens that are no padding."""

    def loss(self, model, batch):
        x, y = batch
        counts = (y > 0).double()
        return ((model(x)[:, 0] - y).square() * counts).sum() / counts.sum()

    def loss_weight(self, batch):
        return (batch[1] > 0).sum()


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_count_by_loss_weight(parts):
    _, whole = trained(task_of(Masked))
    _, split = trained(task_of(Masked, accumulate=parts))
    assert curve_of(split) == pytest.approx(curve_of(whole), rel=1e-12)


def test_without_loss_weight_parts_count_by_their_rows():
    _, whole = trained(task_of(Masked))
    by_rows = task_of(Masked, accumulate=2, loss_weight=th.Task.loss_weight)
    assert curve_of(trained(by_rows)[1]) != pytest.approx(curve_of(whole), rel=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_in_which_nothing_counts_is_named(parts):
    """Its mean loss is 0 / 0, which a smaller learning rate would not change."""

    class Empty(Masked):
        def data(self, hp):
            (x, y), valid = super().data(hp).train, super().data(hp).valid
            return th.ArrayData(train=(x, -y.abs()), valid=valid)

    with pytest.raises(DivergedError, match=r"is nan; in batch 1 of the epoch nothing counts"):
        trained(task_of(Empty, accumulate=parts))


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_a_weight_is_a_number_that_is_not_negative(weight):
    with pytest.raises(TaskError, match="it must be a number, 0 or more"):
        trained(task_of(Masked, accumulate=2, loss_weight=lambda self, batch: weight))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((torch.zeros(4), torch.zeros(3)), r"tensors of \[3, 4\] rows"),
        ("text", "the batch has str"),
        ((torch.zeros(4), "text"), "the batch has tuple"),
    ],
)
def test_a_batch_without_common_rows_cannot_be_split(batch, match):
    with pytest.raises(TaskError, match=match):
        split_batch(batch, 2, task="Own")


# -- averages ------------------------------------------------------------------------------------


def test_averages_are_those_of_the_weights_and_leave_training_alone():
    task = task_of(average=[th.EMA(0.9), th.SWA(start=2)])
    averages, ends = [], []

    def noting(model):
        take = usual(model, task)

        def update(batch):
            loss = take(batch)
            now = copy.deepcopy(model)
            if averages:
                for old, new in zip(averages[-1].parameters(), now.parameters(), strict=True):
                    new.data = old.data.lerp(new.data, 1 - 0.9)
            averages.append(now)
            ends.append(copy.deepcopy(model))
            return loss

        return update

    curve, _ = plain(task, noting)
    _, metrics = trained(task)
    assert curve_of(metrics) == curve == curve_of(trained(Net())[1])
    valid = rows(10, seed=2)
    for epoch, found in enumerate(metrics):
        with torch.no_grad():
            wanted = task.loss(averages[3 * epoch + 2].eval(), valid)
        assert found["ema_mse"] == pytest.approx(float(wanted), rel=1e-6)
    assert metrics[0]["swa_mse"] == metrics[0]["mse"] != metrics[0]["ema_mse"]
    mean = copy.deepcopy(ends[5])
    for a, b in zip(mean.parameters(), ends[8].parameters(), strict=True):
        a.data = (a.data + b.data) / 2
    with torch.no_grad():
        wanted = task.loss(mean.eval(), valid)
    assert metrics[1]["swa_mse"] == pytest.approx(metrics[1]["mse"], rel=1e-6)
    assert metrics[2]["swa_mse"] == pytest.approx(float(wanted), rel=1e-6)


def test_a_study_optimises_an_averaged_metric(tmp_path):
    def study(metric):
        return th.Study(
            task_of(average=th.EMA(0.9), optimizer=th.SGD(lr="lr")),
            th.Space(lr=th.Choice([0.01, 0.1])),
            algorithm=th.GridSearch(max_epochs=2),
            metric=metric,
            mode="min",
            storage=f"sqlite:///{tmp_path}/a.db",
            name=metric,
        )

    best = study("ema_mse").run(progress=False, executor=th.Local(pack="solo")).best_trial
    assert best.config == {"lr": 0.1}
    with pytest.raises(TaskError, match=r"'ema_loss' is not among.*ema_mse, mse, train_loss"):
        study("ema_loss").run(progress=False)


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("held elsewhere")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: th.EMA(1.0), r"EMA\(decay=1.0\)"),
        (lambda: th.EMA("0.9"), "a number between 0 and 1"),
        (lambda: th.SWA(start=0), r"SWA\(start=0\): start must be a whole number"),
        (lambda: th.SWA(every=1.5), r"SWA\(every=1.5\)"),
        (lambda: options_of(task_of(average=0.9)), "average is 0.9; it must be thrifty.EMA"),
        (lambda: options_of(task_of(average=[th.EMA(0.9)] * 2)), "two averages of one kind"),
        (
            lambda: trained(task_of(average=th.EMA(0.9), model=lambda self, hp: Uncopied(6, 1))),
            "a copy of the model, which cannot be made .RuntimeError: held elsewhere",
        ),
    ],
)
def test_an_average_that_cannot_be_is_refused(make, match):
    with pytest.raises(TaskError, match=match):
        make()


# -- several optimizers --------------------------------------------------------------------------


def optimizers(first, last):
    return task_of(optimizer=th.Optimizers(first=first, last=last))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: th.Optimizers(), "has no optimizer"),
        (lambda: th.Optimizers(a=th.SGD), r"Optimizers\(a=...\) is a function"),
        (lambda: th.Optimizers(a=th.SGD(lr=1), b=th.SGD(lr=1)), "a and b both train"),
        (lambda: th.SGD(lr=1, params=3), "params=int: a key must be a pattern"),
        (
            lambda: trained(optimizers(th.SGD(lr=1, params="0.*"), th.SGD(lr=1, params="*.bias"))),
            "'0.bias' belongs to two optimizers, first and last",
        ),
        (
            lambda: trained(optimizers(th.SGD(lr=1, params="0.*"), th.SGD(lr=1, params="3.bias"))),
            "'3.weight' belongs to no optimizer",
        ),
        (
            lambda: trained(optimizers(th.SGD(lr=1, params="1.*"), th.SGD(lr=1))),
            r"first: params='1\.\*': no parameter of the model",
        ),
        (
            lambda: trained(optimizers(th.SGD(lr=1, params="*"), th.SGD(lr=1))),
            "the optimizer last has no parameters",
        ),
        (
            lambda: trained(task_of(optimizer=th.SGD(lr=1, params="0.*"))),
            "has params= but is the only optimizer",
        ),
    ],
)
def test_optimizers_that_do_not_partition_the_parameters_are_refused(make, match):
    with pytest.raises(TaskError, match=match):
        make()


def test_each_optimizer_follows_its_own_hyperparameters_and_groups():
    both = th.Optimizers(
        first=th.SGD(lr="a", params=lambda p: p.ndim == 2, groups={"3.*": {"lr": "c"}}),
        last=th.Adam(lr="b"),
    )
    values = {"lr": 0.0, "a": 0.1, "b": 0.2, "c": 0.3}
    trial, _ = trained(task_of(optimizer=both), epochs=1, values=values)
    assert both.names() == {"a", "b", "c"} == trial.optimizers.names
    rates = {
        name: [group["lr"] for group in made.param_groups]
        for name, made in trial.optimizers.torch.items()
    }
    assert rates == {"first": [0.1, 0.3], "last": [0.2]}
    assert trial.optimizers.moments().keys() == {"0.bias", "3.bias"}  # SGD alone keeps none


def test_a_state_of_other_optimizers_is_refused():
    trial, _ = trained(task_of(optimizer=TWO), epochs=1)
    other = th.Optimizers(one=TWO["first"], two=TWO["last"])
    with pytest.raises(TaskError, match="has the optimizers first, last, and the task has one"):
        trained(task_of(optimizer=other), start=1, state=trial.state())


def test_a_method_that_returns_other_optimizers_later_is_refused():
    given = iter([TWO, TWO, TWO, th.SGD(lr=0.1)])
    task = task_of(optimizer=lambda self, hp: (hp.lr, next(given))[1])
    trial, _ = trained(task, epochs=1)
    with pytest.raises(TaskError, match="which has no optimizer 'first'"):
        trial.epoch(EpochPlan(epoch=1, values={"lr": 0.2}))


def test_where_one_optimizer_is_needed_several_are_refused():
    with pytest.raises(TaskError, match=r"several optimizers \(first, last\)"):
        th.pack.optimizer_of(task_of(optimizer=TWO), th.HyperParameters({}))


# -- own steps -----------------------------------------------------------------------------------


def test_a_step_of_its_own_needs_no_loss():
    class OnlyStep(th.Task):
        optimizer = th.SGD(lr=0.1)
        data, model = Net.data, Net.model

        def step(self, model, batch):
            loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
            loss.backward()
            self.optimizers["optimizer"].step()
            return loss

        def metrics(self, model, batch):
            return {"mse": functional.mse_loss(model(batch[0])[:, 0], batch[1])}

    task = OnlyStep()
    assert len(curve_of(trained(task)[1])) == EPOCHS
    with pytest.raises(TaskError, match="has a step of its own and no loss"):
        task.loss(None, None)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"step": lambda self, model, batch: torch.zeros(())}, "has not updated anything"),
        (
            {"step": lambda self, model, batch: self.optimizers["optimizer"].step()},
            "step returned a NoneType; return the loss",
        ),
        (
            {"step": lambda self, m, b: (self.optimizers["optimizer"].step(), b[1])[1]},
            r"step returned a tensor of shape \[8\]",
        ),
        ({"step": Sam.step, "accumulate": 2}, "split the batch in step"),
        ({"step": Sam.step, "precision": "bf16-mixed"}, "use torch.autocast in step"),
    ],
)
def test_a_step_that_cannot_be_right_is_refused(attributes, match):
    with pytest.raises(TaskError, match=match):
        trained(task_of(**attributes))


class EverySecond(Net):
    """Takes a step after every second batch, as if gradients were kept."""

    def model(self, hp):
        model = super().model(hp)
        model.register_buffer("num", torch.zeros((), dtype=torch.long))
        return model

    def step(self, model, batch):
        loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
        loss.backward()
        if not model.num % 2:
            self.optimizers["optimizer"].step()
        model.num += 1
        return loss


class Skipping(EverySecond):
    """Leaves steps out, and clears their gradients."""

    def step(self, model, batch):
        is_skipped = bool(model.num % 2)
        loss = super().step(model, batch)
        if is_skipped:
            model.zero_grad()
        return loss


class Accumulates(EverySecond):
    """Clears its gradients after each update, so others are left for the next call."""

    every = 2
    clears = "optimizer"

    def model(self, hp):
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        model.register_buffer("num", torch.zeros((), dtype=torch.long))
        return model

    def step(self, model, batch):
        loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
        loss.backward()
        model.num += 1
        if not model.num % self.every:
            self.optimizers["optimizer"].step()
            {"optimizer": self.optimizers["optimizer"], "model": model}[self.clears].zero_grad()
        return loss


class AccumulatesWithTheModel(Accumulates):
    clears = "model"


class ClearsAtTheBeginning(Accumulates):
    """Clears gradients when it begins to accumulate."""

    def step(self, model, batch):
        if not model.num % 2:
            self.optimizers["optimizer"].zero_grad()
        loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
        loss.backward()
        model.num += 1
        if not model.num % 2:
            self.optimizers["optimizer"].step()
        return loss


@pytest.mark.parametrize("kind", [Accumulates, AccumulatesWithTheModel, ClearsAtTheBeginning])
def test_a_step_that_clears_gradients_accumulates_as_a_plain_loop(kind):
    trial = TaskTrial(kind(), CPU)
    trial.begin(Member(values={}, seed=0))
    model = copy.deepcopy(trial.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    num = 0
    for epoch in range(3):
        plan = EpochPlan(epoch=epoch, values={})
        for x, y in trial.batches(plan):
            functional.mse_loss(model(x)[:, 0], y).backward()
            num += 1
            if not num % kind.every:
                optimizer.step()
                optimizer.zero_grad()
        trial.epoch(plan)
        for mine, other in zip(trial.model.parameters(), model.parameters(), strict=True):
            assert torch.allclose(mine, other, rtol=1e-6)
        state = trial.state()  # the trial goes on from it
        trial = TaskTrial(kind(), CPU)
        trial.begin(Member(values={}, seed=0, epoch=epoch + 1, state=state))


class TwoSpeeds(Accumulates):
    """The head takes a step at each call, the body at each second one."""

    optimizer: Any = th.Optimizers(head=th.SGD(lr=0.1, params="2.*"), body=th.SGD(lr=0.1))

    def step(self, model, batch):
        loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
        loss.backward()
        model.num += 1
        for name, every in (("head", 1), ("body", 2)):
            if not model.num % every:
                self.optimizers[name].step()
                self.optimizers[name].zero_grad()
        return loss


def test_optimizers_may_take_steps_at_different_rates():
    trial = TaskTrial(TwoSpeeds(), CPU)
    trial.begin(Member(values={}, seed=0))
    model = copy.deepcopy(trial.model)
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    body = torch.optim.SGD(model[0].parameters(), lr=0.1)
    plan = EpochPlan(epoch=0, values={})
    for number, (x, y) in enumerate(trial.batches(plan), start=1):
        functional.mse_loss(model(x)[:, 0], y).backward()
        head.step()
        head.zero_grad()
        if not number % 2:
            body.step()
            body.zero_grad()
    trial.epoch(plan)
    for mine, other in zip(trial.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-6)


def never_clearing(self, model, batch):
    loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
    loss.backward()
    if model.num % 2:
        self.optimizers["optimizer"].step()
    model.num += 1
    return loss


def into_buffers(self, model, batch):
    """Adds to copies of its own, and relies on gradients of zero at each call."""
    loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
    loss.backward()
    held = vars(self).setdefault("held", [torch.zeros_like(p) for p in model.parameters()])
    for total, parameter in zip(held, model.parameters(), strict=True):
        total += parameter.grad
        if model.num % 2:
            parameter.grad = total.clone()
    if model.num % 2:
        self.optimizers["optimizer"].step()
    model.num += 1
    return loss


def with_clipped_weights(self, model, batch):
    loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
    loss.backward()
    if model.num % 2:
        self.optimizers["optimizer"].step()
    with torch.no_grad():
        model[0].weight.clamp_(-0.3, 0.3)
    model.num += 1
    return loss


def with_used_gradients(self, model, batch):
    loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
    if not model.num % 2:
        self.optimizers["optimizer"].zero_grad()
    loss.backward()
    self.optimizers["optimizer"].step()
    model.num += 1
    return loss


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (EverySecond.step, "by gradients that an earlier call has left.* set accumulate"),
        (never_clearing, "by gradients that an earlier call has left"),
        (into_buffers, "by gradients that an earlier call has left"),
        (with_clipped_weights, r"first changes parameters of the optimizer 'optimizer' without"),
        (with_used_gradients, r"zero_grad\(\) only at some steps"),
    ],
)
def test_gradients_of_an_earlier_call_are_refused_in_doubt(step, told):
    with pytest.raises(TaskError, match=told):
        trained(task_of(Accumulates, step=step))


class First(EverySecond):
    """Leaves out its first step, as for an unusual gradient, and clears it in the next call."""

    def step(self, model, batch):
        self.optimizers["optimizer"].zero_grad()
        loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
        loss.backward()
        if model.num:
            self.optimizers["optimizer"].step()
        model.num += 1
        return loss


@pytest.mark.parametrize("kind", [First, Skipping])
def test_a_step_may_leave_out_an_update(kind):
    assert len(curve_of(trained(kind())[1])) == EPOCHS


def test_steps_without_an_update_are_an_error_before_a_long_epoch_ends(monkeypatch):
    monkeypatch.setattr("thrifty.pack.trial._update._MAX_WITHOUT_UPDATE", 3)
    steps = []

    def step(self, model, batch):
        steps.append(1)
        return torch.zeros(())

    with pytest.raises(TaskError, match="has not updated anything"):
        trained(task_of(step=step))
    assert len(steps) == 3


def test_optimizers_are_lent_only_while_step_runs():
    with pytest.raises(TaskError, match=r"Own.optimizers exists only while step"):
        _ = task_of().optimizers
    task = task_of()
    task.optimizers = 3  # a task may have such an attribute of its own
    assert task.optimizers == 3


# -- bad values, before training -----------------------------------------------------------------


def inspected(task) -> TaskReport:
    return inspect_task(task, {"lr": 0.1, "parts": 3}, seed=0)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"precision": "fp8"}, "precision is 'fp8'; it must be one of 'fp32', 'bf16'"),
        ({"accumulate": 3}, "batch_size 8 and accumulate 3, which does not divide it; use 2"),
        ({"accumulate": "parts"}, "batch_size 8 and accumulate 3"),
        ({"accumulate": "pieces"}, "follows hyper-parameter 'pieces', which the search space"),
        ({"accumulate": 0}, "accumulate is 0; it must be a whole number"),
        ({"accumulate": True}, "accumulate is True"),
        ({"compile": 1}, "compile is 1; it must be True or False"),
    ],
)
def test_a_bad_option_is_an_error_before_training(attributes, match):
    with pytest.raises(TaskError, match=match):
        inspected(task_of(**attributes))


def test_a_precision_that_torch_refuses_is_one_clear_error(monkeypatch):
    def refuses(*args, **kwargs):
        raise RuntimeError("no such arithmetic")

    monkeypatch.setattr(torch, "autocast", refuses)
    with pytest.raises(TaskError, match=r"'bf16-mixed', which torch refuses on cpu here .no such"):
        trained(task_of(precision="bf16-mixed"))


def test_what_the_machine_cannot_do_is_an_error_before_training_and_no_failed_trial(
    tmp_path, monkeypatch
):
    def refuses(*args, **kwargs):
        raise RuntimeError("no such arithmetic")

    study = study_of(tmp_path, task_of(precision="bf16-mixed"))
    monkeypatch.setattr(torch, "autocast", refuses)
    with pytest.raises(TaskError, match="which torch refuses on cpu here"):
        study.run(progress=False)
    with pytest.raises(th.StudyNotFoundError):
        _ = study.trials


def study_of(folder, task, **space):
    return th.Study(
        task,
        th.Space(**({"lr": 0.1} | space)),
        algorithm=th.GridSearch(max_epochs=2),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{folder}/a.db",
        name="a",
    )


@pytest.mark.parametrize(
    ("attributes", "space"),
    [
        ({"accumulate": "parts"}, {"parts": th.Choice([1, 2, 3])}),
        ({"accumulate": "parts"}, {"parts": th.MultiStep([2, 3], milestones=[1])}),
        ({"accumulate": 4, "batch_size": "size"}, {"size": th.MultiStep([8, 6], milestones=[1])}),
    ],
)
def test_parts_that_divide_only_some_batches_of_a_study_are_an_error_before_training(
    tmp_path, attributes, space
):
    study = study_of(tmp_path, task_of(**attributes), **space)
    with pytest.raises(TaskError, match="does not divide it"):
        study.run(progress=False)
    with pytest.raises(th.StudyNotFoundError):
        _ = study.trials


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), True])
@pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
def test_a_limit_of_gradients_is_above_0(option, limit):
    with pytest.raises(TaskError, match=rf"{option}=.*; it must be a number above 0, or None"):
        th.SGD(lr=0.1, **{option: limit})
    task = task_of(optimizer=th.SGD(lr=0.1, **{option: "limit"}))
    with pytest.raises(TaskError, match=rf"{option}='limit' of .* is {limit!r}; it must be"):
        trained(task, values={"lr": 0.1, "limit": limit})


def test_an_averaged_model_is_loaded_by_the_name_of_its_average(tmp_path):
    study = study_of(tmp_path, task_of(average=[th.EMA(0.9), th.SWA(start=3)]))
    (trial,) = study.run(progress=False, executor=th.Local(pack="solo")).trials
    valid = rows(10, seed=2)
    found = {}
    for average in (None, "ema", "swa"):
        model = trial.load_model(average=average)
        with torch.no_grad():
            found[average] = float(functional.mse_loss(model(valid[0])[:, 0], valid[1]))
    alone, metrics = trained(study.task, epochs=2)
    wanted = metrics[-1]
    assert found == {None: wanted["mse"], "ema": wanted["ema_mse"], "swa": wanted["mse"]}
    with pytest.raises(TaskError, match=r"no average 'EMA' .* \(it has: 'ema', 'swa'\)"):
        alone.averaged_model("EMA")


def test_a_precision_that_autocast_ignores_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    with pytest.raises(TaskError, match=r"torch.autocast computes in torch.float32"):
        trained(task_of(precision="fp16-mixed"))


def test_an_optimizer_that_needs_a_closure_takes_the_tasks_own_step():
    """LBFGS computes the loss several times in a step."""
    given = th.Optimizer(torch.optim.LBFGS, lr=0.1, history_size=5)
    with pytest.raises(
        TaskError, match=r"LBFGS.step .* needs a closure.* step\(self, model, batch\)"
    ):
        trained(task_of(optimizer=given))

    def closing(task, model, batch, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = functional.mse_loss(model(batch[0])[:, 0], batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    def own(self, model, batch):
        return closing(self, model, batch, self.optimizers["optimizer"])

    found = curve_of(trained(task_of(optimizer=given, step=own))[1])
    assert found[-1] < found[0]


# -- compiled models -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*script_method")
def test_a_compiled_model_trains_as_before_within_rounding():
    if _no_compiler():
        pytest.skip("there is no C++ compiler")
    trial, found = trained(task_of(Exact, compile=True), epochs=2)
    _, wanted = trained(task_of(Exact), epochs=2)
    assert curve_of(found) == pytest.approx(curve_of(wanted), rel=1e-9)
    plainly, _ = trained(task_of(Exact), epochs=2)
    assert trial.state().tensors.keys() == plainly.state().tensors.keys()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_trains_alone_and_says_why(tmp_path, caplog):
    class Scripted(Exact):
        def model(self, hp):
            return torch.jit.script(super().model(hp))

    curves = []
    for task in (Scripted(), Exact()):
        study = study_of(tmp_path / type(task).__name__, task)
        study.run(progress=False, executor=th.Local(pack="fused", threads=1))
        curves.append([list(trial.curve) for trial in study.trials])
    assert curves[0] == [pytest.approx(curve, rel=1e-9) for curve in curves[1]]
    assert "compiled by torch.jit" in caplog.text


def test_without_a_compiler_compile_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("thrifty.pack.trial._update._no_compiler", lambda: True)
    with pytest.raises(TaskError, match=r"no C\+\+ compiler was found"):
        trained(task_of(compile=True))


# -- identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attributes",
    [
        {"precision": "bf16-mixed"},
        {"accumulate": 2},
        {"compile": True},
        {"average": th.EMA(0.9)},
        {"optimizer": th.SGD(lr=0.1, momentum=0.9, clip_value=0.01)},
        {"optimizer": th.Optimizers(all=th.SGD(lr=0.1, momentum=0.9))},
    ],
)
def test_each_option_belongs_to_the_identity(attributes):
    assert task_of(**attributes).identity() != task_of().identity()
