"""A study whose workers are those of the Ray cluster that KubeRay has started: see rayjob.yaml."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import thrifty as th


class Digits(th.Task):
    """Classify handwritten digits."""

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = 64

    def data(self, hp):
        """Return the digits."""
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
        return th.ArrayData(train=(x[:1437], y[:1437]), valid=(x[1437:], y[1437:]))

    def model(self, hp):
        """Return a network of one hidden layer."""
        return nn.Sequential(nn.Linear(64, hp.width), nn.ReLU(), nn.Linear(hp.width, 10))

    def loss(self, model, batch):
        """Return the loss of a batch."""
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        """Return the accuracy on a batch."""
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def study(num_trials: int = 81, max_epochs: int = 27) -> th.Study:
    """Return the study; database and states are where the cluster's secret says."""
    return th.Study(
        Digits(),
        th.Space(
            lr=th.Choice([th.Step(0.1, [9]), th.Step(0.1, [18]), 0.1]),
            width=th.Int(16, 256, log=True),
        ),
        algorithm=th.ASHA(max_epochs=max_epochs, num_trials=num_trials),
        metric="accuracy",
        mode="max",
        name="digits",
        storage=th.Storage(
            url=os.environ["THRIFTY_DB"], checkpoints=os.environ["THRIFTY_CHECKPOINTS"]
        ),
    )


if __name__ == "__main__":
    study().run(executor=th.Ray(address="auto", num_cpus=8, num_gpus=1))
