"""Train sixteen networks with sixteen learning rates as one computation, in your own loop."""

import torch
from sklearn.datasets import load_digits

import thrifty as th


def network():
    """A small network of its own weights."""
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 10)
    )


def loss(model, batch):
    """The loss of one model, as always."""
    images, labels = batch
    return torch.nn.functional.cross_entropy(model(images), labels)


def main():
    """Trains all of them and prints how good each is."""
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(0)
    rates = [0.3 * 0.7**k for k in range(16)]
    packed = th.pack(
        [network() for _ in rates],
        loss=loss,
        optimizer=th.SGD(lr="lr", momentum=0.9, clip_norm=1.0),
        values=[{"lr": lr} for lr in rates],
    )
    for _ in range(5):
        for rows in torch.randperm(1400).split(64):
            packed.step((images[rows], labels[rows]))
    for lr, model in zip(rates, packed.models, strict=True):
        with torch.no_grad():
            right = model.eval()(images[1400:]).argmax(1) == labels[1400:]
        print(f"lr {lr:.4f}: accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
