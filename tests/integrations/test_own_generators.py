"""Data with random generators of their own, under the loops of Lightning and transformers.

A run of all epochs makes its loaders once, and their generators run on. Here each epoch is a run,
which has to draw other numbers than the one before, and the same ones when a trial is resumed.
"""

from __future__ import annotations

import copy
import random
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset

import thrifty as th
from tests.integrations._drive import assert_a_resumed_trial_is_the_same, train
from tests.integrations.test_huggingface import TRAIN, bert, fixed as fixed_rate, task as of_bert
from tests.integrations.test_lightning import Net, fixed, points
from thrifty.core import StateError
from thrifty.integrations import LightningTrainable


pytestmark = pytest.mark.slow

EPOCHS = 3
DRAWN: list[float] = []
"""What data sets have drawn since a test began."""


@pytest.fixture(autouse=True)
def _nothing_drawn():
    DRAWN.clear()


class Noisy(Dataset):
    def __init__(self, rows):
        self.rows, self.rng = rows, np.random.default_rng(0)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        noise = float(self.rng.normal())
        DRAWN.append(noise)
        return x + noise, y


class LateNoise(Noisy):
    """Draws for the last rows alone, as for those of a rare class."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index >= 20 else self.rows[index]


class Shuffled(Sampler):
    def __init__(self, num):
        self.num, self.rng = num, random.Random(0)

    def __len__(self):
        return self.num

    def __iter__(self):
        order = self.rng.sample(range(self.num), self.num)
        DRAWN.append(order[0] + order[1] / 100)
        return iter(order)


def rows():
    x, y = points()
    return TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])


def noisy_training():
    return DataLoader(Noisy(rows()[0]), batch_size=8, shuffle=True), DataLoader(rows()[1], 8)


def noisy_validation():
    return DataLoader(rows()[0], batch_size=8, shuffle=True), DataLoader(Noisy(rows()[1]), 8)


def noisy_batches():
    def collate(samples, rng=np.random.default_rng(0)):  # noqa: B008 (one generator is meant)
        x, y = zip(*samples, strict=True)
        DRAWN.append(float(rng.normal()))
        return torch.stack(x) + DRAWN[-1], torch.stack(y)

    return DataLoader(rows()[0], 8, collate_fn=collate), DataLoader(rows()[1], 8)


def late_noise():
    return DataLoader(LateNoise(rows()[0]), 8, shuffle=True), DataLoader(rows()[1], 8)


def mixed_batches():
    def collate(samples, rng=random.Random(0)):  # noqa: B008 (one generator is meant)
        order = rng.sample(range(len(samples)), len(samples))
        DRAWN.append(sum(each * 10**i for i, each in enumerate(order)))
        x, y = (torch.stack(each) for each in zip(*samples, strict=True))
        return (x + x[order]) / 2, (y + y[order]) / 2

    return DataLoader(rows()[0], 8, collate_fn=collate), DataLoader(rows()[1], 8)


def own_order():
    return DataLoader(rows()[0], 8, sampler=Shuffled(32)), DataLoader(rows()[1], 8)


class Module(pl.LightningDataModule):
    def setup(self, stage):
        self.noisy = Noisy(rows()[0])

    def train_dataloader(self):
        return DataLoader(self.noisy, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(rows()[1], 8)


class WithHooks(Net):
    def train_dataloader(self):
        return noisy_training()[0]

    def val_dataloader(self):
        return DataLoader(Noisy(rows()[1]), 8)


def lightning(data, **options):
    given = None if data is None else lambda hp: data()
    kind = WithHooks if data is None else Net
    return LightningTrainable(lambda hp: kind(hp.lr), given, **options)


LIGHTNING = {
    "training": noisy_training,
    "validation": noisy_validation,
    "late": late_noise,
    "batches": noisy_batches,
    "mixed": mixed_batches,
    "order": own_order,
    "data module": Module,
    "hooks": None,
}


@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("kind", LIGHTNING)
def test_in_lightning_a_resumed_trial_draws_the_same(kind, steps):
    options = {} if steps is None else {"steps_per_epoch": steps}
    assert_a_resumed_trial_is_the_same(
        lambda: lightning(LIGHTNING[kind], **options), fixed, epochs=EPOCHS
    )
    DRAWN.clear()
    train(lightning(LIGHTNING[kind], **options), fixed, epochs=EPOCHS)
    # An epoch of steps may go on with the order of a pass.
    if (kind, steps) != ("order", 3):
        assert len(set(DRAWN)) == len(DRAWN), "no epoch repeats what another one has drawn"


def of_hugging_face(*, noisy=TRAIN, **options):
    return of_bert({"num_train_epochs": EPOCHS}, train_dataset=noisy, **options)


class NoisyRows(Dataset):
    """Rows of tokens, the first of which is drawn."""

    def __init__(self, *, seed=0):
        self.rng = random.Random(seed)

    def __len__(self):
        return len(TRAIN)

    def __getitem__(self, index):
        DRAWN.append(self.rng.random())
        token = torch.tensor([int(DRAWN[-1] * 20)])
        return {**TRAIN[index], "input_ids": torch.cat([token, TRAIN[index]["input_ids"][1:]])}


class LateNoisyRows(NoisyRows):
    def __getitem__(self, index):
        return super().__getitem__(index) if index >= len(TRAIN) // 2 else TRAIN[index]


class Collator:
    """Like that of transformers for masked tokens: it makes its generator when it is called."""

    def __init__(self, seed):
        self.seed, self.generator = seed, None

    def __call__(self, samples):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(self.seed)
        DRAWN.append(torch.rand((), generator=self.generator).item())
        batch = transformers.default_data_collator(samples)
        batch["input_ids"][:, 0] = int(DRAWN[-1] * 20)
        return batch


class CollatorWithRng:
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, samples):
        DRAWN.append(self.rng.random())
        batch = transformers.default_data_collator(samples)
        batch["input_ids"][:, 0] = int(DRAWN[-1] * 20)
        return batch


HUGGING_FACE = {
    "rows": lambda: of_hugging_face(noisy=NoisyRows()),
    "late rows": lambda: of_hugging_face(noisy=LateNoisyRows()),
    "rows made for a trial": lambda: of_hugging_face(noisy=lambda hp: NoisyRows()),
    "collator with a seed": lambda: of_hugging_face(trainer={"data_collator": Collator(1)}),
    "collator": lambda: of_hugging_face(trainer={"data_collator": CollatorWithRng()}),
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_in_transformers_a_resumed_trial_draws_the_same(kind):
    make = HUGGING_FACE[kind]
    assert_a_resumed_trial_is_the_same(make, fixed_rate, epochs=EPOCHS)
    DRAWN.clear()
    train(make(), fixed_rate, epochs=EPOCHS)
    assert len(set(DRAWN)) == len(DRAWN), "no epoch repeats what another one has drawn"


def test_transformers_shuffle_with_a_generator_of_a_loader_anew_in_each_epoch():
    """Also if it was made for the loader, whose generator runs on in a run of all epochs."""
    orders = []

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return DataLoader(
                NumberedRows(orders),
                batch_size=8,
                shuffle=True,
                generator=torch.Generator().manual_seed(3),
                collate_fn=self.data_collator,
            )

    train(of_hugging_face(trainer_class=Trainer), fixed_rate, epochs=EPOCHS)
    passes = {tuple(orders[i : i + len(TRAIN)]) for i in range(0, len(orders), len(TRAIN))}
    assert len(passes) == EPOCHS


class NumberedRows(Dataset):
    def __init__(self, orders):
        self.orders = orders

    def __len__(self):
        return len(TRAIN)

    def __getitem__(self, index):
        self.orders.append(index)
        return TRAIN[index]


CHOSEN: list[tuple[str, list[int]]] = []


class DrawingTrainer(transformers.Trainer):
    """Draws once which rows it trains on, when it is made and when it makes its loader."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        chosen = torch.randperm(len(self.train_dataset))[:20].tolist()
        CHOSEN.append(("made", chosen))
        self.train_dataset = Subset(self.train_dataset, chosen)

    def get_train_dataloader(self):
        whole = self.train_dataset
        chosen = random.sample(range(len(whole)), 16)
        CHOSEN.append(("loader", chosen))
        self.train_dataset = Subset(whole, chosen)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = whole


class SameNoise(Noisy):
    """Has noise for each row that is the same at each read."""

    def __getitem__(self, index):
        x, y = self.rows[index]
        noise = float(copy.deepcopy(self.rng).normal(size=len(self))[index])
        DRAWN.append(noise)
        return x + noise, y


class SameNoisyRows(NoisyRows):
    def __getitem__(self, index):
        DRAWN.append(copy.deepcopy(self.rng).random() + index)
        return TRAIN[index]


def same_noise():
    return DataLoader(SameNoise(rows()[0]), 8, shuffle=True), DataLoader(rows()[1], 8)


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("kind", ["lightning", "transformers"])
def test_noise_of_a_copy_is_the_same_in_each_epoch(kind, steps):
    if kind == "lightning":
        data, make, rates = SameNoise(rows()[0]), partial(lightning, same_noise), fixed
    else:
        data, rates = SameNoisyRows(), fixed_rate
        args = {"num_train_epochs": EPOCHS} if steps is None else {}
        make = partial(of_bert, args, train_dataset=SameNoisyRows())
    options = {} if steps is None else {"steps_per_epoch": steps}
    for index in range(len(data)):
        data[index]
    expected = set(DRAWN)
    DRAWN.clear()
    train(make(**options), rates, epochs=EPOCHS)
    assert len(DRAWN) >= EPOCHS * 16
    assert set(DRAWN) == expected


def test_a_trainer_draws_once_what_a_run_draws_once():
    """Else a Trainer that holds out rows trains on them in another epoch."""
    CHOSEN.clear()

    def make():
        return of_hugging_face(trainer_class=DrawingTrainer)

    assert_a_resumed_trial_is_the_same(make, fixed_rate, epochs=EPOCHS)
    for name in ("made", "loader"):
        found = [chosen for what, chosen in CHOSEN if what == name]
        assert len(found) >= 2 * EPOCHS
        assert all(chosen == found[0] for chosen in found)


def test_steps_still_draw_anew_in_each_epoch():
    """Dropout of a second epoch must not have the masks of the first."""
    masks = []

    class Dropping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = bert()

        def forward(self, input_ids, labels=None):
            masks.append(torch.rand(()).item())
            return self.inner(input_ids=input_ids, labels=labels)

    one = th.integrations.HuggingFaceTrainable(
        lambda hp: Dropping(), train_dataset=TRAIN, args={"num_train_epochs": EPOCHS}
    )
    train(one, fixed_rate, epochs=EPOCHS)
    assert len(set(masks)) == len(masks)


class DrawnOnce(Dataset):
    """Draws the noise of all rows at the first read, or before it."""

    def __init__(self, rows, *, is_early):
        self.rows, self.noise = rows, torch.randint(0, 20, (len(rows),)) if is_early else None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.noise is None:
            self.noise = torch.randint(0, 20, (len(self.rows),))
        noise, row = self.noise[index], self.rows[index]
        if isinstance(row, tuple):
            return row[0] + noise, row[1]
        return {**row, "input_ids": torch.cat([noise[None], row["input_ids"][1:]])}


def drawn_once(kind, *, is_early):
    if kind == "lightning":
        early = {"is_early": is_early}
        return lightning(
            lambda: (DataLoader(DrawnOnce(rows()[0], **early), 8), DataLoader(rows()[1], 8))
        )
    return of_hugging_face(noisy=lambda hp: DrawnOnce(TRAIN, is_early=is_early))


@pytest.mark.parametrize("kind", ["lightning", "transformers"])
def test_noise_that_is_drawn_at_the_first_read_is_refused_with_advice_that_helps(kind, tmp_path):
    def trained(name, *, is_early):
        study = th.Study(
            drawn_once(kind, is_early=is_early),
            th.Space(lr=th.Choice([0.1, th.Step(0.1, [2])])),
            name=name,
            algorithm=th.GridSearch(max_epochs=EPOCHS),
            metric="val_loss" if kind == "lightning" else "eval_loss",
            mode="min",
            storage=f"sqlite:///{tmp_path}/t.db",
        )
        return study.run(progress=False)

    with pytest.raises(StateError) as caught:
        trained("late", is_early=False)
    message = str(caught.value)
    assert "make it where the data set is made, in __init__" in message
    assert ".noise'" in message
    assert "_kept" not in message
    assert "load_state()" not in message
    assert all(len(each.curve) == EPOCHS for each in trained("early", is_early=True).trials)


def test_a_study_over_such_data_neither_warns_nor_stops(tmp_path, caplog):
    """Trials that share epochs, and those that one worker trains one after the other."""

    def curves(name, *rates):
        study = th.Study(
            lightning(noisy_training),
            th.Space(lr=th.Choice(list(rates))),
            name=name,
            algorithm=th.GridSearch(max_epochs=4),
            metric="val_loss",
            mode="min",
            storage=f"sqlite:///{tmp_path}/{name}.db",
        )
        study.run(progress=False)
        return {str(trial.config["lr"]): trial.curve for trial in study.trials}

    rates = (0.1, th.Step(0.1, [2]), 0.2)
    together = curves("together", *rates)
    assert not [each for each in caplog.messages if "rng" in each]
    for number, rate in enumerate(rates):
        assert together[str(rate)] == curves(f"alone {number}", rate)[str(rate)]
