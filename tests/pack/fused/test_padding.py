"""Narrower models share a block with a wider one only where no data can tell them from it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy
from thrifty.pack import SGD, AdamW, ArrayData, BlockOptions, FusedBackend
from thrifty.pack.fused._padding import not_proved
from thrifty.pack.fused._record import record


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]

WIDTHS = (16, 12, 14)


class Hidden(nn.Module):
    """A hidden layer of some width, and what a function makes of it."""

    def __init__(self, width, between):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.last = nn.Linear(width, 1)
        self.between = between

    def forward(self, x):
        return self.between(self, x)


class Wide(Toy):
    dtype = torch.float64
    optimizer = AdamW(lr="lr")
    between = staticmethod(lambda net, x: net.last(net.first(x).tanh()))

    def network(self, hp):
        return Hidden(hp.width, type(self).between)


def task_of(between):
    return type("Made", (Wide,), {"between": staticmethod(between)})()


def widths(*each):
    return [Trial(config={"lr": 0.02, "width": width}, seed=k) for k, width in enumerate(each)]


def num_blocks(task, trials):
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    for slot, trial in enumerate(trials):
        backend.put(slot, trial.member)
    return len(set(backend.blocks.home.values()))


def check(task, trials):
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    found, wanted = together(backend, trials), alone(task, trials)
    for result in (*found, *wanted):
        for metrics in result.metrics:
            metrics.pop("train_loss")
    assert_same(found, wanted, tolerance=1e-10)
    assert not backend.refused


def _halves(net, x):
    left, right = net.first(x).chunk(2, dim=1)
    return (left * right.sigmoid()) @ net.last.weight[:, : left.shape[1]].t()


EXACT = {
    "tanh": lambda net, x: net.last(net.first(x).tanh()),
    "a number that is not zero at zero": lambda net, x: net.last(net.first(x).sigmoid()),
    "scaled by the batch": lambda net, x: net.last(F.gelu(net.first(x)) * x.mean(1, keepdim=True)),
    "added to": lambda net, x: net.last(F.relu(net.first(x) + x.mean(1, keepdim=True))),
    "sum of squares": lambda net, x: (
        net.first(x).square().sum(1, keepdim=True) + net.last(net.first(x))
    ),
    "norm of weights": lambda net, x: (
        net.last(net.first(x).relu()) + net.last.weight.square().sum() + net.first.bias.abs().sum()
    ),
    "transposed": lambda net, x: (net.last.weight @ net.first(x).t()).t(),
    "stacked": lambda net, x: net.last(torch.stack([net.first(x), net.first(-x)]).relu().sum(0)),
    "in turn": lambda net, x: net.last(
        torch.bmm(net.first(x).unsqueeze(2), x[:, None, :2]).relu().sum(2)
    ),
}


@pytest.mark.parametrize("between", EXACT.values(), ids=EXACT)
def test_functions_that_never_see_the_padding(between):
    task = task_of(between)
    assert num_blocks(task, widths(*WIDTHS)) == 1
    check(task, widths(*WIDTHS))


APART = {
    "greatest of a row": lambda net, x: net.first(x).amax(1, True) + net.last(net.first(x)),
    "argmax": lambda net, x: (
        net.last(net.first(x)) + net.first(x).argmax(1, keepdim=True).to(x.dtype)
    ),
    "softmax": lambda net, x: net.last(net.first(x).softmax(1)),
    "mean": lambda net, x: net.first(x).mean(1, keepdim=True),
    "sum of what is not zero there": lambda net, x: (net.first(x) - 1).relu().sum(1, keepdim=True),
    "sum of what the batch decides": lambda net, x: (
        (net.first(x) + x.amax(1, keepdim=True) - 3).relu().sum(1, keepdim=True)
    ),
    "its own width": lambda net, x: net.last(net.first(x)) / net.last.in_features,
    "a number that rarely counts": lambda net, x: net.last(
        net.first(x).clamp(max=50.0 * net.first.out_features)
    ),
    "halves": _halves,
    "the last one": lambda net, x: net.first(x)[:, -1:] + net.last(net.first(x)),
    "from the end": lambda net, x: net.last(net.first(x).flip(1)),
    "one after the other": lambda net, x: net.last(
        torch.cat([net.first(x), net.first(-x)], 1)[:, : net.last.in_features]
    ),
    "picked by the batch": lambda net, x: (
        net.first(x).gather(1, (x[:, :1].abs() * 5).long().clamp(max=11)) + net.last(net.first(x))
    ),
    "a branch": lambda net, x: (
        net.last(net.first(x).tanh()) if net.last.in_features > 13 else net.last(net.first(x).sin())
    ),
}


@pytest.mark.parametrize("between", APART.values(), ids=APART)
def test_functions_that_may_see_the_padding(between):
    task = task_of(between)
    assert num_blocks(task, widths(*WIDTHS)) > 1
    check(task, widths(*WIDTHS))


def test_one_feature_is_repeated_where_many_are_not():
    task = task_of(lambda net, x: (net.first(x) * net.last.weight.sum() * x[:, :1]).sum(1, True))
    check(task, widths(2, 1, 2))


aten = torch.ops.aten
FIRST = torch.arange(1.0, 7.0).view(2, 3)
"""The tensor of a narrower model; the wider one's has a fourth column, of zeros."""


def said_of(wide, own):
    """Return what is said of two programs that reduce the result of a function to a number."""
    programs = []
    for function, x in ((wide, F.pad(FIRST, (0, 1))), (own, FIRST)):
        with torch.no_grad():
            programs.append(record(lambda f=function, x=x: [f(x).sum()], [x])[0])
    return not_proved(*programs)


def test_a_view_by_strides_is_that_of_each_model_s_own_memory():
    """In memory, the wider one's first six numbers are not the narrower one's."""
    assert not said_of(lambda x: x.reshape(2, -1), lambda x: x.reshape(2, -1))
    flat = (lambda x: aten._reshape_alias(x, [8], [1]), lambda x: aten._reshape_alias(x, [6], [1]))
    assert said_of(*flat) == "aten._reshape_alias.default"


@pytest.mark.parametrize(
    ("wide", "own", "message"),
    [
        (lambda x: x.neg(), lambda x: x.neg().neg(), "another number of calls"),
        (lambda x: x.neg(), lambda x: x.abs(), "neg.* and .*abs"),
        (lambda x: x + torch.ones(4), lambda x: x + torch.ones(3), "sum"),
        (lambda x: x + torch.tensor(1.0), lambda x: x + torch.tensor(2.0), "constant"),
        (lambda x: x * 2, lambda x: x * 3, "mul"),
        (lambda x: x.cumsum(1), lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x.cumsum(0), lambda x: x.cumsum(0), "sum"),
        (lambda x: x.mul_(2), lambda x: x.mul_(2), "mul_"),
        (lambda x: x.cos(), lambda x: x.cos(), "sum"),
        (lambda x: x.select(1, -1), lambda x: x.select(1, -1), "select"),
        (lambda x: x.new_full((4,), 1.0), lambda x: x.new_full((3,), 1.0), "sum"),
        (lambda x: torch.arange(4.0) + x, lambda x: torch.arange(3.0) + x, "sum"),
        (lambda x: torch.linspace(0, 1, 4) * x, lambda x: torch.linspace(0, 1, 3) * x, "linspace"),
    ],
)
def test_what_is_not_proved(wide, own, message):
    assert re.search(message, said_of(wide, own))


def test_what_is_proved():
    for function in (
        lambda x: x.sin(),
        lambda x: x.new_zeros(x.shape) + x,
        lambda x: torch.arange(float(x.shape[1])) * x,
        lambda x: x.expand(3, *x.shape).permute(2, 0, 1).sqrt(),
    ):
        assert not said_of(function, function)


class Words(nn.Module):
    """A bag of words; those that it lacks are taken for the last one, if it clamps."""

    def __init__(self, *, words, width, clamps):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.last = nn.Linear(width, 1)
        self.clamps = clamps

    def forward(self, x):
        if self.clamps:
            x = x.clamp(max=self.table.num_embeddings - 1)
        return self.last(self.table(x).mean(1).tanh())


class Text(Toy):
    """Rows of five words, of which one row has words that a small table lacks."""

    dtype = torch.float64
    optimizer = SGD(lr="lr", momentum=0.9)
    clamps = True

    def data(self, hp):
        x = torch.randint(0, 30, (160, 5), generator=torch.Generator().manual_seed(1))
        y = (x % 3).double().sum(1, keepdim=True) - 5
        x[77, 2], x[31, 1] = 47, 46
        return ArrayData(train=(x, y), valid=(x[:20].clone(), y[:20].clone()))

    def network(self, hp):
        return Words(words=hp.words, width=hp.width, clamps=self.clamps)


def texts(*each):
    return [
        Trial(config={"lr": 0.05, "words": words, "width": width}, seed=k)
        for k, (words, width) in enumerate(each)
    ]


def test_a_smaller_vocabulary():
    """What decides is a word that one row of a hundred has."""
    assert num_blocks(Text(), texts((50, 8), (40, 8), (40, 8))) == 2
    check(Text(), texts((50, 8), (40, 8), (40, 8)))


def test_narrower_embeddings():
    check(Text(), texts((50, 8), (50, 6), (50, 7)))


class Unclamped(Text):
    """A table that lacks words of some rows, which is an error where a trial trains alone."""

    clamps = False


def test_words_that_a_table_lacks_are_an_error_in_a_pack_too():
    trials = texts((50, 8), (40, 8))
    backend = FusedBackend(Unclamped(), device=here(), block=BlockOptions(size=8))
    wide, narrow = together(backend, trials)
    assert wide.error is None
    assert narrow.error is not None


class Images(Toy):
    """Convolutions with some number of channels."""

    dtype = torch.float64

    def inputs(self, num, seed):
        return super().inputs(num * 16, seed).reshape(num, 6, 4, 4)

    def targets(self, x):
        return x.sin().sum((1, 2, 3)).unsqueeze(1)

    def network(self, hp):
        return nn.Sequential(
            nn.Conv2d(6, hp.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(hp.width, hp.width, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(hp.width, 2, 1),
            nn.Flatten(),
            nn.Linear(32, 1),
        )


def test_channels():
    assert num_blocks(Images(), widths(*WIDTHS)) == 1
    check(Images(), widths(*WIDTHS))


class Spare(nn.Module):
    """A layer with a parameter that no step trains."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(6, width), nn.Linear(width, 1)
        self.spare = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.last(self.first(x).tanh())


class Sparing(Wide):
    def network(self, hp):
        return Spare(hp.width)


def test_tensors_that_no_step_trains_are_not_padded():
    trials = widths(16, 12, 16)
    check(Sparing(), trials)
    assert num_blocks(Sparing(), trials) == 2
