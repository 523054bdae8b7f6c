"""Tune a small network on scikit-learn's digits.

Run ``thrifty plan examples/digits.py``, then ``thrifty run examples/digits.py --threads 1``, or
``python examples/digits.py``.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import thrifty as th


class Digits(th.Task):
    """Two layers; a name in the optimizer is a hyper-parameter, followed over time."""

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = 64

    def data(self, hp):
        """Arrays in memory: (train, valid) tuples."""
        x, y = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
        return th.ArrayData(train=(x[:1437], y[:1437]), valid=(x[1437:], y[1437:]))

    def model(self, hp):
        """A plain module."""
        return torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def loss(self, model, batch):
        """The mean over a batch."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        """By name; the study optimises one of them."""
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


study = th.Study(
    Digits(),
    th.Space(
        lr=th.Choice([
            th.Step(th.Choice([0.1, 0.05]), [th.Int(10, 40, step=10)]),
            th.Step(0.1, [10], gamma=0.3),
            th.REX(0.08),
            th.Cosine(0.1),
        ])
    ),
    algorithm=th.SuccessiveHalving(max_epochs=54, num_trials=27, min_epochs=2),
    metric="accuracy",
    storage="sqlite:///thrifty.db",
    name="digits-example",
)

if __name__ == "__main__":
    print(study.plan())
    # So small a network trains slower on several threads, above all on a busy machine.
    study.run(executor=th.Local(threads=1))
    print(study.best_trial.config, study.savings)
