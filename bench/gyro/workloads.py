"""The workloads of ``bench_gyro``'s accuracy study, with errors in percent.

Their dropout is none, torch's, or one of the gyros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th
from bench.graph.datasets import real, split
from bench.rex import workloads as rex
from thrifty.graph import SAGE, Batch, GraphData, NeighborLoader
from thrifty.nn import gyro_


SUBNETWORKS, CONCURRENT = 256, 16
"""The paper's numbers of subnetworks and of concurrent ones."""
RATES = (0.1, 0.3, 0.5)
METHODS = ("dropout", "gyro", "legacy", "block")
NAMES = ("none 0", *(f"{method} {rate}" for method in METHODS for rate in RATES))
NUMBERS = ((16, 4), (64, 8), (256, 16), (1024, 32), (4096, 64))
"""Subnetworks in all and at a time: from few that are trained often to nearly plain dropout."""
CYCLES = (1, 2, 8, 32)
"""How often each of the paper's subnetworks has its turn."""
Arrays = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is trained, and for how long. None of it was chosen by results."""

    make: Callable[[float], nn.Module]
    """Build the network from a dropout rate."""
    parts: Callable[[], Mapping[str, Any]]
    """Return the data: ``train``, ``valid`` and ``test``, and one ``example``."""
    epochs: int
    batch_size: int
    group_size: int
    lr: float = 1e-3

    def quick(self) -> Setting:
        return Setting(
            make=self.make,
            parts=self.parts,
            epochs=1,
            batch_size=4 * self.batch_size,
            group_size=self.group_size,
            lr=self.lr,
        )


class Network(th.Task):
    """A network whose dropout is named by ``hp.method``.

    It is such as ``"gyro 0.3"``, ``"gyro/1024/32 0.3"`` or, with cycles, ``"gyro/256/16/8 0.3"``.
    """

    eval_batch_size = 2048

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.batch_size = setting.batch_size
        self.optimizer = th.Adam(lr=setting.lr)

    def model(self, hp: th.HyperParameters) -> nn.Module:
        method, rate = hp.method.split()
        # "gyro/1024/32" means other numbers of subnetworks than the paper's, "gyro/256/16/8" that
        # each of them has its turn eight times.
        method, *numbers = method.split("/")
        given = dict(enumerate(map(int, numbers)))
        subnetworks, concurrent = given.get(0, SUBNETWORKS), given.get(1, CONCURRENT)
        cycles = given.get(2, 1)
        parts = self.setting.parts()
        model = self.setting.make(float(rate))
        if method not in ("none", "dropout"):
            num = len(parts["train"][0])
            gyro_(
                model,
                parts["example"],
                subnetworks=subnetworks,
                concurrent=concurrent,
                total_steps=self.setting.epochs * -(-num // self.setting.batch_size),
                order="legacy" if method == "legacy" else "partition",
                cycles=cycles,
                shared=method != "legacy",
                group_size=self.setting.group_size if method == "block" else None,
            )
        return model

    def data(self, hp: th.HyperParameters) -> Any:
        parts = self.setting.parts()
        if isinstance(parts["example"], Batch):
            return GraphData(
                parts["graph"],
                train=parts["train"][0],
                valid=parts["valid"][0],
                fanouts=parts["fanouts"],
            )
        return th.ArrayData(train=parts["train"], valid=parts["valid"])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        scores, y = scored(model, batch)
        return F.cross_entropy(scores, y)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        scores, y = scored(model, batch)
        return {"error": 100.0 * (scores.argmax(1) != y).float().mean()}


def scored(model: nn.Module, batch: Any) -> Arrays:
    """Return scores and labels, a row for each prediction."""
    if isinstance(batch, Batch):
        assert batch.y is not None
        return model(batch), batch.y
    x, y = batch
    return model(x).flatten(0, -2), y.flatten()


def test_error(model: nn.Module, setting: Setting) -> float:
    """Return the test error in percent of a model that returns scores or probabilities."""
    parts = setting.parts()
    batches = parts["test_batches"]() if "test_batches" in parts else [parts["test"]]
    wrong = num = 0
    with torch.no_grad():
        for batch in batches:
            scores, y = scored(model, batch)
            wrong += int((scores.argmax(1) != y).sum())
            num += len(y)
    return 100.0 * wrong / num


# -- networks and data ---------------------------------------------------------------------


def mlp(num_in: int, hidden: int) -> Callable[[float], nn.Module]:
    def make(rate: float) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(num_in, hidden), nn.ReLU(), nn.Dropout(rate)),
            *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(rate)),
            nn.Linear(hidden, 10),
        )

    return make


def lenet(rate: float) -> nn.Module:
    """Return LeNet on images at half their resolution.

    Dropout is in the dense layers, as in the paper.
    """
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 3 * 3, 256), nn.ReLU(), nn.Dropout(rate)),
        *(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(rate), nn.Linear(256, 10)),
    )


class Text(nn.Module):
    """A character Transformer with dropout in the feed-forward layers and on what a block adds."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        plain = rex.CharacterModel(len(rex.characters()[0]))
        self.tokens, self.places, self.norm = plain.tokens, plain.places, plain.norm
        self.head = plain.head
        self.blocks = nn.ModuleList([TextBlock(block, rate) for block in plain.blocks])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TextBlock(rex.Block):
    def __init__(self, plain: rex.Block, rate: float) -> None:
        super().__init__(plain.out.out_features)
        self.load_state_dict(plain.state_dict())
        self.inside, self.after = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixed(x)
        return x + self.after(self.down(self.inside(F.gelu(self.up(self.norm2(x))))))


class Sage(nn.Module):
    def __init__(self, sizes: Sequence[int], rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SAGE(a, b) for a, b in pairwise(sizes)])
        self.drops = nn.ModuleList([nn.Dropout(rate) for _ in sizes[2:]])

    def forward(self, batch: Batch) -> torch.Tensor:
        x = batch.x
        assert x is not None
        for number, (layer, block) in enumerate(zip(self.layers, batch.blocks, strict=True)):
            x = layer(x, block)
            if number < len(self.drops):
                x = self.drops[number](x.relu())
        return x


def _cut(x: torch.Tensor, y: torch.Tensor, *sizes: int) -> Mapping[str, Any]:
    starts = np.cumsum([0, *sizes]).tolist()
    parts = {
        name: (x[a:b], y[a:b])
        for name, (a, b) in zip(("train", "valid", "test"), pairwise(starts), strict=True)
    }
    return {**parts, "example": x[:1]}


@cache
def mnist() -> Mapping[str, Any]:
    return _cut(*rex.images(), 1600, 1000, 4000)


@cache
def digits() -> Mapping[str, Any]:
    return _cut(*rex.DigitsMlp(optimizer="AdamW", sizes=(1, 1, 1)).samples(), 800, 400, 597)


@cache
def text() -> Mapping[str, Any]:
    windows = rex.windows(512 + 128 + 384)
    return _cut(windows[:, :-1], windows[:, 1:], 512, 128, 384)


@cache
def graph(name: str) -> Mapping[str, Any]:
    whole, fanouts = real(name), [10, 10]
    train, valid, test = split(whole.num_nodes, seed=0)
    loader = NeighborLoader(
        whole, [-1, -1], seeds=test, batch_size=1024, shuffle=False, num_threads=0
    )
    few = NeighborLoader(whole, fanouts, seeds=train, batch_size=8, num_threads=0)
    return {
        "graph": whole,
        "fanouts": fanouts,
        "train": (train,),
        "valid": (valid[:1000],),
        "test_batches": lambda: loader.epoch(0),
        "example": next(iter(few.epoch(0))),
    }


def sage(name: str, hidden: int) -> Callable[[float], nn.Module]:
    def make(rate: float) -> nn.Module:
        whole = real(name)
        assert whole.y is not None
        return Sage([whole.num_features, hidden, int(whole.y.max()) + 1], rate)

    return make


SETTINGS: Mapping[str, Setting] = {
    "Transformer, text": Setting(make=Text, parts=text, epochs=25, batch_size=32, group_size=8),
    "SAGE, Amazon Computers": Setting(
        make=sage("amazon_cs", 64),
        parts=lambda: graph("amazon_cs"),
        epochs=12,
        batch_size=512,
        group_size=8,
        lr=3e-3,
    ),
    "LeNet, MNIST": Setting(make=lenet, parts=mnist, epochs=50, batch_size=128, group_size=32),
    "MLP, MNIST": Setting(
        make=mlp(196, 512), parts=mnist, epochs=50, batch_size=128, group_size=64
    ),
    "SAGE, Cora": Setting(
        make=sage("cora", 64),
        parts=lambda: graph("cora"),
        epochs=30,
        batch_size=256,
        group_size=8,
        lr=3e-3,
    ),
    "MLP, digits": Setting(
        make=mlp(64, 256), parts=digits, epochs=60, batch_size=64, group_size=32
    ),
}
"""The settings; the longest come first, as two run at a time."""
