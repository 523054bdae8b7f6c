"""Small tasks for testing back-ends, one for each kind of model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from thrifty.pack import SGD, ArrayData, Task


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Toy(Task):
    """Regression on 20 rows of 6 numbers. The last batch is half as long as the others."""

    optimizer = SGD(lr="lr", momentum=0.9)
    batch_size = 8
    dtype = torch.float32

    def inputs(self, num, seed):
        return normal(num, 6, seed=seed)

    def targets(self, x):
        return x.sin().sum(1, keepdim=True)

    def data(self, hp):
        x, vx = self.inputs(20, 1), self.inputs(10, 2)
        sets = [(x, self.targets(x)), (vx, self.targets(vx))]
        train, valid = (
            tuple(t.to(self.dtype) if t.is_floating_point() else t for t in each) for each in sets
        )
        return ArrayData(train=train, valid=valid)

    def network(self, hp):
        return nn.Sequential(
            nn.Linear(6, hp.get("width", 8)), nn.Tanh(), nn.Linear(hp.get("width", 8), 1)
        )

    def model(self, hp):
        return self.network(hp).to(self.dtype)

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


class Dropping(Toy):
    def network(self, hp):
        return nn.Sequential(
            nn.Linear(6, 8),
            nn.ReLU(),
            nn.Dropout(hp.get("dropout", 0.3)),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Dropout(0.1),
            nn.Linear(8, 1),
        )


class Images(Toy):
    def inputs(self, num, seed):
        return normal(num, 1, 6, 6, seed=seed)

    def targets(self, x):
        return (x.mean((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 0)

    def network(self, hp):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout2d(0.2),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model, batch):
        x, y = batch
        out = model(x)
        return {
            "loss": F.cross_entropy(out, y),
            "accuracy": (out.argmax(1) == y).to(out.dtype).mean(),
        }


class Tokens(Images):
    def inputs(self, num, seed):
        return torch.randint(0, 11, (num, 5), generator=torch.Generator().manual_seed(seed))

    def targets(self, x):
        return x.sum(1) % 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embedding(x)
        return self.out(self.dropout(x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Attending(Tokens):
    def network(self, hp):
        return Attention()


class Copying(nn.Module):
    """A model whose first and last layers share their weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x).mean(1).tanh())


class Tied(Tokens):
    def network(self, hp):
        return Copying()

    def targets(self, x):
        return x[:, 0]


class Frozen(Toy):
    def network(self, hp):
        model = super().network(hp)
        model[0].weight.requires_grad_(False)
        return model


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(3, 3)
        self.used = nn.Linear(6, 1)

    def forward(self, x):
        return self.used(x)


class Unused(Toy):
    def network(self, hp):
        return Spare()


class Scaling(nn.Module):
    """A model with one constant buffer and one that each training step updates."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.inner(x * self.scale - self.mean)


class Buffered(Toy):
    def network(self, hp):
        return Scaling()


class Normed(Toy):
    def network(self, hp):
        width = hp.get("width", 8)
        return nn.Sequential(
            nn.Linear(6, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 1)
        )


class BatchNormed(Toy):
    def network(self, hp):
        width = hp.get("width", 8)
        return nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1)
        )


TOYS = [Toy, Dropping, Images, Attending, Tied, Frozen, Unused, Buffered, Normed, BatchNormed]
