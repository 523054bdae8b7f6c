"""Gradients of an earlier epoch: a training function clears them, keeps them, or is refused."""

from __future__ import annotations

import copy

import pytest
import torch

import thrifty as th
from thrifty.core import TaskError


EPOCHS = 5


class Plain:
    """What a training function is given in plain PyTorch."""

    device = torch.device("cpu")

    def suggest_float(self, _name, low, _high):
        return low

    def epochs(self, _state, **_options):
        return iter(range(EPOCHS))


def in_plain_pytorch(function):
    torch.manual_seed(0)
    return [metrics["loss"] for metrics in function(Plain())]


def as_a_trial(function, *, restores):
    """Train a function as a trial; restore it from its state before each epoch if asked to."""
    task, state, curve = None, None, []
    for epoch in range(EPOCHS):
        hp = th.HyperParameters({"lr": 0.1})
        if task is None or restores:
            task = th.trainable(function)
            task.setup(hp, seed=0, device=torch.device("cpu"))
            if state is not None:
                task.load_state(state)
        task.train(epoch, hp)
        curve.append(task.evaluate()["loss"])
        state = copy.deepcopy(task.state())
    return curve, state


def as_in_plain_pytorch(function):
    """Check a function against plain PyTorch, and return the state that it leaves."""
    alone = in_plain_pytorch(function)
    for restores in (False, True):
        curve, state = as_a_trial(function, restores=restores)
        assert curve == pytest.approx(alone, rel=1e-6)
    return state


def refused(function, *, name="model.weight"):
    for restores in (False, True):
        with pytest.raises(
            TaskError, match=rf"reads the gradient of '{name}'.*keep_gradients=True"
        ):
            as_a_trial(function, restores=restores)


def points():
    generator = torch.Generator().manual_seed(7)
    return torch.randn(20, 4, generator=generator)


def made(kind=torch.optim.SGD, **options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    return model, kind(model.parameters(), lr=0.05, **options)


def loss_of(model, rows=slice(None)):
    return (model(points()[rows]) - 1).square().mean()


def without_clearing(options):
    def train(trial):
        model, optimizer = made(momentum=0.9)
        for _epoch in trial.epochs({"model": model, "optimizer": optimizer}, **options):
            for rows in torch.arange(20).split(5):
                loss_of(model, rows).backward()
                optimizer.step()
            yield {"loss": loss_of(model).item()}

    return train


def pruning(options):
    """Prune by the gradients of the epoch before, once."""

    def train(trial):
        model, optimizer = made()
        for epoch in trial.epochs({"model": model, "optimizer": optimizer}, **options):
            if epoch == 3:
                with torch.no_grad():
                    model.weight[model.weight.grad.abs() < 0.2] = 0
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            yield {"loss": loss_of(model).item()}

    return train


def heads_in_turns(options):
    """Train one head in each epoch; the other one goes on by its last gradient."""

    def train(trial):
        model, optimizer = made(torch.optim.Adam, foreach=True)
        model.other = torch.nn.Parameter(torch.ones(4))
        optimizer.add_param_group({"params": [model.other]})
        for epoch in trial.epochs({"model": model, "optimizer": optimizer}, **options):
            for _ in range(2):
                if epoch % 2:
                    model.other.grad = None
                    (points() @ model.other).square().mean().backward()
                else:
                    model.zero_grad() if epoch == 0 else model.weight.grad.zero_()
                    loss_of(model).backward()
                optimizer.step()
            yield {"loss": (loss_of(model) + model.other.square().sum()).item()}

    return train


def sparse(options):
    def train(trial):
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for _epoch in trial.epochs({"model": model, "optimizer": optimizer}, **options):
            (model(torch.tensor([1, 2])) - 1).square().sum().backward()
            optimizer.step()
            yield {"loss": model.weight.detach().square().sum().item()}

    return train


def by_hand(options):
    """Train a tensor that is no part of a network."""

    def train(trial):
        weight = torch.zeros(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.05)
        state = {"weight": weight, "optimizer": optimizer}
        for _epoch in trial.epochs(state, **options):
            (points() @ weight - 1).square().mean().backward()
            optimizer.step()
            yield {"loss": weight.detach().sum().item()}

    return train


def with_numpy(options):
    """Log the gradient of the epoch before, and go on where that fails."""

    def train(trial):
        model, optimizer = made()
        for _epoch in trial.epochs({"model": model, "optimizer": optimizer}, **options):
            try:
                norm = abs(model.weight.grad.detach().numpy()).sum()
            except Exception:  # noqa: BLE001
                norm = 0.0
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            yield {"loss": norm + loss_of(model).item()}

    return train


READING = {
    without_clearing: "model.weight",
    pruning: "model.weight",
    heads_in_turns: "model.(weight|other)",
    sparse: "model.weight",
    by_hand: "weight",
    with_numpy: "model.weight",
}


@pytest.mark.parametrize("make", READING)
def test_a_loop_that_reads_used_gradients_is_refused(make):
    refused(make({}), name=READING[make])


@pytest.mark.parametrize("make", READING)
def test_a_loop_that_keeps_used_gradients_is_as_in_plain_pytorch(make):
    as_in_plain_pytorch(make({"keep_gradients": True}))


def set_to_zero(parameter):
    parameter.grad.data = torch.zeros_like(parameter)


CLEARING = {
    "to none": lambda model, optimizer: optimizer.zero_grad(),
    "to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "of the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "zero_": lambda model, optimizer: [p.grad.detach_().zero_() for p in model.parameters()],
    "data": lambda model, optimizer: [p.grad.data.zero_() for p in model.parameters()],
    "times 0": lambda model, optimizer: [p.grad.mul_(0) for p in model.parameters()],
    "fill_": lambda model, optimizer: [p.grad.fill_(0) for p in model.parameters()],
    "copy_": lambda model, optimizer: [p.grad.copy_(torch.zeros(())) for p in model.parameters()],
    "set": lambda model, optimizer: [set_to_zero(p) for p in model.parameters()],
    "item": lambda model, optimizer: [p.grad.__setitem__(..., 0) for p in model.parameters()],
    "list": lambda model, optimizer: torch._foreach_zero_([p.grad for p in model.parameters()]),
    "moved": lambda model, optimizer: model.double().float().cpu().zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("clear", CLEARING)
@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_may_be_cleared_in_any_way(clear, foreach):
    def train(trial):
        model, optimizer = made(momentum=0.9, foreach=foreach)
        for epoch in trial.epochs({"model": model, "optimizer": optimizer}):
            for rows in torch.arange(20).split(5):
                if model.weight.grad is not None:
                    assert model.weight.grad.shape == model.weight.shape
                    assert model.weight.grad.numel() == 4
                    assert not model.weight.grad.is_sparse
                    CLEARING[clear](model, optimizer)
                loss_of(model, rows).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                assert type(model.weight.grad) is torch.Tensor
            yield {"loss": epoch + loss_of(model).item()}

    state = as_in_plain_pytorch(train)
    assert "gradients" not in state["kept"]["model"], "checkpoints of usual loops do not grow"


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("creates_graph", [False, True])
def test_a_generator_may_add_to_gradients_of_a_discriminator_that_clears_them(creates_graph):
    def train(trial):
        one, optimizer = made(momentum=0.9)
        torch.manual_seed(2)
        other = torch.nn.Linear(1, 1)
        other_optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
        state = {"one": one, "other": other, "by": optimizer, "other by": other_optimizer}
        for _epoch in trial.epochs(state):
            for _ in range(3):
                optimizer.zero_grad()
                other(one(points())).square().mean().backward(create_graph=creates_graph)
                optimizer.step()
                other_optimizer.zero_grad(set_to_none=False)
                (other(one(points()).detach()) - 1).square().mean().backward()
                other_optimizer.step()
            yield {"loss": (loss_of(one) + other.weight.sum()).item()}

    as_in_plain_pytorch(train)


def test_gradients_of_plain_tensors_that_are_left_go_into_the_next_epoch():
    def train(trial):
        weight, nested = torch.zeros(4, requires_grad=True), torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight, nested], lr=0.05)
        state = {"weight": weight, "more": {"bias": [nested]}, "optimizer": optimizer}
        for epoch in trial.epochs(state):
            (points() @ weight + nested - 1).square().mean().backward()
            if epoch % 2:
                optimizer.step()
                optimizer.zero_grad()
            yield {"loss": (weight.sum() + nested).item()}

    as_in_plain_pytorch(train)


def test_a_gradient_that_was_read_is_named_by_the_study(tmp_path):
    study = th.Study(
        th.trainable(with_numpy({})),
        algorithm=th.GridSearch(max_epochs=3),
        space=th.Space(lr=th.Choice([0.1, 0.2])),
        metric="loss",
        mode="min",
        storage=f"sqlite:///{tmp_path}/t.db",
        name="s",
    )
    study.run(progress=False, executor=th.Local(threads=1))
    for trial in study.trials:
        assert "reads the gradient of 'model.weight'" in str(trial.error)


# -- objects of the user's own that hold networks ----------------------------------------------


class Engine:
    def __init__(self, model, optimizer, *, keeps=("model", "optimizer")):
        self.model, self.optimizer, self.keeps, self.num = model, optimizer, keeps, 0

    def state_dict(self):
        return {"num": self.num, **{name: getattr(self, name).state_dict() for name in self.keeps}}

    def load_state_dict(self, state):
        self.num = state["num"]
        for name in self.keeps:
            getattr(self, name).load_state_dict(state[name])

    def epoch(self, every):
        for _ in range(3):
            self.model(torch.ones(1, 2)).square().sum().backward()
            self.num += 1
            if self.num % every == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()


def parts():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weights_of(model):
    return float(model[0].weight.detach().sum())


@pytest.mark.parametrize("every", [1, 2, 4])
def test_gradients_and_flags_within_an_object_are_kept(every):
    def train(trial):
        trial.suggest_float("lr", 0.1, 0.2)
        engine = Engine(*parts())
        engine.model[0].bias.requires_grad_(False)
        for epoch in trial.epochs({"engine": engine}):
            if epoch == 1:
                engine.model.eval()
            if epoch == 2:
                engine.model[0].bias.requires_grad_(True)
            if epoch:
                engine.epoch(every)
            yield {"loss": weights_of(engine.model)}

    as_in_plain_pytorch(train)


def test_used_gradients_within_an_object_are_refused_if_the_loop_reads_them():
    def train(trial):
        trial.suggest_float("lr", 0.1, 0.2)
        engine = Engine(*parts())
        for _ in trial.epochs({"engine": engine}):
            gradient = engine.model[0].weight.grad
            if gradient is not None:
                engine.num += int(gradient.sum())
            engine.optimizer.zero_grad()
            engine.model[0](torch.ones(1, 2)).sum().backward()
            engine.optimizer.step()
            yield {"loss": weights_of(engine.model)}

    refused(train, name="engine.model.0.weight")


def aliasing(keeps):
    def train(trial):
        trial.suggest_float("lr", 0.1, 0.2)
        model, optimizer = parts()
        both = [model, optimizer]
        for _ in trial.epochs({"engine": Engine(model, optimizer, keeps=keeps)}):
            for _ in range(3):
                both[1].zero_grad()
                model[0](torch.ones(1, 2)).square().sum().backward()
                optimizer.step()
            yield {"loss": weights_of(model)}

    return train


def test_variables_that_are_parts_of_a_kept_object_are_in_its_state():
    as_in_plain_pytorch(aliasing(("model", "optimizer")))


@pytest.mark.parametrize(("keeps", "lost"), [(("model",), "SGD"), (("optimizer",), "Linear")])
def test_parts_that_an_object_does_not_restore_are_refused(keeps, lost):
    with pytest.raises(TaskError, match=f"load_state_dict of this object .*{lost}"):
        as_a_trial(aliasing(keeps), restores=True)


def test_networks_may_share_parameters_but_not_only_memory():
    def train(trial):
        trial.suggest_float("lr", 0.1, 0.2)
        encoder, optimizer = parts()
        whole = torch.nn.Sequential(encoder[0], torch.nn.Linear(2, 1))
        for _ in trial.epochs({"whole": whole, "part": encoder, "optimizer": optimizer}):
            optimizer.zero_grad()
            whole(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            yield {"loss": weights_of(encoder)}

    def in_memory(trial):
        trial.suggest_float("lr", 0.1, 0.2)
        one, other = torch.nn.Linear(4, 1), torch.nn.Linear(2, 1)
        other.weight.data = one.weight.data[:, :2]
        for _ in trial.epochs({"one": one, "other": other}):
            yield {"loss": 0.0}

    as_in_plain_pytorch(train)
    with pytest.raises(TaskError, match="'other' has a tensor in the memory of 'one'"):
        as_a_trial(in_memory, restores=False)
