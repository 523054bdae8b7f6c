"""Models and data of the five scripts, the same in plain PyTorch and in thrifty."""

import math
import pydoc_data.topics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


EPOCHS = 5
STEPS_PER_EPOCH = 10


def text(*, batch_size, context):
    """Return blocks of characters of Python's own manual: those to train on, and 32 others."""
    manual = "".join(pydoc_data.topics.topics.values())
    numbers = {character: number for number, character in enumerate(sorted(set(manual)))}
    num_train = STEPS_PER_EPOCH * batch_size
    used = manual[: (num_train + 32) * (context + 1)]
    blocks = torch.tensor([numbers[character] for character in used]).view(-1, context + 1)
    return blocks[:num_train], blocks[num_train:]


def digits(*, batch_size):
    """Return images and labels of handwritten digits: those to train on, and 500 others."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(x / 8 - 1, dtype=torch.float32)[order].view(-1, 1, 8, 8)
    y = torch.tensor(y)[order]
    num_train = STEPS_PER_EPOCH * batch_size
    return (x[:num_train], y[:num_train]), (x[-500:], y[-500:])


def sentences(*, batch_size):
    """Return made-up sentences, and whether word 1 comes before word 2."""
    generator = torch.Generator().manual_seed(0)
    num = STEPS_PER_EPOCH * batch_size + 64
    words = torch.randint(3, 50, (num, 12), generator=generator)
    places = torch.stack([torch.randperm(12, generator=generator)[:2] for _ in range(num)])
    words.scatter_(1, places, torch.tensor([1, 2]).expand(num, 2))
    labels = (places[:, 0] < places[:, 1]).long()
    return (words[:-64], labels[:-64]), (words[-64:], labels[-64:])


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        rows, length, width = x.shape
        split = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.project(mixed.transpose(1, 2).reshape(rows, length, width)))


class Block(nn.Module):
    """Attention and a small network, each added to its input."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A language model of characters."""

    def __init__(self, *, characters=128, context=16, width=32, heads=2, layers=2, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_loss(model, blocks):
    """Return the mean cross-entropy of the next character."""
    logits = model(blocks[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())


def conv_net():
    """Return a network of two convolutions for digits."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class GAN(nn.Module):
    """A generator of digits, and a discriminator that tells them from real ones."""

    def __init__(self, noise=16):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(noise, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(64, 1)
        )
