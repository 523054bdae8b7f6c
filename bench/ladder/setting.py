"""The ladder of ``bench_ladder``: text, model, horizons, and one run of it in plain PyTorch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import thrifty as th
from bench.common.harness import data_folder
from thrifty.core import derive_seed, step_seed


BLOCK = 64
BATCH = 4
NUM_VALID = 4
"""Windows of the validation set, evaluated after each epoch by thrifty: some 4 % of its work."""
UNIT = 5
"""Epochs of a unit: a cooldown of 20 % of the first horizon is one epoch."""
COOLDOWN = 0.2
RATES = (1e-3, 3e-3)
SHAPES = ("linear", "1-sqrt", "cosine")
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The size of the benchmark."""

    text: str
    steps: int
    units: int = 10
    rates: tuple[float, ...] = RATES
    shapes: tuple[str, ...] = SHAPES
    width: int = 128
    layers: int = 5

    @classmethod
    def of(cls, *, quick: bool, text: str, shapes: int) -> Setting:
        chosen = SHAPES[:shapes]
        if quick:
            return cls(text=text, steps=2, units=5, shapes=chosen, width=16, layers=1)
        return cls(text=text, steps=10, shapes=chosen)

    @property
    def horizons(self) -> list[int]:
        return [UNIT * unit for unit in range(1, self.units + 1)]

    def ladder(self) -> th.Ladder:
        return th.Ladder(
            horizons=self.horizons, rates=self.rates, cooldown=COOLDOWN, shapes=self.shapes
        )

    def schedules(self) -> list[th.WSD]:
        """Return the schedule of each run, in the order of the grid."""
        return [config["lr"] for config in self.ladder().grid()]

    @property
    def least_epochs(self) -> int:
        """The fewest epochs that give all results: one trunk for each rate, and all cooldowns."""
        lengths = [round(COOLDOWN * horizon) for horizon in self.horizons]
        trunk = max(h - c for h, c in zip(self.horizons, lengths, strict=True))
        return len(self.rates) * (trunk + len(self.shapes) * sum(lengths))


def text_of(path: str) -> str:
    """Return the text to train on: a file, or sentences made up by a fixed seed."""
    if path:
        return Path(path).read_text(encoding="utf-8")
    names = ("fox", "dog", "owl", "cat", "crow", "bear", "child", "queen")
    verbs = ("sees", "follows", "forgets", "greets", "paints", "leaves")
    rng = random.Random(SEED)
    return " ".join(
        f"the {rng.choice(names)} {rng.choice(verbs)} the {rng.choice(names)}"
        f"{rng.choice((',', '.', ' and'))}"
        for _ in range(20_000)
    )


def default_text() -> str:
    """Return the path of the usual text, or "" if it is not there."""
    path = data_folder() / "text" / "tinyshakespeare.txt"
    return str(path) if path.exists() else ""


@lru_cache(maxsize=2)
def windows(path: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return training and validation windows of ``BLOCK + 1`` characters, and the vocabulary."""
    text = text_of(path)
    letters = sorted(set(text))
    place = {letter: index for index, letter in enumerate(letters)}
    codes = torch.tensor([place[letter] for letter in text])
    num = (len(codes) - 1) // BLOCK
    rows = torch.stack([codes[i * BLOCK : i * BLOCK + BLOCK + 1] for i in range(num)])
    split = len(rows) - NUM_VALID
    return rows[: split // BATCH * BATCH], rows[split:], len(letters)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attend = torch.nn.Linear(width, 3 * width)
        self.mix = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.attend(self.first(x)).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class GPT(torch.nn.Module):
    def __init__(self, vocabulary: int, *, width: int, layers: int) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(vocabulary, width)
        self.places = torch.nn.Embedding(BLOCK, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.letters(codes) + self.places.weight[: codes.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


class Characters(th.Task):
    """A character GPT; an epoch is a number of optimizer steps."""

    optimizer = th.AdamW(lr="lr", weight_decay=0.1)
    batch_size = BATCH

    def __init__(self, setting: Setting) -> None:
        self.text, self.width, self.layers = setting.text, setting.width, setting.layers
        self.steps_per_epoch = setting.steps

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        train, valid, _ = windows(self.text)
        return th.ArrayData(train=(train,), valid=(valid,))

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        return GPT(windows(self.text)[2], width=self.width, layers=self.layers)

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch[0])

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(model, batch[0])}


def train_plainly(setting: Setting, schedule: th.WSD) -> float:
    """Train one run from the beginning to the end of its horizon; return its loss there.

    Random streams have the names that thrifty documents, so that both train the same thing. The
    model is evaluated once, at the end.
    """
    train, valid, vocabulary = windows(setting.text)
    horizon = int(schedule.epochs)
    rates = schedule.values(0, horizon, epochs=horizon, steps_per_epoch=setting.steps).tolist()
    seed_all(derive_seed(SEED, "model"))
    model = GPT(vocabulary, width=setting.width, layers=setting.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates[0], weight_decay=0.1)
    per_pass = len(train) // BATCH
    order = torch.empty(0, dtype=torch.int64)
    for step, rate in enumerate(rates):
        number, place = divmod(step, per_pass)
        if place == 0:
            generator = torch.Generator().manual_seed(derive_seed(SEED, "data", number))
            order = torch.randperm(len(train), generator=generator)
        epoch, within = divmod(step, setting.steps)
        torch.manual_seed(step_seed(derive_seed(SEED, "epoch", epoch), within))
        for group in optimizer.param_groups:
            group["lr"] = rate
        model.train()
        optimizer.zero_grad()
        loss_of(model, train[order[place * BATCH : (place + 1) * BATCH]]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = float(loss_of(model, valid))
    if not math.isfinite(found):
        raise ArithmeticError(f"the loss of {schedule!r} is {found}")
    return found


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (the stream that a task may draw from)
    torch.manual_seed(seed)
