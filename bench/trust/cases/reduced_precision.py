"""Half precision, autocast, mixed dtypes, and optimizers with something special."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th
from bench.trust.case import Case, case, classes, cross_entropy, mlp, mse, regression, seeded


def halves(dtype):
    def batch(step):
        x, y = regression(step)
        return x.to(dtype), y.to(dtype)

    return batch


@case("A", adversarial=True)
def bfloat16_parameters():
    return Case(model=lambda k: mlp(k).to(torch.bfloat16), loss=mse, batch=halves(torch.bfloat16))


@case("A", adversarial=True)
def float16_parameters():
    return Case(model=lambda k: mlp(k).to(torch.float16), loss=mse, batch=halves(torch.float16))


@case("A", adversarial=True)
def bfloat16_with_adam():
    return Case(
        model=lambda k: mlp(k).to(torch.bfloat16),
        loss=mse,
        batch=halves(torch.bfloat16),
        optimizer=th.Adam(lr="lr", eps=1e-3),
    )


@case("A", fuses=True)
def double_precision():
    return Case(model=lambda k: mlp(k).double(), loss=mse, batch=halves(torch.float64))


@case("A", adversarial=True)
def mixed_parameter_types():
    class Mixed(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.a = seeded(k, lambda: nn.Linear(6, 8)).to(torch.bfloat16)
            self.b = seeded(k, lambda: nn.Linear(8, 1))

        def forward(self, x):
            return self.b(self.a(x.to(torch.bfloat16)).float().tanh())

    return Case(model=Mixed, loss=mse)


@case("A", adversarial=True)
def autocast_in_the_loss():
    def loss(model, batch):
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return F.mse_loss(out.float(), y)

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def autocast_in_forward():
    class Casting(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k, outputs=3)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    return Case(model=Casting, loss=cross_entropy, batch=classes)


@case("A", adversarial=True)
def autocast_as_a_decorator():
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def loss(model, batch):
        return mse(model, batch)

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def loss_in_double():
    def loss(model, batch):
        x, y = batch
        return F.mse_loss(model(x).double(), y.double())

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def insists_on_float32():
    class Insisting(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            assert x.dtype == torch.float32, x.dtype
            return self.inner(x)

    return Case(model=Insisting, loss=mse)


@case("A", adversarial=True)
def integer_buffer_that_counts():
    class Counts(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            if self.training:
                self.steps += 1
            return self.inner(x) / self.steps

    return Case(model=Counts, loss=mse)


@case("A", adversarial=True)
def loss_of_one_element_and_a_shape():
    def loss(model, batch):
        return mse(model, batch).reshape(1)

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def loss_scaled_by_a_tiny_number():
    def loss(model, batch):
        return 1e-6 * mse(model, batch)

    return Case(model=mlp, loss=loss, values=lambda k: {"lr": 1e4 / (k + 1)})


@case("A", adversarial=True)
def diverging_learning_rate():
    return Case(model=mlp, loss=mse, values=lambda k: {"lr": 30.0 * k})


# -- optimizers ----------------------------------------------------------------------------


@case("A")
def adam_with_amsgrad():
    return Case(model=mlp, loss=mse, optimizer=th.Adam(lr="lr", amsgrad=True, eps=1e-3))


@case("A")
def maximizing():
    def loss(model, batch):
        return -mse(model, batch)

    return Case(model=mlp, loss=loss, optimizer=th.SGD(lr="lr", maximize=True))


@case("A")
def centered_rmsprop():
    return Case(model=mlp, loss=mse, optimizer=th.RMSprop(lr="lr", centered=True, eps=1e-2))


@case("A")
def adadelta():
    return Case(model=mlp, loss=mse, optimizer=th.Optimizer(torch.optim.Adadelta, lr="lr"))


@case("A", adversarial=True)
def subclass_of_sgd():
    class Halved(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            return super().step(closure)

    return Case(model=mlp, loss=mse, optimizer=th.Optimizer(Halved, lr="lr"))


@case("A", adversarial=True)
def optimizer_that_counts_in_its_groups():
    class Growing(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(group["count"])
            return super().step(closure)

    return Case(model=mlp, loss=mse, optimizer=th.Optimizer(Growing, lr="lr"))


@case("A", adversarial=True)
def learning_rate_as_a_tensor():
    return Case(model=mlp, loss=mse, values=lambda k: {"lr": torch.tensor(0.05 / (k + 1))})


@case("A")
def learning_rate_of_zero_for_one():
    return Case(model=mlp, loss=mse, values=lambda k: {"lr": 0.05 * (k > 0)})


@case("A")
def momentum_of_zero_for_one():
    return Case(
        model=mlp,
        loss=mse,
        optimizer=th.SGD(lr="lr", momentum="m"),
        values=lambda k: {"lr": 0.05, "m": 0.0 if k == 1 else 0.9},
    )


@case("A")
def weight_decay_for_one_only():
    return Case(
        model=mlp,
        loss=mse,
        optimizer=th.AdamW(lr="lr", weight_decay="wd", eps=1e-4),
        values=lambda k: {"lr": 0.05, "wd": 0.5 * (k == 1)},
    )
