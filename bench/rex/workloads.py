"""The workloads of ``bench_rex``: small networks on images and text.

Each runs with SGD with momentum and with AdamW. Validation and test data are evaluated together and
told apart by a mark: validation data choose learning rates, and test data are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import thrifty as th
from bench.common import mnist


TEXT = mnist.FOLDER.parent / "text" / "tinyshakespeare.txt"
CONTEXT = 64
OPTIMIZERS: Mapping[str, Callable[[float | str], th.Optimizer]] = {
    "SGD": lambda momentum: th.SGD(lr="lr", momentum=momentum),
    "AdamW": lambda momentum: th.AdamW(lr="lr", betas=(momentum, 0.999)),
}
Sizes = tuple[int, int, int]
Tensors = tuple[torch.Tensor, ...]


class Workload(th.Task):
    """Base class of the tasks.

    ``sizes``: how many samples to train on, to choose by, and to report on.
    """

    def __init__(self, *, optimizer: str, sizes: Sizes) -> None:
        self.optimizer_name = optimizer
        self.sizes = sizes

    def optimizer(self, hp: th.HyperParameters) -> th.Optimizer:
        # Only OneCycle moves its momentum.
        momentum = 0.9 if hp.get("momentum") is None else "momentum"
        return OPTIMIZERS[self.optimizer_name](momentum)

    def samples(self) -> Tensors:
        raise NotImplementedError

    def data(self, hp: th.HyperParameters) -> th.ArrayData | th.DatasetPair:
        arrays, (num_train, num_valid, num_test) = self.samples(), self.sizes
        stop = num_train + num_valid + num_test
        if stop > len(arrays[0]):
            raise ValueError(f"{stop} samples wanted, {len(arrays[0])} there")
        is_test = (torch.arange(stop) >= num_train + num_valid).float()
        arrays = (*arrays, is_test)
        return th.ArrayData(
            train=tuple(a[:num_train] for a in arrays),
            valid=tuple(a[num_train:stop] for a in arrays),
        )

    def split(self, values: torch.Tensor, is_test: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the means over the validation samples and over the test samples.

        Each is written as a mean over all samples.
        """
        _, num_valid, num_test = self.sizes
        num = num_valid + num_test
        return {
            "valid": (values * (1.0 - is_test)).mean() * (num / num_valid),
            "test": (values * is_test).mean() * (num / num_test),
        }


class Classifier(Workload):
    """Classification, measured by errors in percent."""

    batch_size = 32

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        x, y, is_test = batch
        scores = model(x)
        losses = F.cross_entropy(scores, y, reduction="none")
        errors = self.split(100.0 * (scores.argmax(1) != y).float(), is_test)
        return {**errors, "valid_loss": self.split(losses, is_test)["valid"]}


class MnistMlp(Classifier):
    """An MLP on images at half their resolution.

    It is so small that a step costs no more than the calls.
    """

    def samples(self) -> Tensors:
        return images()

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))


class MnistCnn(Classifier):
    def samples(self) -> Tensors:
        return images()

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 3 * 3, 10)),
        )


class DigitsMlp(Classifier):
    def samples(self) -> Tensors:
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        return torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Transformer(Workload):
    """Prediction of the next character; loss in nats.

    An epoch is a few pieces of the training text, so that a hundredth of the longest budget is an
    epoch.
    """

    batch_size = 8
    epoch_size = 24

    def data(self, hp: th.HyperParameters) -> th.DatasetPair:
        arrays = super().data(hp)
        assert isinstance(arrays, th.ArrayData)
        return th.DatasetPair(
            train=Drawn(arrays.train[0], self.epoch_size), valid=TensorDataset(*arrays.valid)
        )

    def samples(self) -> Tensors:
        return (windows(sum(self.sizes)),)

    def model(self, hp: th.HyperParameters) -> nn.Module:
        return CharacterModel(len(characters()[0]))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch[0][:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), batch[0][:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        tokens, is_test = batch
        scores = model(tokens[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(scores, tokens[:, 1:], reduction="none").mean(1)
        split = self.split(losses, is_test)
        return {**split, "valid_loss": split["valid"]}


class Drawn(Dataset[tuple[torch.Tensor]]):
    """Rows drawn at random from all, a fixed number an epoch; thrifty seeds each batch."""

    def __init__(self, rows: torch.Tensor, num: int) -> None:
        self.rows, self.num = rows, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (self.rows[int(torch.randint(len(self.rows), ()))],)


class CharacterModel(nn.Module):
    def __init__(self, vocabulary: int, *, dim: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, dim))
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    heads = 4

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        num, length, dim = x.shape
        q, k, v = (
            part.reshape(num, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(num, length, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixed(x)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@cache
def images() -> Tensors:
    """Return MNIST's test files, as 14 x 14 means of 2 x 2 pixels."""
    (x, y), (rest, labels) = mnist.load(mnist.FOLDER, 8000)
    return F.avg_pool2d(torch.cat([x, rest]), 2), torch.cat([y, labels])


@cache
def characters() -> tuple[list[str], torch.Tensor]:
    """Return the alphabet of the text, and the text in it."""
    text = TEXT.read_text()
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    return alphabet, torch.tensor([numbers[character] for character in text])


def windows(num: int) -> torch.Tensor:
    """Return pieces of ``CONTEXT + 1`` characters from all over the text, in random order.

    They do not overlap.
    """
    text = characters()[1]
    starts = np.linspace(0, len(text) - CONTEXT - 1, num).astype(int)
    order = np.random.default_rng(0).permutation(starts)
    return torch.stack([text[start : start + CONTEXT + 1] for start in order.tolist()])


def missing_data() -> Sequence[Path]:
    """Return the files that are missing; nothing is downloaded."""
    files = [*(mnist.FOLDER / name for name in mnist.FILES), TEXT]
    return [path for path in files if not path.is_file()]
