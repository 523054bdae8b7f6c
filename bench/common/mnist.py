"""The workload of ``bench_pack_hyperband``: small networks on MNIST.

The search space is that of the pack paper.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import thrifty as th
from bench.common.harness import data_folder


FOLDER = data_folder() / "images"
FILES = ("mnist-t10k-images-idx3-ubyte.gz", "mnist-t10k-labels-idx1-ubyte.gz")
ACTIVATIONS = {
    "sigmoid": torch.nn.Sigmoid,
    "leaky_relu": torch.nn.LeakyReLU,
    "tanh": torch.nn.Tanh,
    "relu": torch.nn.ReLU,
}
OPTIMIZERS = {
    "Adam": th.Adam(lr="lr"),
    "SGD": th.SGD(lr="lr"),
    "Adagrad": th.Adagrad(lr="lr"),
    "momentum SGD": th.SGD(lr="lr", momentum=0.9),
}
VALUES: Mapping[str, list[Any]] = {
    "architecture": ["MLP", "CNN"],
    "activation": list(ACTIVATIONS),
    "optimizer": list(OPTIMIZERS),
    "batch_size": list(range(20, 71, 5)),
    "lr": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
}
"""The space of the Hyperband experiment in Liu et al. (DEEM 2021), here with two architectures."""
Tensors = tuple[torch.Tensor, torch.Tensor]


class Mnist(th.Task):
    batch_size = "batch_size"

    def __init__(self, folder: Path, *, num_images: int) -> None:
        self.folder = folder
        self.num_images = num_images

    def optimizer(self, hp: th.HyperParameters) -> Any:
        return OPTIMIZERS[hp.optimizer]

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        train, valid = load(self.folder, self.num_images)
        return th.ArrayData(train=train, valid=valid)

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        nn, act = torch.nn, ACTIVATIONS[hp.activation]
        if hp.architecture == "MLP":
            return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), act(), nn.Linear(128, 10))
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), act(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, padding=1), act(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(16 * 7 * 7, 10)),
        )

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


@cache
def load(folder: Path, num_images: int) -> tuple[Tensors, Tensors]:
    """Return the first images to train on, and a quarter as many after them to validate.

    Raises:
        FileNotFoundError: The files are missing; nothing is downloaded.
        ValueError: There are too few images.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{' and '.join(missing)} not found in {folder}; put MNIST's test files there or "
            f"name their folder "
            "with --data (nothing is downloaded)"
        )
    images, labels = (_read_idx(folder / name) for name in FILES)
    stop = num_images + num_images // 4
    if num_images < 4 or stop > len(images):
        raise ValueError(
            f"{num_images} images to train on and a quarter of that to validate: there are "
            f"{len(images)} in all"
        )
    x = torch.from_numpy(images[:stop].astype(np.float32) / 255)[:, None]
    y = torch.from_numpy(labels[:stop].astype(np.int64))
    return (x[:num_images], y[:num_images]), (x[num_images:], y[num_images:])


def _read_idx(path: Path) -> np.ndarray:
    """Return an array of bytes.

    The file has two zeros, its type, its number of dimensions, their lengths, and the data.
    """
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, dtype=">i4", count=content[3], offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * content[3]).reshape(shape)
