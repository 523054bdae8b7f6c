"""The workloads of the packing benches: small tasks with generated data, 20 batches an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th


NUM_BATCHES = 20
NUM_VALID = 256
NUM_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task, the values that its trials start from, and the pack sizes worth measuring."""

    name: str
    make: Callable[[], th.Task]
    values: Mapping[str, Any]
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    seed: int
    values: Mapping[str, Any]


def trials(workload: Workload, k: int) -> list[Trial]:
    """Return K trials that differ in their seeds and learning rates.

    The rates go from ``lr`` down to half of it.
    """
    lr = workload.values["lr"]
    return [Trial(seed=i, values={**workload.values, "lr": lr * 2 ** (-i / k)}) for i in range(k)]


class Classification(th.Task):
    """Ten clusters in a space of ``shape``, far enough apart to be learned."""

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size: int
    shape: tuple[int, ...] = (64,)
    distance = 5.0  # from a centre to the origin; the noise has a standard deviation of 1

    def samples(self, num: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return inputs and targets."""
        centres = torch.randn(NUM_CLASSES, *self.shape, generator=generator)
        y = torch.randint(NUM_CLASSES, (num,), generator=generator)
        noise = torch.randn(num, *self.shape, generator=generator)
        return centres[y] * (self.distance / math.sqrt(math.prod(self.shape))) + noise, y

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        num_train = NUM_BATCHES * self.batch_size
        x, y = self.samples(num_train + NUM_VALID, torch.Generator().manual_seed(0))
        return th.ArrayData(
            train=(x[:num_train], y[:num_train]), valid=(x[num_train:], y[num_train:])
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).float().mean()}


class Mlp(Classification):
    batch_size = 32

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.shape[0], hp.width),
            nn.ReLU(),
            nn.Linear(hp.width, hp.width),
            nn.ReLU(),
            nn.Linear(hp.width, NUM_CLASSES),
        )


class MlpAdamW(Mlp):
    optimizer = th.AdamW(lr="lr")


class MlpWide(Mlp):
    shape = (784,)
    batch_size = 128


class MlpNarrow(Mlp):
    batch_size = 16


class Mlp3(Mlp):
    """The MLP of Pack (Liu et al., PVLDB 2020), at its original size."""

    shape = (784,)


class LeNet(Classification):
    shape = (1, 28, 28)
    distance = 15.0
    batch_size = 64

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(400, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, NUM_CLASSES),
        )


class ResNet(Classification):
    """Residual networks for CIFAR (He et al., 2016), with projections where shapes change."""

    shape = (3, 32, 32)
    distance = 15.0
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    bottleneck = False

    def model(self, hp: th.HyperParameters) -> nn.Module:
        width = self.widths[0]
        layers: list[nn.Module] = [_conv(3, width, 3), nn.ReLU()]
        for stage, (inner, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            outputs = 4 * inner if self.bottleneck else inner
            for block in range(depth):
                stride = 2 if stage and not block else 1
                layers.append(_Residual(width, inner, outputs, stride=stride))
                width = outputs
        pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(*layers, *pool, nn.Linear(width, NUM_CLASSES))


class ResNet20(ResNet):
    batch_size = 32
    widths, depths = (16, 32, 64), (3, 3, 3)


class ResNet20Eighth(ResNet20):
    widths = (2, 4, 8)


class ResNet18(ResNet):
    batch_size = 128
    widths, depths = (64, 128, 256, 512), (2, 2, 2, 2)


class ResNet50(ResNet):
    batch_size = 128
    widths, depths = (64, 128, 256, 512), (3, 4, 6, 3)
    bottleneck = True


class _Residual(nn.Module):
    def __init__(self, inputs: int, inner: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        if inner == outputs:
            layers = [_conv(inputs, inner, 3, stride), nn.ReLU(), _conv(inner, outputs, 3)]
        else:
            reduce = (_conv(inputs, inner, 1), nn.ReLU())
            layers = [*reduce, _conv(inner, inner, 3, stride), nn.ReLU()]
            layers.append(_conv(inner, outputs, 1))
        same = stride == 1 and inputs == outputs
        self.body = nn.Sequential(*layers)
        self.shortcut = nn.Identity() if same else _conv(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Transformer(Classification):
    """Sequences of tokens; each class prefers tokens of its own."""

    batch_size = 16
    length, vocabulary, dim, heads, depth = 32, 64, 128, 4, 2

    def samples(self, num: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        y = torch.randint(NUM_CLASSES, (num,), generator=generator)
        shape = (num, self.length)
        own = 6 * y[:, None] + torch.randint(6, shape, generator=generator)
        other = torch.randint(self.vocabulary, shape, generator=generator)
        return torch.where(torch.rand(shape, generator=generator) < 0.3, own, other), y

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return _Classifier(self, dropout=hp.dropout)


class _Classifier(nn.Module):
    def __init__(self, task: Transformer, *, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.vocabulary, task.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(task.length, task.dim))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    task.dim, task.heads, 4 * task.dim, dropout, batch_first=True
                )
                for _ in range(task.depth)
            )
        )
        self.head = nn.Linear(task.dim, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(x) + self.positions).mean(1))


class Gpt(Classification):
    """Prediction of the next token of a noisy arithmetic sequence."""

    batch_size = 32
    length, vocabulary, dim, heads, depth = 64, 256, 128, 4, 4

    def samples(self, num: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        begin = torch.randint(self.vocabulary, (num, 1), generator=generator)
        stride = torch.randint(1, 8, (num, 1), generator=generator)
        noise = torch.randint(2, (num, self.length + 1), generator=generator)
        tokens = (begin + stride * torch.arange(self.length + 1) + noise) % self.vocabulary
        return tokens[:, :-1], tokens[:, 1:]

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return _Decoder(self)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class _Decoder(nn.Module):
    def __init__(self, task: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.vocabulary, task.dim)
        self.positions = nn.Parameter(0.02 * torch.randn(task.length, task.dim))
        blocks = (_Block(task.dim, task.heads) for _ in range(task.depth))
        self.blocks = nn.Sequential(*blocks, nn.LayerNorm(task.dim))
        self.head = nn.Linear(task.dim, task.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(x) + self.positions))


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, position, dim)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Sage(Classification):
    """Nodes of one random graph, which is part of the model; a batch is (node, label)."""

    batch_size = 256
    num_nodes, num_edges, num_held_out = 2_000, 20_000, 400

    def graph(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return features (nodes, 64), edges (2, edges) from source to target, labels (nodes,)."""
        generator = torch.Generator().manual_seed(1)
        features, labels = self.samples(self.num_nodes, generator)
        edges = torch.randint(self.num_nodes, (2, self.num_edges), generator=generator)
        return features, edges, labels

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        _, _, labels = self.graph()
        first_held_out = self.num_nodes - self.num_held_out
        generator = torch.Generator().manual_seed(0)
        size = (NUM_BATCHES * self.batch_size,)
        train = torch.randint(first_held_out, size, generator=generator)
        valid = torch.arange(first_held_out, self.num_nodes)
        return th.ArrayData(train=(train, labels[train]), valid=(valid, labels[valid]))

    def model(self, hp: th.HyperParameters) -> nn.Module:
        features, edges, _ = self.graph()
        return _GraphSage(features, edges, hidden=64)


class _GraphSage(nn.Module):
    features: torch.Tensor
    edge_index: torch.Tensor

    def __init__(self, features: torch.Tensor, edges: torch.Tensor, *, hidden: int) -> None:
        super().__init__()
        self.register_buffer("features", features, persistent=False)
        self.register_buffer("edge_index", edges)
        self.first = _SageLayer(features.shape[1], hidden)
        self.second = _SageLayer(hidden, NUM_CLASSES)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first(self.features, self.edge_index))
        return self.second(hidden, self.edge_index)[nodes]


class _SageLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        total = torch.zeros_like(x).index_add(0, target, x[source])
        ones = torch.ones(len(target), 1, device=x.device)
        degree = torch.zeros(len(x), 1, device=x.device).index_add(0, target, ones)
        return self.own(x) + self.neighbours(total / degree.clamp(min=1))


def _workload(name: str, task: type[Classification], **values: Any) -> Workload:
    return Workload(name=name, make=task, values=values, batch_size=task.batch_size)


ZOO: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _workload("mlp", Mlp, lr=0.05, width=128),
        _workload("mlp_adamw", MlpAdamW, lr=1e-3, width=128),
        _workload("mlp_wide", MlpWide, lr=0.05, width=512),
        _workload("mlp_narrow16", MlpNarrow, lr=0.05, width=16),
        _workload("mlp_narrow32", MlpNarrow, lr=0.05, width=32),
        _workload("mlp_narrow64", MlpNarrow, lr=0.05, width=64),
        _workload("mlp3", Mlp3, lr=0.05, width=1024),
        _workload("lenet", LeNet, lr=0.05),
        _workload("resnet20", ResNet20, lr=0.05),
        _workload("resnet20_eighth", ResNet20Eighth, lr=0.05),
        _workload("resnet18", ResNet18, lr=0.05),
        _workload("resnet50", ResNet50, lr=0.05),
        _workload("transformer", Transformer, lr=0.02, dropout=0.1),
        _workload("gpt", Gpt, lr=0.05),
        _workload("sage", Sage, lr=0.05),
    )
}
