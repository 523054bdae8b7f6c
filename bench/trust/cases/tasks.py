"""Tasks that move hyper-parameters, keep state of their own or group parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import thrifty as th
from bench.trust.case import mlp, mse, normal
from bench.trust.moving import PLAIN, At, Loop, Regression, follow_lr, moving, sgd


# -- E: groups of parameters ---------------------------------------------------------------


def _split(
    model: nn.Module, is_in: Callable[[str, nn.Parameter], bool]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.named_parameters())
    return [p for n, p in named if not is_in(n, p)], [p for n, p in named if is_in(n, p)]


def _adamw(is_in: Callable[[str, nn.Parameter], bool], **other: Any) -> Any:
    def make(model: nn.Module, at: At) -> torch.optim.Optimizer:
        most, some = _split(model, is_in)
        return torch.optim.AdamW(
            [{"params": most}, {"params": some, **other}], lr=at["lr"], weight_decay=0.1
        )

    return make


@moving(
    "E",
    loop=Loop(
        optimizer=_adamw(lambda name, _: name.endswith("bias"), weight_decay=0.0), follow=follow_lr
    ),
)
def no_decay_for_biases_by_pattern() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.AdamW(lr="lr", weight_decay=0.1, groups={"*.bias": {"weight_decay": 0}})

    return Mine


@moving(
    "E", loop=Loop(optimizer=_adamw(lambda _, p: p.ndim < 2, weight_decay=0.0), follow=follow_lr)
)
def no_decay_for_vectors_by_predicate() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.AdamW(
            lr="lr", weight_decay=0.1, groups={(lambda p: p.ndim < 2): {"weight_decay": 0}}
        )

    return Mine


def _follow_first_layer(factor: float) -> Callable[[list[dict[str, Any]], At], None]:
    def follow(groups: list[dict[str, Any]], at: At) -> None:
        groups[0]["lr"], groups[1]["lr"] = at["lr"], factor * at["lr"]

    return follow


@moving(
    "E",
    loop=Loop(
        optimizer=_adamw(lambda name, _: name.startswith("0.")), follow=_follow_first_layer(0.1)
    ),
)
def smaller_rate_for_one_layer() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.AdamW(lr="lr", weight_decay=0.1, groups={"0.*": {"lr": th.times("lr", 0.1)}})

    return Mine


def _merged(model: nn.Module, at: At) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [named["2.weight"]]},
            {"params": [named["0.weight"]]},
            {"params": [named["2.bias"]], "weight_decay": 0.0},
            {"params": [named["0.bias"]], "weight_decay": 0.0},
        ],
        lr=at["lr"],
        weight_decay=0.1,
    )


def _follow_merged(groups: list[dict[str, Any]], at: At) -> None:
    for group, factor in zip(groups, (1.0, 0.1, 1.0, 0.1), strict=True):
        group["lr"] = factor * at["lr"]


@moving("E", loop=Loop(optimizer=_merged, follow=_follow_merged))
def groups_that_overlap() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.AdamW(
            lr="lr",
            weight_decay=0.1,
            groups={"*.bias": {"weight_decay": 0}, "0.*": {"lr": th.times("lr", 0.1)}},
        )

    return Mine


def _two_rates(parameters: Any, *, lr: float) -> torch.optim.Optimizer:
    weights: list[torch.Tensor] = []
    biases: list[torch.Tensor] = []
    for each in parameters:
        (biases if each.ndim < 2 else weights).append(each)
    return torch.optim.SGD(
        [{"params": weights, "lr": lr}, {"params": biases, "lr": lr / 4}], lr=lr, momentum=0.9
    )


def _ours_of_two_rates(model: nn.Module, at: At) -> torch.optim.Optimizer:
    return _two_rates(model.parameters(), lr=at["lr"])


@moving("E", loop=Loop(optimizer=_ours_of_two_rates, follow=_follow_first_layer(0.25)))
def factory_that_makes_groups() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.Optimizer(_two_rates, lr="lr")

    return Mine


@moving(
    "E",
    loop=Loop(
        optimizer=_adamw(lambda name, _: name.endswith("bias"), weight_decay=0.0),
        follow=follow_lr,
        clip_norm=0.5,
    ),
)
def groups_that_are_clipped_together() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.AdamW(
            lr="lr", weight_decay=0.1, clip_norm=0.5, groups={"*.bias": {"weight_decay": 0}}
        )

    return Mine


@moving("E", refused="no parameter of the model")
def pattern_without_a_parameter() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.AdamW(lr="lr", groups={"backbone.*": {"weight_decay": 0}})

    return Mine


# -- C: what moves -------------------------------------------------------------------------

STEPS = th.MultiStep([0.1, 0.3, 0.2, 0.4], milestones=[1, 2, 3])


@moving("C", loop=PLAIN)
def optimizer_as_a_method() -> type[th.Task]:
    class Mine(Regression):
        def optimizer(self, hp: th.HyperParameters) -> th.Optimizer:
            return th.SGD(lr=hp.lr, momentum=0.9)

    return Mine


def _follow_momentum(groups: list[dict[str, Any]], at: At) -> None:
    for group in groups:
        group.update(lr=at["lr"], momentum=at["m"])


@moving("C", loop=Loop(optimizer=sgd, follow=_follow_momentum), m=STEPS)
def momentum_that_moves() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.SGD(lr="lr", momentum="m")

    return Mine


@moving("C", loop=Loop(optimizer=sgd, follow=_follow_momentum), m=STEPS)
def two_options_that_move_in_a_method() -> type[th.Task]:
    class Mine(Regression):
        def optimizer(self, hp: th.HyperParameters) -> th.Optimizer:
            return th.SGD(lr=hp.lr, momentum=hp["m"])

    return Mine


@moving(
    "C",
    loop=Loop(optimizer=sgd, follow=follow_lr, batch_size=lambda at: int(at["b"])),
    b=th.MultiStep([8, 16, 32, 16], milestones=[1, 2, 3]),
)
def batch_size_that_moves() -> type[th.Task]:
    class Mine(Regression):
        batch_size = "b"

    return Mine


def _set_slope(model: Any, at: At) -> None:
    model[1].negative_slope = at["s"]


def _leaky() -> nn.Module:
    model = mlp(3)
    model[1] = nn.LeakyReLU(0.1)  # type: ignore[operator]
    return model


@moving("C", loop=Loop(optimizer=sgd, follow=follow_lr, adapt=_set_slope), s=STEPS)
def slope_that_moves_by_adapt() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return _leaky()

        def adapt(self, model: nn.Module, hp: th.HyperParameters) -> None:
            _set_slope(model, hp)

    return Mine


def _shrink(model: nn.Module, at: At) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * at["s"]


@moving("C", loop=Loop(optimizer=sgd, follow=follow_lr, adapt=_shrink), s=STEPS)
def weights_given_other_memory_by_adapt() -> type[th.Task]:
    class Its(Regression):
        def adapt(self, model: nn.Module, hp: th.HyperParameters) -> None:
            _shrink(model, hp)

    return Its


@moving("C", refused="model", s=STEPS)
def slope_read_by_the_model_only() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            model = _leaky()
            _set_slope(model, hp)
            return model

    return Mine


@moving("C", refused="model", s=STEPS, other=STEPS)
def adapt_that_follows_another_one() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            model = _leaky()
            _set_slope(model, hp)
            return model

        def adapt(self, model: nn.Module, hp: th.HyperParameters) -> None:
            model.other = hp.other

    return Mine


@moving("C", refused="data", s=STEPS)
def noise_read_by_the_data() -> type[th.Task]:
    class Mine(Regression):
        def data(self, hp: th.HyperParameters) -> th.ArrayData:
            made = super().data(hp)
            x, y = made.train
            return th.ArrayData(train=(x + hp.s * normal(*x.shape, seed=9), y), valid=made.valid)

    return Mine


@moving("C", refused="model", s=STEPS)
def read_later_by_a_model_that_keeps_them() -> type[th.Task]:
    class Net(nn.Module):
        def __init__(self, hp: th.HyperParameters) -> None:
            super().__init__()
            self.net, self.hp = mlp(3), hp

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) * self.hp.s

    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return Net(hp)

    return Mine


# -- D: state ------------------------------------------------------------------------------


@moving("D", refused="seen")
def a_factor_that_the_task_counts() -> type[th.Task]:
    class Mine(Regression):
        def __init__(self) -> None:
            self.seen = 0

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.seen += 1
            return mse(model, batch) * (1.0 + 0.1 * self.seen)

        def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            return {"value": mse(model, batch)}

    return Mine


class _Running(nn.Module):
    """A module that subtracts a running mean, which it keeps in a buffer."""

    mean: torch.Tensor

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.net = mlp(3)
        self.register_buffer("mean", torch.zeros(6), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.net(x - self.mean)


@moving("D", refused="mean")
def a_buffer_that_is_not_persistent() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return _Running(persistent=False)

    return Mine


@moving("D", loop=PLAIN)
def a_buffer_that_is_replaced() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return _Running(persistent=True)

    return Mine


class _Masked(nn.Module):
    """A module with a constant that no checkpoint needs."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3)
        self.register_buffer("mask", torch.tensor([1.0, 1, 0, 1, 1, 1]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * self.mask)


@moving("D", loop=PLAIN)
def a_constant_that_is_not_persistent() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return _Masked()

    return Mine


@moving("D", refused="average")
def an_average_of_weights_in_a_plain_dictionary() -> type[th.Task]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3)
            self.average: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                for name, p in self.net.named_parameters():
                    old = self.average.get(name, p.detach().clone())
                    self.average[name] = 0.9 * old + 0.1 * p.detach()
                return self.net(x)
            return torch.func.functional_call(self.net, self.average, (x,))

    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return Net()

    return Mine


@moving("D", loop=PLAIN)
def a_history_that_nobody_reads() -> type[th.Task]:
    class Mine(Regression):
        not_state = ("history",)

        def __init__(self) -> None:
            self.history: list[float] = []

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            out = mse(model, batch)
            self.history.append(float(out.detach()))
            return out

    return Mine


@moving("D", refused="best")
def metrics_that_remember_the_best() -> type[th.Task]:
    class Mine(Regression):
        def __init__(self) -> None:
            self.best = math.inf

        def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            self.best = min(self.best, float(mse(model, batch)))
            return {"value": self.best}

    return Mine


class _Warming(torch.optim.SGD):
    """An optimizer that counts steps in its groups and warms up by that count."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["was"], group["lr"] = group["lr"], group["lr"] * min(1.0, group["count"] / 10)
        out = super().step(closure)
        for group in self.param_groups:
            group["lr"] = group.pop("was")
        return out


def _warming(model: nn.Module, at: At) -> torch.optim.Optimizer:
    return _Warming(model.parameters(), lr=at["lr"], momentum=0.9)


@moving("D", loop=Loop(optimizer=_warming, follow=follow_lr))
def an_optimizer_that_counts_steps() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.Optimizer(_Warming, lr="lr", momentum=0.9)

    return Mine
