"""The slow reference for all training: one configuration in one plain PyTorch loop.

It uses no thrifty machinery. Only the names of the random streams are thrifty's, because they are
its contract.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from thrifty.core import derive_seed, step_seed
from thrifty.pack import HyperParameters
from thrifty.space import Schedule


def train(task, config, *, epochs: int, run_epochs: int, seed: int) -> list[dict[str, float]]:
    """Return metrics after each epoch of one configuration, trained alone from the beginning."""

    def at(epoch, step, num_steps):
        out = {}
        for name, value in config.items():
            if isinstance(value, Schedule):
                values = value.values(
                    epoch, epoch + 1, epochs=run_epochs, steps_per_epoch=num_steps
                )
                value = values.tolist()[step]
            out[name] = value
        return out

    start = HyperParameters(at(0, 0, 1))
    data = task.data(start)
    everything(derive_seed(seed, "model"))
    model = task.model(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=at(0, 0, 1)["lr"], momentum=0.9)
    (x, y), (vx, vy) = data.train, data.valid
    out = []
    for epoch in range(epochs):
        task.adapt(model, HyperParameters(at(epoch, 0, 1)))
        generator = torch.Generator().manual_seed(derive_seed(seed, "data", epoch))
        order = torch.randperm(len(x), generator=generator)
        epoch_seed = derive_seed(seed, "epoch", epoch)
        everything(epoch_seed)
        batches = order.split(task.batch_size)
        model.train()
        losses = []
        for step, indices in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = at(epoch, step, len(batches))["lr"]
            torch.default_generator.manual_seed(step_seed(epoch_seed, step))
            optimizer.zero_grad()
            loss = task.loss(model, (x[indices], y[indices]))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model.eval()
        everything(derive_seed(seed, "evaluate", epoch))
        with torch.no_grad():
            metrics = {name: float(v) for name, v in task.metrics(model, (vx, vy)).items()}
        out.append({"train_loss": float(torch.stack(losses).mean()), **metrics})
    return out


def everything(seed: int) -> None:
    """Seed all generators; ``torch.manual_seed`` would also record the stack for three devices."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
