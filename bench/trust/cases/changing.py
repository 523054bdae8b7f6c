"""Values that change between steps, and forward passes that change something."""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.trust.case import Case, case, mlp, mse, normal, seeded


@case("A", adversarial=True)
def closure_changed_between_steps():
    factor = 1.0

    def loss(model, batch):
        return factor * mse(model, batch)

    def between(step, models):
        nonlocal factor
        factor = 1.0 + step

    return Case(model=mlp, loss=loss, between=between)


@case("A", adversarial=True)
def list_changed_between_steps():
    factor = [1.0]

    def loss(model, batch):
        return factor[0] * mse(model, batch)

    def between(step, models):
        factor[0] = 1.0 + step

    return Case(model=mlp, loss=loss, between=between)


FACTOR = 1.0


@case("A", adversarial=True)
def global_changed_between_steps():
    def loss(model, batch):
        return FACTOR * mse(model, batch)

    def between(step, models):
        globals()["FACTOR"] = 1.0 + step

    return Case(model=mlp, loss=loss, between=between)


class Settings:
    factor = 1.0


@case("A", adversarial=True)
def class_attribute_changed_between_steps():
    class Local:
        factor = 1.0

    def loss(model, batch):
        return Local.factor * mse(model, batch)

    def between(step, models):
        Local.factor = 1.0 + step

    return Case(model=mlp, loss=loss, between=between)


@case("A", adversarial=True)
def object_changed_between_steps():
    config = Settings()

    def loss(model, batch):
        return config.factor * mse(model, batch)

    def between(step, models):
        config.factor = 1.0 + step

    return Case(model=mlp, loss=loss, between=between)


@case("A", adversarial=True)
def tensor_changed_between_steps():
    factor = torch.ones(1)

    def loss(model, batch):
        return factor.sum() * mse(model, batch)

    def between(step, models):
        factor.fill_(1.0 + step)

    return Case(model=mlp, loss=loss, between=between)


@case("A", adversarial=True)
def value_of_a_tensor_read_and_changed():
    factor = torch.ones(1)

    def loss(model, batch):
        return float(factor) * mse(model, batch)

    def between(step, models):
        factor.fill_(1.0 + step)

    return Case(model=mlp, loss=loss, between=between)


@case("A", adversarial=True)
def array_changed_between_steps():
    factor = np.ones(1)

    def loss(model, batch):
        return float(factor[0]) * mse(model, batch)

    def between(step, models):
        factor[0] = 1.0 + step

    return Case(model=mlp, loss=loss, between=between)


@case("A", adversarial=True)
def attribute_of_a_module_changed():
    class Warm(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.t = mlp(k), 1.0

        def forward(self, x):
            return self.inner(x * self.t)

    def between(step, models):
        for model in models:
            model.t = 1.0 / (1 + step)

    return Case(model=Warm, loss=mse, between=between)


@case("A", adversarial=True)
def attribute_of_one_module_changed():
    class Warm(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.t = mlp(k), 1.0

        def forward(self, x):
            return self.inner(x * self.t)

    def between(step, models):
        if step == 3:
            models[-1].t = 3.0

    return Case(model=Warm, loss=mse, between=between)


@case("A", adversarial=True)
def slope_of_a_layer_changed():
    def model(k):
        return seeded(k, lambda: nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 1)))

    def between(step, models):
        for each in models:
            each[1].negative_slope = 0.1 * step

    return Case(model=model, loss=mse, between=between)


@case("A", adversarial=True)
def layer_frozen_between_steps():
    def between(step, models):
        for model in models:
            model[0].requires_grad_(step < 2)

    return Case(model=mlp, loss=mse, between=between)


@case("A", adversarial=True)
def layer_unfrozen_between_steps():
    def between(step, models):
        for model in models:
            model[0].requires_grad_(step >= 3)

    return Case(model=mlp, loss=mse, between=between)


@case("A", adversarial=True)
def parameter_replaced_between_steps():
    def between(step, models):
        if step == 2:
            for model in models:
                with torch.no_grad():
                    model[0].weight.data = model[0].weight.data * 0.5

    return Case(model=mlp, loss=mse, between=between)


@case("A")
def parameters_scaled_in_place_between_steps():
    def between(step, models):
        for model in models:
            with torch.no_grad():
                model[0].weight.mul_(0.9)

    return Case(model=mlp, loss=mse, between=between)


@case("A")
def state_loaded_between_steps():
    def between(step, models):
        if step == 3:
            for k, model in enumerate(models):
                model.load_state_dict(mlp(k + 10).state_dict())

    return Case(model=mlp, loss=mse, between=between)


@case("A", adversarial=True)
def hook_added_between_steps():
    def between(step, models):
        if step == 2:
            for model in models:
                model[0].register_forward_hook(lambda module, args, out: out * 2)

    return Case(model=mlp, loss=mse, between=between)


@case("A", adversarial=True)
def layer_replaced_between_steps():
    def between(step, models):
        if step == 2:
            for model in models:
                model[1] = nn.Sigmoid()

    return Case(model=mlp, loss=mse, between=between)


@case("A")
def dropout_rate_changed_between_steps():
    def model(k):
        return seeded(k, lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1)))

    def between(step, models):
        for each in models:
            each[1].p = 0.1 * step

    return Case(model=model, loss=mse, between=between)


@case("A", adversarial=True)
def function_patched_between_steps():
    holder = {"act": torch.tanh}

    def loss(model, batch):
        x, y = batch
        return F.mse_loss(holder["act"](model(x)), y)

    def between(step, models):
        holder["act"] = torch.tanh if step % 2 else torch.sin

    return Case(model=mlp, loss=loss, between=between)


@case("A", adversarial=True)
def environment_changed_between_steps():
    def loss(model, batch):
        return float(os.environ.get("TRUST_FACTOR", "1")) * mse(model, batch)

    def between(step, models):
        os.environ["TRUST_FACTOR"] = str(1 + (step > 2))

    return Case(model=mlp, loss=loss, between=between)


# -- forward passes that change something --------------------------------------------------


class Counting(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.inner, self.calls = mlp(k), 0

    def forward(self, x):
        self.calls += self.training
        return self.inner(x / self.calls)


@case("A", adversarial=True)
def counter_in_an_attribute():
    return Case(model=Counting, loss=mse)


@case("A", adversarial=True)
def counter_in_a_closure():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        return mse(model, batch) / calls

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def counter_in_a_list():
    calls = []

    def loss(model, batch):
        calls.append(1)
        return mse(model, batch) / len(calls)

    return Case(model=mlp, loss=loss)


CALLS = {"num": 0}


@case("A", adversarial=True)
def counter_in_a_global():
    CALLS["num"] = 0

    def loss(model, batch):
        CALLS["num"] += 1
        return mse(model, batch) / CALLS["num"]

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def counter_on_the_class():
    class Classy(nn.Module):
        calls = 0

        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            type(self).calls += 1
            return self.inner(x / type(self).calls)

    return Case(model=Classy, loss=mse)


@case("A", adversarial=True)
def iterator_of_factors():
    factors = itertools.cycle([1.0, 2.0, 3.0])

    def loss(model, batch):
        return next(factors) * mse(model, batch)

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def generator_of_factors():
    def count():
        number = 0.0
        while True:
            number += 1.0
            yield number

    factors = count()

    def loss(model, batch):
        return next(factors) * mse(model, batch)

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def cached_property_of_the_first_batch():
    class Caching(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.scale = mlp(k), None

        def forward(self, x):
            if self.scale is None:
                self.scale = x.detach().abs().mean()
            return self.inner(x / self.scale)

    return Case(model=Caching, loss=mse)


@case("A", adversarial=True)
def parameters_normalized_in_forward():
    class Normalizing(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            with torch.no_grad():
                weight = self.inner[0].weight
                weight.div_(weight.norm(dim=1, keepdim=True))
            return self.inner(x)

    return Case(model=Normalizing, loss=mse)


@case("A", adversarial=True)
def parameters_decayed_through_data():
    def loss(model, batch):
        model[0].weight.data.mul_(0.9)
        return mse(model, batch)

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def input_changed_in_place():
    class InPlace(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            return self.inner(x.mul_(1.5))

    return Case(model=InPlace, loss=mse)


@case("A", adversarial=True)
def input_changed_through_numpy():
    class ThroughNumpy(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            x.numpy()[:] *= 1.5
            return self.inner(x)

    return Case(model=ThroughNumpy, loss=mse)


@case("A", adversarial=True)
def labels_popped_from_the_batch():
    def loss(model, batch):
        y = batch.pop("y")
        return F.mse_loss(model(batch["x"]), y)

    def batch(step):
        x = normal(16, 6, seed=step)
        return {"x": x, "y": x.sum(1, keepdim=True)}

    return Case(model=mlp, loss=loss, batch=batch)


@case("A", adversarial=True)
def gradient_of_the_input_accumulated():
    def loss(model, batch):
        x, y = batch
        x.requires_grad_()
        first = F.mse_loss(model(x), y)
        first.backward(retain_graph=True)
        moved = x.detach() + 0.1 * x.grad.sign()
        model.zero_grad()
        return F.mse_loss(model(moved), y)

    return Case(model=mlp, loss=loss)


# -- random draws --------------------------------------------------------------------------


@case("A", adversarial=True)
def python_draws_in_forward():
    class Stochastic(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            return self.inner(x * 2 if random.random() < 0.5 else x)

    return Case(model=Stochastic, loss=mse)


@case("A", adversarial=True)
def numpy_draws_in_the_loss():
    def loss(model, batch):
        return float(np.random.rand()) * mse(model, batch)  # noqa: NPY002

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def generator_of_its_own():
    class Drawing(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.rng = mlp(k), np.random.default_rng(k)

        def forward(self, x):
            return self.inner(x + float(self.rng.normal()))

    return Case(model=Drawing, loss=mse)


@case("A", adversarial=True)
def torch_generator_of_its_own():
    class Drawing(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)
            self.generator = torch.Generator().manual_seed(k)

        def forward(self, x):
            return self.inner(x + torch.randn(1, generator=self.generator))

    return Case(model=Drawing, loss=mse)


@case("A")
def torch_noise_in_forward():
    class Noisy(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            return self.inner(x + 0.1 * torch.randn_like(x))

    return Case(model=Noisy, loss=mse)


@case("A", adversarial=True)
def reseeds_torch_in_forward():
    class Reseeding(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner, self.drop = mlp(k), nn.Dropout(0.5)

        def forward(self, x):
            torch.manual_seed(0)
            return self.inner(self.drop(x))

    return Case(model=Reseeding, loss=mse)


@case("A", adversarial=True)
def random_branch_that_is_rare():
    class Rare(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.inner = mlp(k)

        def forward(self, x):
            return self.inner(x * 3 if random.random() < 0.2 else x)

    return Case(model=Rare, loss=mse)


@case("A", adversarial=True)
def branch_on_the_parameters():
    def loss(model, batch):
        value = mse(model, batch)
        if float(model[0].weight.detach().abs().mean()) > 0.2:
            value = value * 2
        return value

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def branch_on_the_batch():
    def loss(model, batch):
        value = mse(model, batch)
        return value * 2 if bool(batch[0].mean() > 0) else value

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def branch_on_the_loss():
    def loss(model, batch):
        value = mse(model, batch)
        return value if value.item() < 2.0 else value.sqrt()

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def rows_selected_by_value():
    def loss(model, batch):
        x, y = batch
        kept = y[:, 0] > 0
        return F.mse_loss(model(x[kept]), y[kept])

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def hardest_rows_only():
    def loss(model, batch):
        x, y = batch
        each = (model(x) - y).square()[:, 0]
        return each.topk(4).values.mean()

    return Case(model=mlp, loss=loss)


@case("A", adversarial=True)
def row_count_in_the_loss():
    def loss(model, batch):
        x, y = batch
        return F.mse_loss(model(x), y, reduction="sum") / 16

    return Case(model=mlp, loss=loss, batch=lambda s: _sized(s))


def _sized(step):
    x = normal(16 - 5 * (step % 2), 6, seed=step)
    return x, x.sum(1, keepdim=True)
