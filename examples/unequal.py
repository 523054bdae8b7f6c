"""One model on workers of unequal speed, with the result of one process.

python examples/unequal.py                              # alone
torchrun --nproc-per-node=2 examples/unequal.py         # two workers, split by their speed
"""

from __future__ import annotations

import logging

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from thrifty.hetero import HeteroTrainer


EPOCHS, BATCH = 16, 240
STEPS = EPOCHS * 1440 // BATCH


def main() -> None:
    """Trains a small network on digits."""
    logging.basicConfig(format="%(message)s")
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, valid = TensorDataset(x[:1440], y[:1440]), (x[1440:], y[1440:])
    layers = [nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)

    def loss(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    trainer = HeteroTrainer(model, optimizer, train, loss=loss, global_batch=BATCH, seed=0)
    for report in trainer.run(epochs=EPOCHS):
        if report.step < STEPS:
            schedule.step()
        if report.rank == 0 and report.step % 24 == 0:
            print(f"step {report.step}: loss {report.loss:.3f}, samples {list(report.sizes)}")
    if report.rank == 0:
        with torch.no_grad():
            right = (model(valid[0]).argmax(1) == valid[1]).float().mean()
        print(f"accuracy {float(right):.3f}")
    trainer.close()


if __name__ == "__main__":
    main()
