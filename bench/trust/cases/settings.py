"""Settings hidden from structure: partials, closures, lists, objects, globals, class attributes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from bench.trust.case import Case, case, classes, cross_entropy, mlp, mse, seeded, tokens


def smoothed(x, *, factor):
    return x * factor


class Acting(nn.Module):
    """A module that applies a callable to its input."""

    def __init__(self, k, act):
        super().__init__()
        self.inner = mlp(k)
        self.act = act

    def forward(self, x):
        return self.inner(self.act(x))


@case("A", adversarial=True)
def partial_with_another_setting():
    return Case(model=lambda k: Acting(k, functools.partial(smoothed, factor=1.0 + k)), loss=mse)


@case("A")
def partial_with_the_same_setting():
    return Case(model=lambda k: Acting(k, functools.partial(smoothed, factor=2.0)), loss=mse)


@case("A", adversarial=True)
def closure_with_another_setting():
    def scaled(factor):
        return lambda x: x * factor

    return Case(model=lambda k: Acting(k, scaled(1.0 + k)), loss=mse)


@case("A", adversarial=True)
def default_argument_with_another_setting():
    def scaled(factor):
        def act(x, f=factor):
            return x * f

        return act

    return Case(model=lambda k: Acting(k, scaled(1.0 + k)), loss=mse)


@case("A", adversarial=True)
def callable_object_with_another_setting():
    class Times:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x):
            return x * self.factor

    return Case(model=lambda k: Acting(k, Times(1.0 + k)), loss=mse)


@case("A", adversarial=True)
def callable_with_slots():
    class Times:
        __slots__ = ("factor",)

        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x):
            return x * self.factor

    return Case(model=lambda k: Acting(k, Times(1.0 + k)), loss=mse)


@case("A", adversarial=True)
def bound_method_with_another_setting():
    class Scales:
        def __init__(self, factor):
            self.factor = factor

        def apply(self, x):
            return x * self.factor

    return Case(model=lambda k: Acting(k, Scales(1.0 + k).apply), loss=mse)


class Listing(nn.Module):
    def __init__(self, k, settings):
        super().__init__()
        self.inner = mlp(k)
        self.settings = settings

    def forward(self, x):
        return self.inner(x * self.settings[0]["factor"][0])


@case("A", adversarial=True)
def nested_lists_with_another_setting():
    return Case(model=lambda k: Listing(k, [{"factor": [1.0 + k]}]), loss=mse)


@case("A", adversarial=True)
def namespace_with_another_setting():
    class Configured(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)
            self.config = SimpleNamespace(factor=1.0 + k)

        def forward(self, x):
            return self.inner(x * self.config.factor)

    return Case(model=Configured, loss=mse)


@dataclass(frozen=True)
class Config:
    factor: float


@case("A", adversarial=True)
def dataclass_with_another_setting():
    class Configured(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)
            self.config = Config(1.0 + k)

        def forward(self, x):
            return self.inner(x * self.config.factor)

    return Case(model=Configured, loss=mse)


@case("A", adversarial=True)
def deeply_nested_setting():
    def nested(value):
        for _ in range(8):
            value = SimpleNamespace(inner=[value])
        return value

    class Deep(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.layer, self.config = mlp(k), nested(1.0 + k)

        def forward(self, x):
            value = self.config
            while not isinstance(value, float):
                value = value.inner[0]
            return self.layer(x * value)

    return Case(model=Deep, loss=mse)


@case("A", adversarial=True)
def property_computed_from_a_private_setting():
    class Private(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)
            self.__dict__["_Private__hidden"] = (1.0 + k,)

        @property
        def factor(self):
            return self.__hidden[0]

        def forward(self, x):
            return self.inner(x * self.factor)

    return Case(model=Private, loss=mse)


@case("A", adversarial=True)
def class_made_for_each_model():
    def make(k):
        class Made(nn.Module):
            factor = 1.0 + k

            def __init__(self):
                super().__init__()
                self.inner = mlp(k)

            def forward(self, x):
                return self.inner(x * self.factor)

        return Made()

    return Case(model=make, loss=mse)


@case("A", adversarial=True)
def forward_replaced_on_the_instance():
    def make(k):
        out = mlp(k)
        whole = out.forward
        out.forward = lambda x: whole(x * (1.0 + k))
        return out

    return Case(model=make, loss=mse)


@case("A", adversarial=True)
def setting_looked_up_by_identity():
    factors = {}

    class Looked(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)
            factors[id(self)] = 1.0 + k

        def forward(self, x):
            return self.inner(x * factors.get(id(self), 1.0))

    return Case(model=Looked, loss=mse)


@case("A", adversarial=True)
def setting_kept_in_another_module():
    class Holder(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.register_buffer("unused", torch.zeros(1))
            self.extra = {"factor": 1.0 + k}

    class Reading(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.holder = mlp(k), Holder(k)

        def forward(self, x):
            return self.inner(x * self.holder.extra["factor"])

    return Case(model=Reading, loss=mse)


@case("A", adversarial=True)
def setting_in_extra_state():
    class Extra(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self._factor = mlp(k), torch.tensor(1.0 + k)

        def get_extra_state(self):
            return {"factor": self._factor}

        def set_extra_state(self, state):
            self._factor = state["factor"]

        def forward(self, x):
            return self.inner(x * self._factor)

    return Case(model=Extra, loss=mse)


class HalfRate(nn.Module):
    """A module that computes with its dropout rate instead of passing it on."""

    def __init__(self, k, rate):
        super().__init__()
        self.inner = mlp(k)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        return self.inner(x * (1 - self.drop.p / 2))


@case("A", adversarial=True)
def arithmetic_with_the_dropout_rate():
    return Case(model=lambda k: HalfRate(k, 0.2 * k), loss=mse)


@case("A", adversarial=True)
def math_with_the_dropout_rate():
    class Rooted(HalfRate):
        def forward(self, x):
            return self.inner(x * math.sqrt(1 + self.drop.p))

    return Case(model=lambda k: Rooted(k, 0.2 * k), loss=mse)


@case("A", adversarial=True)
def branch_on_the_dropout_rate():
    class Branching(HalfRate):
        def forward(self, x):
            return self.inner(x * 3 if self.drop.p > 0.15 else x)

    return Case(model=lambda k: Branching(k, 0.2 * k), loss=mse)


@case("A", adversarial=True)
def tensor_made_of_the_dropout_rate():
    class Made(HalfRate):
        def forward(self, x):
            return self.inner(x * torch.full((1,), self.drop.p + 1.0))

    return Case(model=lambda k: Made(k, 0.2 * k), loss=mse)


@case("A", adversarial=True)
def dropout_subclass_with_its_own_arithmetic():
    class Shrinking(nn.Dropout):
        def forward(self, x):
            return x * (1 - self.p)

    def model(k):
        return seeded(
            k, lambda: nn.Sequential(nn.Linear(6, 8), Shrinking(0.2 * k), nn.Linear(8, 1))
        )

    return Case(model=model, loss=mse)


@case("A", adversarial=True)
def epsilon_that_differs():
    def model(k):
        return seeded(
            k,
            lambda: nn.Sequential(
                nn.Linear(6, 8), nn.LayerNorm(8, eps=10.0 ** (-1 - 2 * k)), nn.Linear(8, 1)
            ),
        )

    return Case(model=model, loss=mse)


@case("A", adversarial=True)
def momentum_of_batch_norm_that_differs():
    def model(k):
        return seeded(
            k,
            lambda: nn.Sequential(
                nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.1 * (k + 1)), nn.Linear(8, 1)
            ),
        )

    return Case(model=model, loss=mse)


@case("A", adversarial=True)
def padding_index_that_differs():
    def model(k):
        return seeded(
            k, lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=k), Mean(), nn.Linear(6, 3))
        )

    return Case(model=model, loss=cross_entropy, batch=tokens)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


@case("A", adversarial=True)
def loss_that_reads_a_setting_of_the_model():
    def model(k):
        out = mlp(k, outputs=3)
        out.smoothing = 0.2 * k
        return out

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=model.smoothing)

    return Case(model=model, loss=loss, batch=classes)


@case("A", adversarial=True)
def loss_that_is_a_method_of_the_model():
    class Own(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.penalty = mlp(k), functools.partial(penalty, factor=0.1 * k)

        def forward(self, x):
            return self.inner(x)

    def loss(model, batch):
        return mse(model, batch) + model.penalty(model)

    return Case(model=Own, loss=loss)


def penalty(model, *, factor):
    return factor * sum(p.square().sum() for p in model.parameters())


@case("A", adversarial=True)
def enumerated_mode_in_a_tuple():
    class Moded(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.mode = mlp(k), ("plain", "double", "half")[k]

        def forward(self, x):
            factor = {"plain": 1.0, "double": 2.0, "half": 0.5}[self.mode]
            return self.inner(x * factor)

    return Case(model=Moded, loss=mse)


@case("A", adversarial=True)
def large_constant_tensor_that_differs():
    class Constant(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.table = mlp(k), [torch.full((64, 6), 1.0 + k)]

        def forward(self, x):
            return self.inner(x * self.table[0][0])

    return Case(model=Constant, loss=mse)
