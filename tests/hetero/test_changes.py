"""Models that change during training: all workers change alike, or all of them explain why not."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.hetero.memberships import ThreadCluster
from thrifty.core import HeteroError, PeerLostError
from thrifty.hetero import HeteroOptions, HeteroTrainer, SampleOrder, StepCurve
from thrifty.hetero._samples import Place
from thrifty.hetero.training._model_state import SharedSums, whole_batch_norm

from .jobs import FEATURES, SAMPLES, Worker, data, distance, loss, model, sgd


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


MANY_SUMS = 1e-6
"""Bucket size in MiB, small enough that each parameter gets its own bucket."""
SPEEDS = {"a": 1.0, "b": 3.0}


def decayed(net):
    """Return an optimizer that moves parameters with zero gradients, but not those without any."""
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def plain(change, *, net=model, optimizer=decayed, criterion=loss, epochs=3):
    """Train in one process that changes its model between steps."""
    net = net()
    step, num = optimizer(net), 0
    order = SampleOrder(SAMPLES, seed=5)
    for epoch in range(epochs):
        indices = list(order.shares(Place(epoch=epoch), (SAMPLES,), ("one",))[0].public)
        for begin in range(0, SAMPLES, 16):
            step.zero_grad()
            criterion(net, data()[indices[begin : begin + 16]]).backward()
            step.step()
            num += 1
            change(num, net, step)
    return net


def together(
    change, *, net=model, optimizer=decayed, criterion=loss, epochs=3, cluster=None, **options
):
    """Train two workers alike and return their models; ``change`` may depend on the worker."""

    def job(name, own):
        def run(members):
            trainer = HeteroTrainer(
                own, optimizer(own), data(), loss=criterion, global_batch=16, seed=5,
                members=members,
                options=HeteroOptions(curve=StepCurve(sample_s=SPEEDS[name]), **options),
            )  # fmt: skip
            for report in trainer.run(epochs=epochs):
                change(report.step, own, trainer._learner.optimizer, name=name)
            return own

        return run

    return (cluster or ThreadCluster()).run({name: job(name, net()) for name in SPEEDS})


def thawing(step, net, optimizer, name=""):
    """Freeze the first layer from step 3 to 6."""
    if step in {2, 6}:
        net[0].requires_grad_(step == 6)


def thawing_late(step, net, optimizer, name=""):
    if step == 5:
        net[0].requires_grad_(True)


def frozen():
    net = model()
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("cap", [None, 25.0, MANY_SUMS])
@pytest.mark.parametrize(("change", "net"), [(thawing, model), (thawing_late, frozen)])
def test_parameters_may_be_frozen_and_unfrozen(change, net, cap):
    expected = plain(change, net=net)
    for own in together(change, net=net, bucket_cap_mb=cap).values():
        assert distance(own, expected) < 1e-12


def test_a_layer_may_be_added_and_replaced():
    def grow(step, net, optimizer, name="a"):
        if step == 4:
            generator = torch.Generator().manual_seed(ord(name))  # workers differ
            made = nn.Linear(8, 8).double()
            with torch.no_grad():
                for each in made.parameters():
                    each.copy_(torch.randn(each.shape, generator=generator) * 0.3)
            net.insert(1, made)
            optimizer.add_param_group({"params": list(made.parameters())})

    expected = plain(grow)
    for own in together(grow).values():
        assert distance(own, expected) < 1e-12


def test_a_layer_may_change_its_type():
    def widen(step, net, optimizer, name=""):
        if step == 4:
            net.float()

    def criterion(net, batch):
        return loss(net, (batch[0].to(net[0].weight.dtype), batch[1]))

    options = {
        "criterion": criterion,
        "optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    }
    expected = plain(widen, **options)
    for own in together(widen, **options).values():
        assert own[0].weight.dtype == torch.float32
        assert distance(own, expected) < 1e-5


def test_a_frozen_parameter_keeps_no_gradient():
    """A frozen parameter gets no gradient, since weight decay would move it otherwise."""
    own = together(thawing, epochs=1)["a"]
    assert [p.grad is None for p in own[0].parameters()] == [True, True]


def test_gradients_of_others_are_no_part_of_a_step():
    """A gradient left in a parameter that is not trained does not enter a step."""
    net = frozen()
    before = net[0].weight.detach().clone()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    trainer = HeteroTrainer(
        net, sgd(net), data(), loss=loss, global_batch=16,
        options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
    )  # fmt: skip
    next(trainer.run(epochs=1))
    assert torch.equal(net[0].weight, before)


@pytest.mark.parametrize("who", ["a", "b"])
def test_one_worker_that_changes_alone_ends_the_training_of_all(who):
    said = []

    def alone(step, net, optimizer, name=""):
        if step == 3 and name == who:
            net[0].requires_grad_(False)

    def job(name):
        def run(members):
            net = model()
            trainer = HeteroTrainer(
                net, sgd(net), data(), loss=loss, global_batch=16, members=members,
                options=HeteroOptions(curve=StepCurve(sample_s=SPEEDS[name]), admit_every=100),
            )  # fmt: skip
            with pytest.raises(HeteroError) as caught:  # noqa: PT012
                for report in trainer.run(epochs=3):
                    alone(report.step, net, None, name=name)
            said.append(str(caught.value))

        return run

    ThreadCluster().run({name: job(name) for name in SPEEDS})
    wanted = f"after step 3, workers {who} of a, b train other parameters than before"
    assert [text.startswith(wanted) for text in said] == [True, True]


def test_workers_that_unfreeze_different_layers_end_the_training():
    def differing(step, net, optimizer, name=""):
        if step == 3:
            net[0 if name == "a" else 2].requires_grad_(False)

    with pytest.raises(HeteroError, match="workers a, b of a, b train other parameters"):
        together(differing)


def test_a_change_just_before_a_meeting_is_found_there():
    def alone(step, net, optimizer, name=""):
        if step == 2 and name == "b":
            net[0].requires_grad_(False)

    with pytest.raises(HeteroError, match="workers a, b train different parameters"):
        together(alone, admit_every=1, cluster=Regrouping())


class Regrouping(ThreadCluster):
    """A cluster where each agreement starts a new generation, as after the loss of a worker."""

    def agree(self, name, step, *, broken):
        view = super().agree(name, step, broken=broken)
        return replace(view, generation=1 + step)


def test_workers_build_the_same_model():
    def job(width):
        def run(members):
            net = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, 3)).double()
            trainer = HeteroTrainer(
                net, sgd(net), data(), loss=loss, global_batch=16, members=members,
                options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
            )  # fmt: skip
            with pytest.raises(HeteroError, match="workers a and b train different models"):
                next(trainer.run(epochs=1))

        return run

    ThreadCluster().run({"a": job(8), "b": job(9)})


def test_what_is_trained_belongs_to_the_model():
    net, criterion = model(), nn.Linear(3, 3).double()
    optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(HeteroError, match=r"trains 2 tensors that are no parameters.*\(3, 3\)"):
        HeteroTrainer(net, optimizer, data(), loss=loss, global_batch=16)


def test_a_newcomer_trains_what_the_others_train():
    """A newcomer trains a layer that the others unfroze before it joined."""
    cluster, late, threads = ThreadCluster(), {}, []

    def job(own, on_step=None):
        def run(members):
            trainer = HeteroTrainer(
                own, decayed(own), data(), loss=loss, global_batch=16, seed=5, members=members,
                options=HeteroOptions(curve=StepCurve(sample_s=1.0), admit_every=2),
            )  # fmt: skip
            for report in trainer.run(epochs=4):
                if on_step:
                    on_step(report)
            return own

        return run

    first, newcomer = frozen(), frozen()

    def on_step(report):
        thawing_late(report.step, first, None)
        if report.step == 7 and not threads:
            member = cluster.member("x")
            threads.append(threading.Thread(target=lambda: late.update(net=job(newcomer)(member))))
            threads[0].start()
            cluster.wait_for("x")

    cluster.run({"a": job(first, on_step)})
    threads[0].join()
    expected = plain(thawing_late, net=frozen, epochs=4)
    assert distance(first, expected) < 1e-12
    assert distance(late["net"], expected) < 1e-12


# --- parts of a model that not every sample uses


class Experts(nn.Module):
    """Sends each sample to the expert of its sign, and does not call an expert without samples."""

    def __init__(self, *, rare):
        super().__init__()
        torch.manual_seed(3)
        self.rare = rare
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 3) for _ in range(2)).double()

    def forward(self, x):
        second = x[:, 0] > self.rare
        out = x.new_zeros(len(x), 3)
        for mine, expert in zip((~second, second), self.experts, strict=True):
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return out


@pytest.mark.parametrize("cap", [None, MANY_SUMS])
@pytest.mark.parametrize("rare", [0.0, 1.2, 9.0])
def test_parameters_that_few_samples_use_are_trained_as_by_one_process(rare, cap):
    """The result is right even where no worker, or only one of them, uses an expert."""
    options = {"net": partial(Experts, rare=rare), "optimizer": decayed}
    expected = plain(lambda *_: None, **options)
    done = together(lambda *_, **__: None, bucket_cap_mb=cap, **options)
    assert all(distance(own, expected) < 1e-12 for own in done.values())


# --- buffers


def spectral():
    net = model()
    torch.manual_seed(0)
    parametrizations.spectral_norm(net[0])
    return net.double()


class Replacing(nn.Module):
    """A model that counts passes in a buffer, replaced each time, and scales by the count."""

    def __init__(self):
        super().__init__()
        self.net = model()
        self.register_buffer("passes", torch.zeros((), dtype=torch.double))

    def forward(self, x):
        if self.training:
            self.passes = self.passes + 1
        return self.net(x) / (1 + 0.01 * self.passes)


class Caching(nn.Module):
    """A model whose table grows with the batches; its first call registers another table."""

    def __init__(self):
        super().__init__()
        self.net = model()
        self.register_buffer("table", torch.zeros(1, dtype=torch.double), persistent=False)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.ones(len(x), dtype=x.dtype)
        if "made" not in self._buffers:
            self.register_buffer("made", torch.ones(len(x), dtype=x.dtype), persistent=False)
        return self.net(x) * self.table[: len(x), None]


@pytest.mark.parametrize("net", [spectral, Replacing, Caching])
def test_a_worker_that_is_left_out_for_a_while_has_the_buffers_of_the_others(net):
    slow = range(8, 40)
    workers = [
        Worker(lambda size, step: float(size), net=net()),
        Worker(lambda size, step: size + (30.0 if step in slow else 0.0), net=net()),
    ]
    done = ThreadCluster().run({
        name: worker.job(30) for name, worker in zip("ab", workers, strict=True)
    })
    sizes = [report.sizes for report in done["a"].reports]
    assert (16, 0) in sizes
    assert sizes[-2] == (8, 8)
    expected = plain(lambda *_: None, net=net, optimizer=sgd, epochs=30)
    for worker in done.values():
        assert distance(worker.net, expected) < 1e-10


@pytest.mark.parametrize("after", range(4, 24, 3))
def test_a_buffer_that_is_replaced_is_put_back_with_its_step(after):
    """When a worker is lost, the others repeat its step from the old buffers."""
    cluster = ThreadCluster()
    cluster.kill("b", after=after)
    team = {
        name: Worker(lambda size, step, at=at: size * (1.0 + at), net=Replacing())
        for at, name in enumerate("abc")
    }
    done = cluster.run({name: worker.job(2) for name, worker in team.items()})
    expected = plain(lambda *_: None, net=Replacing, optimizer=sgd, epochs=2)
    assert all(distance(worker.net, expected) < 1e-12 for worker in done.values())


def test_a_worker_that_is_lost_while_buffers_are_sent_costs_no_step():
    class Failing:
        """A membership that fails in the first broadcast after the meeting."""

        def __init__(self, members, cluster):
            self.members, self.cluster, self.met = members, cluster, False

        def __getattr__(self, name):
            return getattr(self.members, name)

        def broadcast(self, tensor, *, source):
            if self.met:
                self.met = False
                raise PeerLostError("gone while buffers were sent")
            self.members.broadcast(tensor, source=source)

    cluster = ThreadCluster()
    curve = StepCurve(sample_s=1.0, fixed_s=50.0)
    one = Worker(lambda size, step: float(size), net=Replacing())
    two = Worker(lambda size, step: 50.0 + size, net=Replacing(), curve=curve)

    def run(worker):
        def job(members):
            failing = Failing(members, cluster)

            def on_step(report):
                failing.met = report.step == 2

            return worker.job(2, on_step=on_step)(failing)

        return job

    cluster.run({"a": run(one), "b": run(two)})
    assert [report.step for report in one.reports] == list(range(1, 9))
    assert [report.step for report in two.reports] == list(range(1, 9))
    expected = plain(lambda *_: None, net=Replacing, optimizer=sgd, epochs=2)
    assert distance(one.net, expected) < 1e-12
    assert distance(two.net, expected) < 1e-12


# --- batch normalisation


def insert(net):
    net.insert(1, nn.BatchNorm1d(8).double())


def replace_by_copy(net):
    net[1] = copy.deepcopy(net[1])


def take_over(net):
    whole_batch_norm(net, SharedSums(None))


@pytest.mark.parametrize("who", ["ab", "b"])
@pytest.mark.parametrize(
    ("change", "norm"),
    [(insert, True), (insert, False), (replace_by_copy, True), (take_over, True)],
)
def test_a_layer_with_statistics_of_one_share_ends_the_training_of_all(change, norm, who):
    said = []

    def job(name):
        def run(members):
            net = model(norm=norm)
            trainer = HeteroTrainer(
                net, sgd(net), data(), loss=loss, global_batch=16, members=members,
                options=HeteroOptions(curve=StepCurve(sample_s=SPEEDS[name])),
            )  # fmt: skip
            with pytest.raises(HeteroError, match="layer '1'") as caught:  # noqa: PT012
                for report in trainer.run(epochs=1):
                    if report.step == 2 and name in who:
                        change(net)
            said.append(str(caught.value))

        return run

    ThreadCluster().run({name: job(name) for name in SPEEDS})
    assert len(set(said)) == 1
    assert "has come to the model since this trainer was made" in said[0]


def test_a_new_layer_with_fixed_statistics_is_trained_as_by_one_process():
    def grow(step, net, optimizer, name=""):
        if step == 2:
            net.insert(1, nn.BatchNorm1d(8).double().eval().requires_grad_(False))

    expected = plain(grow)
    for own in together(grow).values():
        assert distance(own, expected) < 1e-12
