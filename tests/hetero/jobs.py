"""Small jobs on workers of unequal speed, and the plain loop that they must equal."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thrifty.hetero import HeteroOptions, HeteroTrainer, SampleOrder
from thrifty.hetero._samples import Place
from thrifty.perf import StepCurve
from thrifty.testing import VirtualClock


SAMPLES, FEATURES = 60, 6
_TRAINER_OPTIONS = {"global_batch", "seed", "private", "meter", "collate"}


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator).to(dtype)
    y = torch.randint(0, 3, (SAMPLES,), generator=generator)
    return TensorDataset(x, y)


def model(norm=False, dtype=torch.float64):
    torch.default_generator.manual_seed(3)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def loss(net, batch):
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


class Worker:
    """A worker of a given speed: a step takes ``seconds(size, step)`` on its own clock."""

    def __init__(self, seconds, *, net=None, optimizer=sgd, **options):
        self.clock = VirtualClock()
        self._seconds = seconds
        self.net = net or model()
        self.trained = []
        self.reports = []
        dataset = options.pop("dataset", None) or data()
        more = {name: options.pop(name) for name in _TRAINER_OPTIONS & options.keys()}
        hetero = HeteroOptions(**{"curve": StepCurve(sample_s=1.0), "stand_by": True, **options})
        self._make = lambda members: HeteroTrainer(
            self.net,
            optimizer(self.net),
            dataset,
            loss=self._loss,
            members=members,
            clock=self.clock,
            options=hetero,
            **{"global_batch": 16, "seed": 5, **more},
        )

    def _loss(self, net, batch):
        self.clock.advance(self._seconds(len(batch[0]), len(self.reports)))
        return loss(net, batch)

    def job(self, epochs, on_step=None):
        def run(members):
            self.trainer = self._make(members)
            for report in self.trainer.run(epochs=epochs):
                self.reports.append(report)
                if on_step:
                    on_step(report)
            return self

        return run


class Costly:
    """A membership whose sums take time on a worker's clock, the more workers the longer."""

    def __init__(self, members, clock, seconds):
        self._members, self._clock, self._seconds = members, clock, seconds
        self._size = self._everyone = 1

    def agree(self, *, step, broken=False):
        view = self._members.agree(step=step, broken=broken)
        self._size = self._everyone = len(view.names)
        return view

    def all_reduce(self, tensor):
        self.begin_all_reduce(tensor)()

    def begin_all_reduce(self, tensor):
        wait = self._members.begin_all_reduce(tensor)

        def waits():
            wait()
            share = (self._size - 1) / max(1, self._everyone - 1)
            self._clock.advance(self._seconds * share)

        return waits

    def broadcast(self, tensor, *, source):
        self._members.broadcast(tensor, source=source)

    def close(self):
        self._members.close()

    def narrow(self, ranks):
        self._members.narrow(ranks)
        self._size = len(ranks)

    def send(self, tensor, *, to):
        self._members.send(tensor, to=to)

    def receive(self, tensor, *, source):
        self._members.receive(tensor, source=source)


def plain(epochs, **options):
    """Train in one process on the whole batch."""
    dataset = options.pop("dataset", None) or data()
    return plain_with(loss, dataset, epochs=epochs, **options)


def plain_with(loss, dataset, *, epochs, net=None, optimizer=sgd, batch=16, seed=5):
    """Train in one process on the whole batch, with any loss."""
    net = net or model()
    step = optimizer(net)
    order = SampleOrder(len(dataset), seed=seed)
    losses = []
    for epoch in range(epochs):
        shares = order.shares(Place(epoch=epoch), (len(dataset),), ("one",))
        indices = list(shares[0].public)
        for begin in range(0, len(indices), batch):
            x, y = dataset[indices[begin : begin + batch]]
            step.zero_grad()
            value = loss(net, (x, y))
            value.backward()
            step.step()
            losses.append(value.item())
    return net, losses


def distance(one, other):
    """Return the largest difference of any parameter or buffer, relative to its largest value."""
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    return max(
        float((a[k].double() - b[k].double()).abs().max() / (b[k].double().abs().max() + 1e-300))
        for k in a
        if a[k].is_floating_point()
    )


__all__ = ["Costly", "Worker", "data", "distance", "loss", "model", "plain", "plain_with", "sgd"]
