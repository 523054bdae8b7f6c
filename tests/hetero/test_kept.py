"""State that user code changes in a pass is restored."""

from __future__ import annotations

from collections import deque
from functools import partial

import torch
from torch import nn

from thrifty.hetero.training._model_state import KeptBuffers, untouched


class Owner:
    """An object with every plain kind of state."""

    def __init__(self):
        self.count, self.seen, self.by_name, self.names = 0, [], {}, set()
        self.last, self.total = deque(maxlen=3), torch.zeros(2)

    def loss(self, net, batch):
        self.count += 1
        self.seen.append(batch)
        self.by_name[batch] = batch
        self.names.add(batch)
        self.last.append(batch)
        self.total += 1
        return batch

    __call__ = loss

    def state(self):
        return (
            self.count, list(self.seen), dict(self.by_name), set(self.names), list(self.last),
            self.total.tolist(),
        )  # fmt: skip


def test_objects_whose_methods_are_called():
    owner = Owner()
    owner.loss(None, 1)
    before = owner.state()
    for function in (owner.loss, owner, partial(owner.loss, None), partial(Owner.loss, owner)):
        with untouched(nn.Identity(), function):
            owner.loss(None, 2)
            assert owner.state() != before
        assert owner.state() == before


def test_closures_and_what_they_call():
    count, seen = 0, []

    def inner(batch):
        nonlocal count
        count += 1
        seen.append(batch)

    def outer(net, batch):
        inner(batch)

    outer(None, 1)
    with untouched(nn.Identity(), outer):
        outer(None, 2)
    assert (count, seen) == (1, [1])


def test_containers_stay_the_same_objects():
    seen = [1]

    def note(net, batch):
        seen.append(batch)

    alias = seen
    with untouched(nn.Identity(), note):
        note(None, 2)
    assert alias is seen
    assert seen == [1]


def test_methods_of_modules():
    """Methods of modules work too, such as the loss of a Lightning module."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.inner = 0, nn.BatchNorm1d(2)

        def step(self, net, batch):
            self.calls += 1
            return self.inner(batch)

    both = Both()
    with untouched(nn.Identity(), both.step):
        both.step(None, torch.randn(4, 2))
    assert both.calls == 0


def test_an_error_puts_back_too():
    owner = Owner()
    try:
        with untouched(nn.Identity(), owner.loss):
            owner.loss(None, 1)
            raise KeyError
    except KeyError:
        assert owner.state() == Owner().state()


def test_buffers_say_whether_they_were_changed():
    net = nn.BatchNorm1d(2)
    kept = KeptBuffers(net)
    assert not kept.changed()
    net(torch.randn(4, 2))
    assert kept.changed()
    assert not kept.changed(besides=(nn.BatchNorm1d,))
    kept.restore()
    assert int(net.num_batches_tracked) == 0
    kept = KeptBuffers(net)
    net.running_mean = torch.ones(2)
    assert kept.changed()
    kept.restore()
    assert net.running_mean.tolist() == [0.0, 0.0]
