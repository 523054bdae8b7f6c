"""Ordinary models, which must be fused, and models of unusual structure."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import thrifty as th
from bench.trust.case import (
    Case,
    case,
    classes,
    cross_entropy,
    images,
    mlp,
    mse,
    regression,
    seeded,
    tokens,
)


def net(*layers):
    """Return a function that makes a sequence of layers with the weights of seed k."""
    return lambda k: seeded(k, lambda: nn.Sequential(*[make() for make in layers]))


def linear(a, b, **options):
    return lambda: nn.Linear(a, b, **options)


# -- must be fused -------------------------------------------------------------------------


@case("A", fuses=True)
def perceptron():
    return Case(model=mlp, loss=mse)


@case("A", fuses=True)
def perceptron_with_adam():
    return Case(model=mlp, loss=mse, optimizer=th.Adam(lr="lr", eps=1e-4))


@case("A", fuses=True)
def perceptron_with_adamw():
    return Case(model=mlp, loss=mse, optimizer=th.AdamW(lr="lr", weight_decay=0.1, eps=1e-4))


@case("A", fuses=True)
def perceptron_with_rmsprop():
    return Case(model=mlp, loss=mse, optimizer=th.RMSprop(lr="lr", momentum=0.5, eps=1e-3))


@case("A", fuses=True)
def perceptron_with_adagrad():
    return Case(model=mlp, loss=mse, optimizer=th.Adagrad(lr="lr"))


@case("A", fuses=True)
def nesterov_with_weight_decay_and_clipping():
    optimizer = th.SGD(lr="lr", momentum=0.9, nesterov=True, weight_decay=0.01, clip_norm=0.5)
    return Case(model=mlp, loss=mse, optimizer=optimizer)


@case("A", fuses=True)
def classifier_with_cross_entropy():
    return Case(model=lambda k: mlp(k, outputs=3), loss=cross_entropy, batch=classes)


@case("A", fuses=True)
def label_smoothing():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    return Case(model=lambda k: mlp(k, outputs=3), loss=loss, batch=classes)


@case("A", fuses=True)
def class_weights():
    weight = torch.tensor([0.2, 1.0, 3.0])

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, weight=weight)

    return Case(model=lambda k: mlp(k, outputs=3), loss=loss, batch=classes)


@case("A", fuses=True)
def ignored_index():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, ignore_index=0)

    return Case(model=lambda k: mlp(k, outputs=3), loss=loss, batch=classes)


@case("A", fuses=True)
def dropout_of_different_rates():
    def model(k):
        rate = 0.1 * (k + 1)
        return seeded(
            k, lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(rate), nn.Linear(8, 1))
        )

    return Case(model=model, loss=mse)


@case("A", fuses=True)
def layer_norm_and_gelu():
    model = net(linear(6, 8), lambda: nn.LayerNorm(8), nn.GELU, linear(8, 1))
    return Case(model=model, loss=mse)


@case("A", fuses=True)
def batch_norm():
    model = net(linear(6, 8), lambda: nn.BatchNorm1d(8), nn.ReLU, linear(8, 1))
    return Case(model=model, loss=mse)


@case("A", fuses=True)
def convolutions_with_batch_norm():
    model = net(
        lambda: nn.Conv2d(1, 4, 3, bias=False),
        lambda: nn.BatchNorm2d(4),
        nn.ReLU,
        lambda: nn.MaxPool2d(2),
        nn.Flatten,
        linear(36, 3),
    )
    return Case(model=model, loss=cross_entropy, batch=images)


@case("A", fuses=True)
def group_norm():
    model = net(
        lambda: nn.Conv2d(1, 4, 3), lambda: nn.GroupNorm(2, 4), nn.SiLU, nn.Flatten, linear(144, 3)
    )
    return Case(model=model, loss=cross_entropy, batch=images)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embedding(x)
        return self.out((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


@case("A", fuses=True)
def attention():
    return Case(model=lambda k: seeded(k, Attention), loss=cross_entropy, batch=tokens)


@case("A", fuses=True)
def transformer_encoder():
    def build():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return nn.Sequential(nn.Embedding(11, 8), layer, Pooled(), nn.Linear(8, 3))

    return Case(model=lambda k: seeded(k, build), loss=cross_entropy, batch=tokens)


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Tied(nn.Module):
    def __init__(self, *, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x).mean(1).tanh())


@case("A", fuses=True)
def tied_weights():
    return Case(model=lambda k: seeded(k, Tied), loss=cross_entropy, batch=tokens)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(x + self.b(self.a(x).relu()))


@case("A", fuses=True)
def residual():
    return Case(model=lambda k: seeded(k, Residual), loss=mse)


@case("A", fuses=True)
def frozen_layer():
    def model(k):
        out = mlp(k)
        out[0].requires_grad_(False)
        return out

    return Case(model=model, loss=mse)


class Scaled(nn.Module):
    """A module with a plain parameter and a buffer beside its layers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.randn(1))

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift


@case("A", fuses=True)
def parameters_and_buffers_of_its_own():
    return Case(model=lambda k: seeded(k, Scaled), loss=mse)


class RunningMean(nn.Module):
    """A module that updates a buffer in its forward pass, in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.layer(x - self.mean)


@case("A", fuses=True)
def buffer_updated_in_place():
    return Case(model=lambda k: seeded(k, RunningMean), loss=mse)


@case("A", fuses=True)
def penalty_on_the_weights():
    def loss(model, batch):
        return mse(model, batch) + 0.01 * sum(p.abs().sum() for p in model.parameters())

    return Case(model=mlp, loss=loss)


@case("A", fuses=True)
def dictionary_batches():
    def loss(model, batch):
        return F.mse_loss(model(batch["x"]), batch["y"])

    return Case(model=mlp, loss=loss, batch=lambda s: dict(zip("xy", regression(s), strict=True)))


@case("A", fuses=True)
def batches_of_different_lengths():
    return Case(model=mlp, loss=mse, batch=lambda s: regression(s, rows=16 - 3 * (s % 2)))


@case("A", fuses=True)
def widths_that_are_the_same_lambda():
    return Case(model=lambda k: Lambda(k, torch.relu), loss=mse)


class Lambda(nn.Module):
    def __init__(self, k, act):
        super().__init__()
        self.inner = mlp(k)
        self.act = act

    def forward(self, x):
        return self.inner(self.act(x))


# -- unusual structure ---------------------------------------------------------------------


@case("A", adversarial=True)
def one_of_the_models_is_not_tied():
    return Case(
        model=lambda k: seeded(k, lambda: Tied(tied=k != 1)), loss=cross_entropy, batch=tokens
    )


@case("A", adversarial=True)
def weights_tied_to_another_layer():
    class Three(nn.Module):
        def __init__(self, which):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.out = nn.Linear(6, 1)
            self.layers[2].weight = self.layers[which].weight

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return self.out(x)

    return Case(model=lambda k: seeded(k, lambda: Three(k % 2)), loss=mse)


@case("A", adversarial=True, in_study=False)
def a_backbone_that_all_models_share():
    backbone = seeded(9, lambda: nn.Linear(6, 6))

    def model(k):
        return nn.Sequential(backbone, nn.Tanh(), seeded(k, lambda: nn.Linear(6, 1)))

    return Case(model=model, loss=mse)


@case("A", adversarial=True, in_study=False)
def the_same_model_twice():
    models = [mlp(0), mlp(1)]
    return Case(model=lambda k: models[min(k, 1)], loss=mse)


@case("A", adversarial=True)
def two_parameters_in_one_memory():
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.randn(12)
            self.a = nn.Parameter(whole[:6])
            self.b = nn.Parameter(whole[3:9])

        def forward(self, x):
            return (x * self.a).sum(1, keepdim=True) + (x * self.b).sum(1, keepdim=True)

    return Case(model=lambda k: seeded(k, Overlapping), loss=mse)


@case("A", adversarial=True)
def layers_in_a_plain_list():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(6, 6)]  # a list, no ModuleList: used, but never trained
            self.out = nn.Linear(6, 1)

        def forward(self, x):
            return self.out(self.layers[0](x).tanh())

    return Case(model=lambda k: seeded(k, Hidden), loss=mse)


@case("A", adversarial=True)
def weights_kept_as_plain_tensors():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.randn(6, 6)
            self.out = nn.Linear(6, 1)

        def forward(self, x):
            return self.out(x @ self.mix)

    return Case(model=lambda k: seeded(k, Plain), loss=mse)


@case("A", adversarial=True)
def structures_that_differ():
    return Case(model=lambda k: mlp(k, width=8 + 2 * k), loss=mse)


@case("A", adversarial=True)
def activations_that_differ():
    def model(k):
        act = (nn.Tanh, nn.ReLU, nn.Sigmoid)[k]
        return seeded(k, lambda: nn.Sequential(nn.Linear(6, 8), act(), nn.Linear(8, 1)))

    return Case(model=model, loss=mse)


@case("A")
def lazy_layers():
    model = net(lambda: nn.LazyLinear(8), nn.Tanh, lambda: nn.LazyLinear(1))
    return Case(model=model, loss=mse)


@case("A")
def recurrent_layer():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.gru = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True)
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.gru(self.embedding(x))[0][:, -1])

    return Case(model=lambda k: seeded(k, Recurrent), loss=cross_entropy, batch=tokens)


@case("A")
def sparse_gradients():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6, sparse=True)
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.embedding(x).mean(1))

    return Case(
        model=lambda k: seeded(k, Sparse),
        loss=cross_entropy,
        batch=tokens,
        optimizer=th.SGD(lr="lr"),
    )


@case("A")
def forward_hook():
    def model(k):
        out = mlp(k)
        out[0].register_forward_hook(lambda module, args, output: output * 2)
        return out

    return Case(model=model, loss=mse)


@case("A")
def gradient_hook_on_a_parameter():
    def model(k):
        out = mlp(k)
        out[0].weight.register_hook(lambda grad: grad * 0.5)
        return out

    return Case(model=model, loss=mse)


@case("A", adversarial=True)
def hook_after_accumulation():
    def model(k):
        out = mlp(k)
        out[0].weight.register_post_accumulate_grad_hook(_quarter)
        return out

    return Case(model=model, loss=mse)


def _quarter(parameter):
    parameter.grad.mul_(0.25)


@case("A")
def weight_norm():
    def model(k):
        return seeded(
            k,
            lambda: nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 1)
            ),
        )

    return Case(model=model, loss=mse)


@case("A")
def spectral_norm():
    def model(k):
        return seeded(
            k,
            lambda: nn.Sequential(
                nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 1)
            ),
        )

    return Case(model=model, loss=mse)


@case("A")
def pruned_layer():
    def model(k):
        out = mlp(k)
        prune.l1_unstructured(out[0], "weight", amount=0.4)
        return out

    return Case(model=model, loss=mse)


@case("A", adversarial=True)
def embedding_that_renormalizes():
    class Renormalizing(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 6, max_norm=1.0)
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.embedding(x).mean(1))

    return Case(model=lambda k: seeded(k, Renormalizing), loss=cross_entropy, batch=tokens)


@case("A")
def custom_autograd_function():
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, grad):
            return grad.clamp(-1, 1)

    class Straight(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(0)

        def forward(self, x):
            return self.inner(Clipped.apply(x * self.inner[0].weight.mean()))

    return Case(model=lambda k: seeded(k, Straight), loss=mse)


@case("A")
def checkpointed_segment():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(checkpoint(lambda z: self.a(z).tanh(), x, use_reentrant=False))

    return Case(model=lambda k: seeded(k, Checkpointed), loss=mse)


@case("A", adversarial=True)
def second_derivatives():
    def loss(model, batch):
        x, y = batch
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * slope.square().mean()

    return Case(model=mlp, loss=loss)


@case("A")
def complex_parameters():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 1, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.w).abs()

    return Case(model=lambda k: seeded(k, Complex), loss=mse)


@case("A")
def unused_parameter():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, x):
            return self.used(x)

    return Case(
        model=lambda k: seeded(k, Unused),
        loss=mse,
        optimizer=th.SGD(lr="lr", momentum=0.9, weight_decay=0.5),
    )


@case("A", adversarial=True)
def parameter_used_by_one_model_only():
    class Sometimes(nn.Module):
        def __init__(self, use):
            super().__init__()
            self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 1)
            self.use = (use,)

        def forward(self, x):
            return self.a(x) + self.b(x) if self.use[0] else self.a(x)

    return Case(
        model=lambda k: seeded(k, lambda: Sometimes(k == 1)),
        loss=mse,
        optimizer=th.AdamW(lr="lr", weight_decay=0.5, eps=1e-4),
    )


@case("A")
def parameters_that_are_not_contiguous():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 6).t())
            self.out = nn.Linear(8, 1)

        def forward(self, x):
            return self.out((x @ self.w).tanh())

    return Case(model=lambda k: seeded(k, Transposed), loss=mse)


@case("A")
def expanded_buffer():
    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.register_buffer("mask", torch.rand(1, 1).expand(1, 6))

        def forward(self, x):
            return self.layer(x * self.mask)

    return Case(model=lambda k: seeded(k, Expanded), loss=mse)


@case("A")
def two_losses_in_a_tuple():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x):
            h = self.body(x).tanh()
            return self.a(h), self.b(h)

    def loss(model, batch):
        x, y = batch
        a, b = model(x)
        return F.mse_loss(a, y) + 0.3 * F.l1_loss(b, y)

    return Case(model=lambda k: seeded(k, Two), loss=loss)


@case("A", adversarial=True)
def numpy_in_the_forward_pass():
    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            scale = float(x.detach().numpy().std())
            return self.layer(x / scale)

    return Case(model=lambda k: seeded(k, Leaving), loss=mse)
