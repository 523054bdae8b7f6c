"""Tasks with hidden state or late effects, and unusual models.

Their state lies where few look, or acts later than one step, and few libraries expect the models.
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import math
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import thrifty as th
from bench.trust.case import mse
from bench.trust.moving import PLAIN, At, Loop, Regression, follow_lr, moving


UNSEEN = "Not in the checkpoint"


# -- D: counters in odd places -------------------------------------------------------------


def _weighted_by(count: Callable[[], float]) -> type[th.Task]:
    class Mine(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            factor = 1.0 + 0.3 * math.sin(count()) if model.training else 1.0
            return factor * mse(model, batch)

    return Mine


_COUNTED: collections.Counter[str] = collections.Counter()


@moving("D", refused="_COUNTED")
def counts_in_a_counter() -> type[th.Task]:
    def count() -> float:
        _COUNTED["n"] += 1
        return _COUNTED["n"]

    return _weighted_by(count)


_LAST: collections.deque[float] = collections.deque([0.0], maxlen=3)


@moving("D", refused="_LAST")
def counts_in_a_deque() -> type[th.Task]:
    def count() -> float:
        _LAST.append(_LAST[-1] + 1)
        return _LAST[-1]

    return _weighted_by(count)


@functools.lru_cache
def _kept() -> list[float]:
    return [0.0]


@moving("D", refused="_kept")
def counts_in_what_a_cached_function_keeps() -> type[th.Task]:
    def count() -> float:
        _kept()[0] += 1
        return _kept()[0]

    return _weighted_by(count)


@functools.cache
def _rows_read() -> list[float]:
    return [0.0]


class _Rows(torch.utils.data.TensorDataset):
    """Rows with a bias that grows with each row that is read."""

    def __getitem__(self, index: Any) -> Any:
        _rows_read()[0] += 1
        x, y = super().__getitem__(index)
        return x + 0.01 * math.sin(_rows_read()[0]), y


@moving("D", refused="are not the same each time")
def data_that_count_in_what_a_cached_function_keeps() -> type[th.Task]:
    class Mine(Regression):
        def data(self, hp: th.HyperParameters) -> Any:
            given = super().data(hp)
            return _Rows(*given.train), _Rows(*given.valid)

    return Mine


@functools.cache
def _weights(size: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, size)


@moving("A", loop=PLAIN)
def weights_under_functools_cache() -> type[th.Task]:
    class Mine(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            x, y = batch
            return (_weights(len(y)) * (model(x) - y).square().flatten()).mean()

    return Mine


_NOW: contextvars.ContextVar[int] = contextvars.ContextVar("_NOW", default=0)


@moving("D", refused="_NOW")
def counts_in_a_context_variable() -> type[th.Task]:
    def count() -> float:
        _NOW.set(_NOW.get() + 1)
        return _NOW.get()

    return _weighted_by(count)


_OF_THREAD = threading.local()


@moving("D", refused="_OF_THREAD")
def counts_in_a_thread_local() -> type[th.Task]:
    def count() -> float:
        _OF_THREAD.n = getattr(_OF_THREAD, "n", 0) + 1
        number: float = _OF_THREAD.n
        return number

    return _weighted_by(count)


_CELLS = array.array("d", [0.0])


@moving("D", refused="_CELLS")
def counts_in_an_array() -> type[th.Task]:
    def count() -> float:
        _CELLS[0] += 1
        return _CELLS[0]

    return _weighted_by(count)


def _counting() -> float:
    _counting.n = getattr(_counting, "n", 0) + 1  # type: ignore[attr-defined]
    number: float = _counting.n  # type: ignore[attr-defined]
    return number


@moving("D", refused="_counting")
def counts_in_an_attribute_of_a_function() -> type[th.Task]:
    return _weighted_by(_counting)


def _remembering(
    memo: dict[str, float] = collections.OrderedDict(n=0),  # noqa: B006 (the point)
) -> float:
    memo["n"] += 1
    return memo["n"]


@moving("D", refused="_remembering")
def counts_in_a_default() -> type[th.Task]:
    return _weighted_by(_remembering)


def _make_counter() -> Callable[[], float]:
    n = 0

    def count() -> float:
        nonlocal n
        n += 1
        return n

    return count


_IN_A_CLOSURE = _make_counter()


@moving("D", refused="n")
def counts_in_a_closure() -> type[th.Task]:
    return _weighted_by(_IN_A_CLOSURE)


@moving("D", refused="steps")
def counts_on_its_class() -> type[th.Task]:
    class Mine(Regression):
        steps = 0

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            type(self).steps += 1
            return (1.0 + 0.3 * math.sin(type(self).steps)) * mse(model, batch)

    return Mine


_NUMPY, _PYTHON = np.random.RandomState(0), random.Random(0)


@moving("D", refused="_NUMPY")
def noise_of_its_own_numpy_stream() -> type[th.Task]:
    class Mine(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            x, y = batch
            if model.training:
                x = x + 0.3 * torch.from_numpy(_NUMPY.randn(*x.shape)).float()
            return mse(model, (x, y))

    return Mine


@moving("D", refused="_PYTHON")
def weights_of_its_own_python_stream() -> type[th.Task]:
    class Mine(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            factor = 0.5 + _PYTHON.random() if model.training else 1.0
            return factor * mse(model, batch)

    return Mine


# -- D: what acts only after some steps ----------------------------------------------------


@moving("D", refused="num")
def penalty_at_each_sixth_step() -> type[th.Task]:
    class Mine(Regression):
        def __init__(self) -> None:
            self.num = 0

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.num += 1
            penalty = next(model.parameters()).square().sum()
            return mse(model, batch) + (0.1 * penalty if not self.num % 6 else 0.0)

    return Mine


@moving("D", refused="kept")
def replays_an_older_batch() -> type[th.Task]:
    class Mine(Regression):
        def __init__(self) -> None:
            self.kept: list[Any] = []

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.kept.append(batch)
            loss = mse(model, batch)
            return loss + mse(model, self.kept[0]) if len(self.kept) % 5 == 0 else loss

    return Mine


class _Lookahead(torch.optim.SGD):
    """An optimizer that moves back towards slow weights every five steps.

    No state dict has these weights.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.num = 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        self.num += 1
        if self.num % 5 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for p, slow in zip(fast, self.slow, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)
        return out


@moving("D", refused=UNSEEN)
def lookahead_in_attributes_of_an_optimizer() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.Optimizer(_Lookahead, lr="lr")

    return Mine


class _Clipping(torch.optim.SGD):
    """An optimizer that clips to the median norm of all gradients so far."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.norms: list[float] = []

    def step(self, closure: Any = None) -> Any:
        own = [p for group in self.param_groups for p in group["params"]]
        self.norms.append(float(nn.utils.clip_grad_norm_(own, float("inf"))))
        nn.utils.clip_grad_norm_(own, float(np.percentile(self.norms, 50)))
        return super().step(closure)


@moving("D", refused="norms")
def clipping_by_a_history_of_norms() -> type[th.Task]:
    class Mine(Regression):
        optimizer = th.Optimizer(_Clipping, lr="lr")

    return Mine


_ANCHORS: weakref.WeakKeyDictionary[nn.Module, list[torch.Tensor]] = weakref.WeakKeyDictionary()


@moving("D", refused=UNSEEN)
def anchors_by_model_in_a_global() -> type[th.Task]:
    class Mine(Regression):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if model not in _ANCHORS:
                _ANCHORS[model] = [p.detach().clone() for p in model.parameters()]
            pairs = zip(model.parameters(), _ANCHORS[model], strict=True)
            return mse(model, batch) + 0.1 * sum((p - a).square().sum() for p, a in pairs)

    return Mine


@functools.lru_cache
def _backbone() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh()).requires_grad_(False)


@moving("D", refused=UNSEEN)
def one_frozen_backbone_with_statistics_for_all() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return nn.Sequential(_backbone(), nn.Linear(8, 1))

    return Mine


# -- A: models and losses that are right, and must stay so ---------------------------------


def sgd_of_what_learns(model: nn.Module, at: At) -> torch.optim.Optimizer:
    learns = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(learns, lr=at["lr"], momentum=0.9)


@moving("A", loop=PLAIN)
def dropout_that_stays_when_evaluated() -> type[th.Task]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(nn.functional.dropout(self.a(x).tanh(), 0.3, training=True))

    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return Net()

    return Mine


@moving("A", loop=PLAIN)
def statistics_that_never_train() -> type[th.Task]:
    class Net(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[1].eval()
            return self

    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return Net(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    return Mine


@moving("A", loop=PLAIN)
def an_orthogonal_layer() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            first = nn.utils.parametrizations.orthogonal(nn.Linear(6, 8))
            return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 1))

    return Mine


@moving("A", loop=PLAIN)
def a_filter_in_frequencies() -> type[th.Task]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.Parameter(0.3 * torch.randn(4, 2))
            self.last = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.gains)
            return self.last(torch.fft.irfft(spectrum, n=6, dim=1))

    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return Net()

    return Mine


@moving("A", loop=PLAIN)
def a_sparse_matrix_as_buffer() -> type[th.Task]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1, 4), nn.Linear(4, 1)
            self.register_buffer("links", (torch.ones(6, 6).tril() / 6).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed = torch.sparse.mm(self.links, x.t()).t().unsqueeze(-1)
            return self.b(self.a(mixed).tanh()).mean(1)

    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return Net()

    return Mine


@moving("A", loop=PLAIN)
def slopes_drawn_at_each_step() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 1))

    return Mine


@moving("A", loop=PLAIN, w=th.Choice([8, 6]))
def a_penalty_by_width() -> type[th.Task]:
    class Mine(Regression):
        def model(self, hp: th.HyperParameters) -> nn.Module:
            return nn.Sequential(nn.Linear(6, hp.w), nn.Tanh(), nn.Linear(hp.w, 1))

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            weight = model[0].weight  # type: ignore[index]
            gram = weight @ weight.T
            return mse(model, batch) + 0.1 * (gram - torch.eye(len(weight))).square().sum()

    return Mine


@moving(
    "A",
    loop=Loop(optimizer=sgd_of_what_learns, follow=follow_lr, batch_size=lambda at: at["rows"]),
    rows=th.Choice([8, 10]),
)
def a_loss_of_pairs_of_rows() -> type[th.Task]:
    class Mine(Regression):
        batch_size = "rows"

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            hidden = model[0](batch[0])  # type: ignore[index]
            return mse(model, batch) + 0.1 * torch.logsumexp(hidden @ hidden.T, 1).mean()

    return Mine
