"""A deep copy stands in for what is made anew only if the two cannot be told apart."""

from __future__ import annotations

import collections
import copy
import functools
import importlib
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from thrifty.integrations._object_graphs import are_only_inside, made_again


NAMES: list[str] = []
MODELS: dict[str, nn.Module] = {}
WEAK: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
TABLE = torch.ones(3)


class Net(nn.Module):
    def __init__(self, *, width: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.loss = nn.MSELoss()


class Slots:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Reduced:
    """An object of which pickle keeps less than it knows."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Reduced, (0,)


class Pair(tuple):
    """A tuple that can change."""


def pair():
    made = Pair((1, 2))
    made.third = random.random()
    return made


class Uncopied:
    """An object that a copy shares."""

    def __deepcopy__(self, memo):
        return self


class Refusing:
    def __reduce_ex__(self, protocol):
        raise RuntimeError("no")

    def __deepcopy__(self, memo):
        return Refusing()


def with_(**attributes):
    net = Net()
    for name, value in attributes.items():
        setattr(net, name, value)
    return net


def tied():
    net = Net()
    net.again, net.weight = net.net[0], net.net[0].weight
    return net


def bound():
    net = Net()
    net.call = net.forward
    return net


def numbers():
    return with_(
        rows=np.zeros((2, 3)),
        last=collections.deque([1, -0.0], maxlen=3),
        seen=collections.defaultdict(list, a=[1]),
        counts=collections.Counter("aab"),
        relu=functools.partial(torch.relu, 1.0),
        first=random.Random(3),
        second=np.random.default_rng(3),
        slots=Slots([1]),
        pair=(1.0, [2]),
        square=lambda x, power=2: x**power,
        dtype=torch.float16,
        lines=iter([1]),
    )


SAME = [Net, tied, bound, numbers, list, lambda: with_(names=frozenset("a"), none=None)]


@pytest.mark.parametrize("make", SAME)
def test_a_copy_is_as_what_is_made(make):
    assert compared(make)


def registered():
    MODELS["last"] = Net()
    return MODELS["last"]


def weakly_registered():
    net = Net()
    WEAK[len(WEAK)] = net
    return net


def part_registered():
    net = Net()
    MODELS["last"] = net.net[0]
    return net


def seeing_itself():
    net = Net()
    net.shown = lambda x: net.net(x)
    return net


def counting():
    count = 0

    def step():
        nonlocal count
        count += 1
        return count

    return with_(step=step)


def one_memory():
    rows = np.zeros(3)
    return with_(rows=rows, tensor=torch.from_numpy(rows))


def hooked():
    net = Net()
    net.net.register_forward_hook(lambda module, args, out: out)
    return net


def with_gradient():
    net = Net()
    net.net(torch.ones(2, 3)).sum().backward()
    return net


def tensor_hooked():
    net = Net()
    net.net[0].weight.register_hook(lambda gradient: gradient)
    return net


@pytest.mark.parametrize(
    "make",
    [
        registered,
        weakly_registered,
        part_registered,
        seeing_itself,
        counting,
        one_memory,
        hooked,
        with_gradient,
        tensor_hooked,
        lambda: with_(names=NAMES),
        lambda: with_(table=TABLE),
        lambda: with_(table=TABLE[:]),
        lambda: with_(rows=np.frombuffer(bytearray(8))),
        lambda: with_(rows=np.array([[]], dtype=object)),
        lambda: with_(generator=torch.Generator()),
        lambda: with_(number=random.random()),
        lambda: with_(slots=Slots(random.random())),
        lambda: with_(reduced=Reduced(random.random())),
        lambda: with_(net=Net(width=random.randrange(2**20))),
        lambda: with_(weight=torch.tensor(random.random())),
        lambda: with_(rows=np.array(random.random())),
        lambda: with_(names={random.random(): 1}),
        lambda: with_(names=[random.random()]),
        lambda: with_(step=lambda x, names=[]: names.append(x)),
        lambda: with_(step=(lambda kind: lambda: kind)(Net)),
        lambda: with_(kind=type("Made", (), {})),
        lambda: with_(pair=pair()),
        lambda: with_(one=Uncopied()),
        lambda: with_(one=Refusing()),
        lambda: with_(shape=torch.empty(2, device="meta")),
        lambda: with_(lines=(line for line in [1])),
        lambda: with_(add=[].append),
        lambda: with_(add=NAMES.append),
    ],
)
def test_a_copy_that_may_differ_is_not_taken(make):
    assert not compared(make)


def one_value(net):
    with torch.no_grad():
        net.net[2].bias += 1e-7


def two_places(net):
    net.net[1].bias = net.net[1].weight


def nothing(net):
    pass


@pytest.mark.parametrize(
    ("change", "is_same"), [(nothing, True), (one_value, False), (two_places, False)]
)
def test_a_copy_is_compared_as_it_is(change, is_same):
    def copied(net, instead):
        made = copy.deepcopy(net)
        change(made)
        return made

    assert compared(Net, copied=copied) == is_same


def test_a_copy_that_shares_a_part_is_not_taken():
    def copied(net, instead):
        made = copy.copy(net)
        made.__dict__ = copy.copy(vars(net))
        return made

    assert not compared(Net, copied=copied)


def test_a_set_of_names_has_no_order():
    def copied(net, instead):
        made = copy.deepcopy(net)
        made.names = {*sorted(net.names, reverse=True)}
        return made

    names = [chr(number) for number in range(40)]
    assert compared(lambda: with_(names=set(names)), copied=copied)
    assert not compared(lambda: with_(names={*names, random.random()}))


def test_metrics_of_torchmetrics_are_copied():
    torchmetrics = pytest.importorskip("torchmetrics")
    torchmetrics.Accuracy(task="binary")  # the first one fills caches of classes
    assert compared(lambda: with_(accuracy=torchmetrics.Accuracy(task="binary")))


def test_the_compiler_refers_to_modules():
    """Once anything is compiled in a process, PyTorch has a weak reference to each new module."""
    importlib.import_module("torch._dynamo.mutation_guard").install_generation_tagging_init()

    class OwnState(Net):
        def __setstate__(self, state):
            self.__dict__.update(state)

    for kind in (Net, OwnState):
        assert compared(kind)


def test_an_object_may_be_held_by_others_for_a_moment():
    held, num_looks = [], []

    def make():
        held.append(Net())
        return held[-1]

    def copied(net, instead):
        num_looks.append(None)
        if len(num_looks) > 1:
            held.clear()
        return copy.deepcopy(net)

    assert compared(make, copied=copied)
    assert len(num_looks) == 2


def compared(make, *, copied=copy.deepcopy):
    def seeded():
        torch.manual_seed(0)
        return make()

    return made_again(seeded(), make=seeded, copied=copied)[1]


def test_what_is_at_work_may_hold_a_value():
    def working(*, elsewhere):
        value, box = [1.0], Slots(None)
        box.value = value
        elsewhere.append(value if elsewhere else None)
        yield are_only_inside([value], box, holders=())

    assert next(working(elsewhere=[]))
    assert not next(working(elsewhere=[None]))
