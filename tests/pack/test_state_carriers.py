"""State that no plain attribute carries: the error names the carrier, and its advice works."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from tests.pack._toys import Toy
from tests.pack.test_state_check import CPU, plan, run_check, trained
from thrifty.core import StateError, TaskError
from thrifty.pack import Optimizer, StateCheck, borrowed_streams
from thrifty.pack.verify import place_in


pytestmark = pytest.mark.slow


def network_with_count():
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    network.register_buffer("seen", torch.zeros(()))
    return network


class Counted(Toy):
    """A task whose model counts its steps in a buffer."""

    def network(self, hp):
        return network_with_count()

    def loss(self, model, batch):
        model.seen += 1
        self.act(model, int(model.seen))
        return super().loss(model, batch)


class FreezesOnce(Counted):
    def act(self, model, count):
        if count == 2:
            model[0].weight.requires_grad_(False)


class FreezesEachStep(Counted):
    def act(self, model, count):
        model[0].weight.requires_grad_(count < 2)


def doubled(module, args, output):
    return 2 * output


class HooksOnce(Counted):
    def act(self, model, count):
        if count == 2:
            model[0].register_forward_hook(doubled)


class HooksEachModel(Counted):
    def network(self, hp):
        network = network_with_count()
        network[0].register_forward_hook(
            lambda module, args, output: output * (2 if network.seen >= 2 else 1)
        )
        return network

    def act(self, model, count):
        pass


class WritesToMemory(Counted):
    def network(self, hp):
        self.log = io.BytesIO()
        return network_with_count()

    def act(self, model, count):
        self.log.write(b"x")

    def loss(self, model, batch):
        return super().loss(model, batch) / len(self.log.getvalue() + b"y")


class CountsInABuffer(WritesToMemory):
    def act(self, model, count):
        self.log = io.BytesIO(b"x" * count)


class Teacher(Counted):
    """A network that the task holds moves, as an average of weights does."""

    def network(self, hp):
        self.teacher = nn.Linear(6, 1)
        return network_with_count()

    def act(self, model, count):
        with torch.no_grad():
            self.teacher.weight.mul_(0.9)

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return found + (model(batch[0]) - self.teacher(batch[0]).detach()).square().mean()


class TeacherInAList(Teacher):
    def network(self, hp):
        self.teachers = [nn.Linear(6, 1)]
        return network_with_count()

    @property
    def teacher(self):
        return self.teachers[0]


class TeacherInTheModel(Teacher):
    def network(self, hp):
        network = network_with_count()
        network.teacher = nn.Linear(6, 1).requires_grad_(False)
        network.forward = lambda x: network[2](network[1](network[0](x)))
        self.held = network
        return network

    @property
    def teacher(self):
        return self.held.teacher


SHARED = nn.BatchNorm1d(8, affine=False)


class SharedBuffer(Toy):
    def model(self, hp):
        return nn.Sequential(nn.Linear(6, 8), SHARED, nn.Linear(8, 1))


class Sam(torch.optim.Optimizer):
    """The usual implementation: `first_step` moves the weights, `second_step` puts them back."""

    def __init__(self, params, lr, rho=0.05, momentum=0.9):
        super().__init__(params, {"lr": lr, "rho": rho, "momentum": momentum})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=momentum)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.inner.step()

    def step(self, closure=None):
        raise NotImplementedError


class SamWithOneState(Sam):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.inner.state = self.state

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.inner.state = self.state
        self.inner.param_groups = self.param_groups


class SamTask(Toy):
    optimizer = Optimizer(Sam, lr="lr")

    def step(self, model, batch):
        (optimizer,) = self.optimizers.values()
        loss = self.loss(model, batch)
        loss.backward()
        optimizer.first_step()
        self.loss(model, batch).backward()
        optimizer.second_step()
        return loss


class SamTaskWithOneState(SamTask):
    optimizer = Optimizer(SamWithOneState, lr="lr")


class OnlyFirstBackward(SamTask):
    def step(self, model, batch):
        loss = self.loss(model, batch)
        loss.backward()
        return loss


@pytest.mark.parametrize(
    ("task", "carrier", "advice"),
    [
        (FreezesOnce, "model.0.weight requires_grad", "set requires_grad in each step"),
        (HooksOnce, "model.0 hooks", "register the hook in model"),
        (WritesToMemory, "self.log (a file)", "keep what the file holds"),
        (Teacher, "self.teacher.weight (of a network)", "make self.teacher a module of the model"),
        (TeacherInAList, "self.teachers[0].weight (of a network)", "make self.teachers a module"),
        (SharedBuffer, "model.1.running_mean (shared by trials)", "anew in each call of model"),
        (SamTask, "optimizer.inner (an optimizer)", "self.inner.state = self.state"),
    ],
)
def test_the_error_names_what_carries_the_state(task, carrier, advice):
    with pytest.raises(StateError, match="outside of its checkpoint") as caught:
        run_check(task(), epochs=2)
    message = str(caught.value)
    assert repr(carrier) in message
    assert advice in message
    assert "register_buffer" not in message


@pytest.mark.parametrize(
    "task",
    [FreezesEachStep, HooksEachModel, CountsInABuffer, TeacherInTheModel, SamTaskWithOneState],
)
def test_the_advice_works(task):
    run_check(task(), epochs=2)


def test_the_position_in_a_file_counts(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n" * 9000)
    with (tmp_path / "lines.txt").open() as file:
        before = place_in(file)
        for _ in zip(range(5000), file, strict=False):
            pass
        assert place_in(file) != before
    assert place_in(file) == "closed"


def test_a_step_that_writes_to_no_parameter_is_refused():
    with pytest.raises(TaskError, match=r"call .step\(\), or what the optimizer has instead"):
        run_check(OnlyFirstBackward())


def test_a_trial_whose_network_beside_the_model_has_moved_is_due():
    class Switched(Teacher):
        def act(self, model, count):
            if count > 8:
                super().act(model, count)

    with borrowed_streams():
        check = StateCheck(Switched(), device=CPU)
        trial, member = trained(Switched(), check)
        check.check(trial, member, plan(1), epoch=1, seconds=0.0)
        late, _ = trained(Switched(), check, epochs=6)
        assert check.is_due(late, epoch=1)
