"""Generators that data sets keep are seeded for each batch, so trials with such data are shared."""

from __future__ import annotations

import collections
import copy
import functools
import os
import pickle
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import thrifty as th
from thrifty.pack.task._data import open_source
from thrifty.pack.task._own_generators import OwnGenerators


X = torch.linspace(-1, 1, 24)[:, None]


class Slotted:
    __slots__ = ("empty", "rng")

    def __init__(self, rng):
        self.rng = rng


@dataclass(slots=True)
class Slots:
    rng: object


class Called:
    def __init__(self, rng):
        self.rng = rng

    def __call__(self, x):
        return x


class Held(dict):
    pass


def enclosing(rng):
    return lambda x: x + rng.random()


def held_by(rng):
    held = Held()
    held.rng = rng
    return held


def later(x, *, rng=None):
    return x


def with_default(rng):
    def draw(x, rng=rng):
        return x

    return draw


PLACES = {
    "attribute": Called,
    "slot": Slotted,
    "slot of a dataclass": Slots,
    "list": lambda rng: [0, (rng,)],
    "dict": lambda rng: {"a": {1: rng}},
    "attribute of a dict": held_by,
    "deque": lambda rng: collections.deque([rng]),
    "closure": enclosing,
    "default": with_default,
    "keyword of a partial": lambda rng: functools.partial(later, rng=rng),
    "argument of a partial": lambda rng: functools.partial(later, rng),
    "method": lambda rng: Called(rng).__call__,
    "module": lambda rng: torch.nn.Sequential(_WithRng(rng)),
    "subset": lambda rng: Subset(Called(rng), [0]),
}


class _WithRng(torch.nn.Module):
    def __init__(self, rng):
        super().__init__()
        self.rng = rng


@pytest.mark.parametrize("place", PLACES)
def test_a_generator_is_found(place):
    rng = np.random.default_rng(0)
    found = OwnGenerators({"data": PLACES[place](rng)})
    with found.seeded(1):
        one = rng.random()
    rng.random(3)
    with found.seeded(1):
        assert one == rng.random()


KINDS = {
    "NumPy": (lambda: np.random.default_rng(0), lambda g: g.random()),
    "Philox": (lambda: np.random.Generator(np.random.Philox(0)), lambda g: g.random()),
    "Mersenne": (lambda: np.random.Generator(np.random.MT19937(0)), lambda g: g.random()),
    "state": (lambda: np.random.RandomState(0), lambda g: g.rand()),
    "Python": (lambda: random.Random(0), lambda g: g.random()),
    "PyTorch": (
        lambda: torch.Generator().manual_seed(0),
        lambda g: torch.rand((), generator=g).item(),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_seeded_and_put_back(kind):
    make, draw = KINDS[kind]
    rng, undisturbed = make(), make()
    found = OwnGenerators({"data": [rng]})
    with found.seeded(1):
        one = draw(rng), draw(rng)
    with found.seeded(2):
        assert draw(rng) != one[0]
    with found.seeded(1):
        assert (draw(rng), draw(rng)) == one
    with pytest.raises(ZeroDivisionError), found.seeded(1):
        1 / draw(rng) / 0
    assert draw(rng) == draw(undisturbed), "it is put back"


def test_what_code_makes_from_a_seed_stays_the_same():
    """A data set may make the noise of a sample from it, the same in each epoch."""
    torchs, numpys = torch.Generator().manual_seed(7), np.random.default_rng(7)
    entropy = numpys.bit_generator.seed_seq.entropy
    with OwnGenerators({"data": [torchs, numpys]}).seeded(1):
        assert torchs.initial_seed() == 7
        assert numpys.bit_generator.seed_seq.entropy == entropy
        one = torch.rand(3, generator=torchs)
    assert not torch.equal(one, torch.rand(3, generator=torchs)), "it draws other numbers"


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": lambda g: copy.copy(g) if not isinstance(g, np.random.Generator) else copy.deepcopy(g),
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "of its owner": lambda g: copy.deepcopy(Called([g])).rng[0],
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_seeded_generator_is_as_if_nothing_was_seeded(kind, how):
    make, draw = KINDS[kind]
    rng, alone = make(), make()
    draw(rng), draw(alone)
    expected = draw(alone)
    found = OwnGenerators({"data": [rng]})
    for seed in (1, 2):
        with found.seeded(seed):
            assert [draw(COPIES[how](rng)) for _ in range(2)] == [expected] * 2
            with found.seeded(3):
                assert draw(COPIES[how](rng)) == expected
            assert draw(COPIES[how](rng)) == expected
    found.seed(4)
    found.seed(5)
    assert draw(COPIES[how](rng)) == expected
    found.seed(6)
    assert draw(rng) != expected
    assert draw(COPIES[how](rng)) != expected, "what is drawn from has a place of its own"


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_that_is_copied_and_drawn_from_is_refused(kind):
    make, draw = KINDS[kind]
    rng = make()
    found = OwnGenerators({"data": Called(rng)})

    def read():
        with found.seeded(1):
            return draw(copy.deepcopy(rng)), draw(rng)

    with pytest.raises(th.TaskError, match=r"copy the generator data\.rng"):
        read()
    assert draw(rng) == draw(make()), "it is put back"
    with found.seeded(1):
        one = draw(rng), draw(copy.deepcopy(rng))
    with found.seeded(1):
        assert one == (draw(rng), draw(copy.deepcopy(rng)))
    with found.seeded(2):
        assert one != (draw(rng), draw(copy.deepcopy(rng)))


def test_what_a_generator_of_numpy_spawns_is_seeded_too():
    rng, undisturbed = np.random.default_rng(0), np.random.default_rng(0)
    found = OwnGenerators({"data": rng})

    def drawn(seed):
        with found.seeded(seed):
            return [each.random() for each in (*rng.spawn(2), *rng.spawn(1))]

    assert len({*drawn(1)}) == 3
    assert drawn(1) == drawn(1)
    assert not {*drawn(1)} & {*drawn(2)}
    assert rng.spawn(1)[0].random() == undisturbed.spawn(1)[0].random(), "it is put back"


def test_generators_that_datasets_copies_are_left_alone_and_those_of_functions_are_not():
    """``datasets`` shuffles with a copy of a generator, so that each pass has the same order."""
    mapped = type("MappedExamplesIterable", (), {"__module__": "datasets.iterable_dataset"})()
    mapped.generator, users = np.random.default_rng(0), np.random.default_rng(0)
    before = mapped.generator.bit_generator.state
    mapped.function = enclosing(users)
    with OwnGenerators({"data": mapped}).seeded(1):
        assert mapped.generator.bit_generator.state == before
        assert users.bit_generator.state != before


def test_two_generators_draw_different_numbers():
    one, two = np.random.default_rng(0), np.random.default_rng(0)
    with OwnGenerators({"a": one, "b": two}).seeded(1):
        assert one.random() != two.random()


def test_global_streams_and_those_of_the_machine_are_left_out():
    held = [torch.default_generator, np.random.mtrand._rand, random._inst, random.SystemRandom()]
    assert not OwnGenerators({"data": held})
    assert not OwnGenerators({"data": held[:1]}, besides=())
    rng = np.random.default_rng(0)
    assert not OwnGenerators({"data": rng}, besides=[rng])


def test_names_do_not_depend_on_addresses():
    """Else two processes would draw different numbers."""

    def drawn():
        rng = np.random.default_rng(0)
        with OwnGenerators({"data": {object(): rng}}).seeded(1):
            return rng.random()

    assert drawn() == drawn()


def test_a_cycle_and_an_empty_cell_are_no_problem():
    def outer():
        def inner():
            return late

        if False:
            late = 1
        return inner

    held = [outer()]
    held.append(held)
    assert not OwnGenerators({"data": held})


class Noisy(torch.utils.data.Dataset):
    """Adds noise from a generator of its own."""

    def __init__(self):
        self.rng = np.random.default_rng()

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + float(self.rng.normal()), 2 * X[index]


class Line(th.Task):
    optimizer = th.SGD(lr="lr")
    batch_size = 8

    def data(self, hp):
        return th.DatasetPair(train=Noisy(), valid=TensorDataset(X, 2 * X))

    def model(self, hp):
        return torch.nn.Linear(1, 1)

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()

    def metrics(self, model, batch):
        return {"mse": self.loss(model, batch)}


class NoisyRows:
    """A collate function with a generator of its own."""

    def __init__(self):
        self.rng = random.Random()

    def __call__(self, rows):
        x, y = zip(*rows, strict=True)
        return torch.stack(x) + self.rng.gauss(0, 1), torch.stack(y)


class Collating(Line):
    def data(self, hp):
        rows = TensorDataset(X, 2 * X)
        return th.DatasetPair(train=rows, valid=rows, collate_fn=NoisyRows())


def curves(task, name, *lrs, path, **options):
    study = th.Study(
        task,
        th.Space(lr=th.Choice(list(lrs))),
        name=name,
        algorithm=th.GridSearch(max_epochs=4),
        metric="mse",
        mode="min",
        storage=f"sqlite:///{path}/{name}.db",
    )
    study.run(progress=False, **options)
    return {str(t.config["lr"]): list(t.curve) for t in study.trials}


class LastRows(Noisy):
    """Adds noise to the last rows alone, as to those of a rare class."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index >= 16 else (X[index], 2 * X[index])


class Mixing(NoisyRows):
    """Mixes the samples of a batch, in an order from a generator of its own."""

    def __call__(self, rows):
        others = self.rng.sample(rows, len(rows))
        return torch.stack([(x + z) / 2 for (x, _), (z, _) in zip(rows, others, strict=True)]), (
            torch.stack([(y + z) / 2 for (_, y), (_, z) in zip(rows, others, strict=True)])
        )


class SameNoise(Noisy):
    """Adds noise to each sample that is the same at each read."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index):
        noise = copy.deepcopy(self.rng).normal(size=len(X))
        return X[index] + float(noise[index]), 2 * X[index]


class Same(Line):
    def data(self, hp):
        return th.DatasetPair(train=SameNoise(), valid=TensorDataset(X, 2 * X))


class Rare(Line):
    def data(self, hp):
        return th.DatasetPair(train=LastRows(), valid=TensorDataset(X, 2 * X))


class Mixed(Line):
    def data(self, hp):
        rows = TensorDataset(X, 2 * X)
        return th.DatasetPair(train=rows, valid=rows, collate_fn=Mixing())


RATES = (0.1, th.Step(0.1, [2]), 0.2, 0.3)


@pytest.mark.parametrize("task", [Line, Collating, Rare, Mixed, Same])
def test_shared_and_packed_trials_draw_what_they_draw_alone(task, tmp_path, caplog):
    together = curves(task(), "together", *RATES, path=tmp_path)
    for number, rate in enumerate(RATES):
        alone = curves(task(), f"alone {number}", rate, path=tmp_path)
        assert together[str(rate)] == pytest.approx(alone[str(rate)], rel=1e-5)
    assert not [each for each in caplog.messages if "rng" in each]
    assert len({*together[str(RATES[0])]}) == 4


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 1, "multiprocessing_context": "forkserver"}],
    ids=["here", "forked", "fork server"],
)
def test_noise_of_a_copy_is_the_same_at_each_read(options):
    data = th.DatasetPair(train=SameNoise(), valid=TensorDataset(X, 2 * X), **options)
    source = open_source(data, device=torch.device("cpu"))
    expected = sorted(float(x) for x, _ in SameNoise())
    for epoch in range(2):
        read = [x for x, _ in source.train_batches(seed=1, epoch=epoch, batch_size=8)]
        assert sorted(torch.cat(read).flatten().tolist()) == expected


BEGUN = torch.zeros(3, dtype=torch.long).share_memory_()


def note_begun(worker):
    BEGUN[worker] += 1


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_each_epoch_and_each_process_has_noise_of_its_own(num_workers):
    rows = TensorDataset(X, 2 * X)
    BEGUN.zero_()
    options = {"num_workers": num_workers, "worker_init_fn": note_begun}
    data = th.DatasetPair(train=Noisy(), valid=rows, **options)
    source = open_source(data, device=torch.device("cpu"))
    epochs = [
        torch.cat([x for x, _ in source.train_batches(seed=1, epoch=epoch, batch_size=8)])
        for epoch in (0, 0, 1)
    ]
    assert torch.equal(epochs[0], epochs[1])
    found = [each.flatten().sort().values for each in epochs]
    assert not torch.allclose(found[0], found[2])
    assert len(found[0].unique()) == len(X)
    assert BEGUN[:num_workers].tolist() == [3] * num_workers, "the user's function is called, too"


READ_BY: list[int] = []
"""Processes that have read a sample, as far as this one knows."""


class Noted(Noisy):
    def __getitem__(self, index):
        READ_BY.append(os.getpid())
        return super().__getitem__(index)


def test_a_data_set_is_read_in_the_processes_of_its_loader_alone():
    """It may open its file at the first read, and processes must not share the place in it."""
    data = th.DatasetPair(train=Noted(), valid=TensorDataset(X, X), num_workers=1)
    source = open_source(data, device=torch.device("cpu"))
    READ_BY.clear()
    assert len(list(source.train_batches(seed=1, epoch=0, batch_size=8))) == 3
    assert not READ_BY


def test_two_trials_may_read_one_data_set_in_turns():
    data = Line().data(None)
    source = open_source(data, device=torch.device("cpu"))

    def epoch(seed):
        return source.train_batches(seed=seed, epoch=0, batch_size=8)

    alone = [[x for x, _ in epoch(seed)] for seed in (1, 2)]
    turns = [(one, two) for (one, _), (two, _) in zip(epoch(1), epoch(2), strict=True)]
    for (one, two), first, second in zip(turns, *alone, strict=True):
        assert torch.equal(one, first)
        assert torch.equal(two, second)


def test_a_loader_that_ends_early_leaves_generators_as_they_were():
    noisy = Noisy()
    before = noisy.rng.bit_generator.state
    batches = OwnGenerators({"data": noisy}).iterated(DataLoader(noisy, 8), iter(range(100)))
    next(batches)
    batches.close()
    assert noisy.rng.bit_generator.state == before
