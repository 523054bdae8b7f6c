"""Trials of a fused pack get the results of solo training, with any other trials in the pack."""

from __future__ import annotations

import array
import math
import mmap
import pathlib
import random
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, assert_same_state, epoch_plan, together
from tests.pack._toys import (
    TOYS,
    Attending,
    BatchNormed,
    Buffered,
    Dropping,
    Images,
    Normed,
    Toy,
    normal,
)
from thrifty.core import DivergedError
from thrifty.pack import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    ArrayData,
    BlockOptions,
    EpochPlan,
    FusedBackend,
    Optimizer,
    RMSprop,
    SoloBackend,
    UnfusableError,
    UnverifiedError,
)
from thrifty.pack.fused._dry_run import dry_run
from thrifty.pack.fused._structure import Structure
from thrifty.space import Cosine, Linear, MultiStep, Step
from thrifty.testing import FaultyTask


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


SINGLE, DOUBLE = 1e-5, 1e-10
few = settings(deadline=None, derandomize=True, database=None, max_examples=8)


def variant(base, **attributes):
    """Return an instance of a toy task with some attributes replaced."""
    return type(base.__name__, (base,), attributes)()


def in_double(base, **attributes):
    return variant(base, dtype=torch.float64, **attributes)


def fused(task, *, size=8):
    return FusedBackend(task, device=here(), block=BlockOptions(size=size))


def check(task, trials, *, size=8, tolerance=DOUBLE, at_once=None):
    backend = fused(task, size=size)
    found, wanted = together(backend, trials, at_once=at_once), alone(task, trials)
    if tolerance < SINGLE:
        for result in (*found, *wanted):  # ``train_loss`` has its own test
            for metrics in result.metrics:
                metrics.pop("train_loss")
    assert_same(found, wanted, tolerance=tolerance)
    assert all(result.error is None for result in found)
    return backend


def num_blocks(task, trials, *, size=8):
    """Return how many blocks the trials take when all are present at the same time."""
    backend = fused(task, size=size)
    for slot, trial in enumerate(trials):
        backend.put(slot, trial.member)
    return len({id(home) for home in backend.blocks.home.values()})


# -- models --------------------------------------------------------------------------------


@pytest.mark.sample(10)
@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_fused_models_train_as_alone(toy, dtype):
    trials = [Trial(config={"lr": 0.05 / (k + 1)}, seed=k % 3) for k in range(4)]
    tolerance = SINGLE if dtype == torch.float32 else DOUBLE
    check(variant(toy, dtype=dtype), trials, size=3, tolerance=tolerance)


def test_the_training_loss_has_the_precision_of_the_task():
    task, trials = in_double(Toy), [Trial(config={"lr": 0.05})]
    (found,), (wanted,) = together(fused(task), trials), alone(task, trials)
    losses = [[m["train_loss"] for m in result.metrics] for result in (found, wanted)]
    assert losses[0] == pytest.approx(losses[1], rel=DOUBLE)


def test_a_model_that_insists_on_its_own_precision():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 1)

        def forward(self, x):
            if self.inner.weight.dtype != torch.float32:
                raise RuntimeError("single precision only")
            return self.inner(x)

    class Task(Toy):
        def network(self, hp):
            return Own()

    check(Task(), [Trial(config={"lr": 0.05}, seed=k) for k in range(2)], tolerance=SINGLE)


# -- optimizers ----------------------------------------------------------------------------

RATES = [0.05, Linear(0.05), Cosine(0.1), Step(0.1, [1])]
OPTIMIZERS = {
    "sgd": (SGD(lr="lr"), {}),
    "sgd-dampened": (
        SGD(lr="lr", momentum="m", dampening=0.1, weight_decay="wd"),
        {"m": Linear(0.9), "wd": Linear(0.1)},
    ),
    "sgd-nesterov": (
        SGD(lr="lr", momentum="m", nesterov=True, weight_decay=0.01, clip_norm="clip"),
        {"m": 0.9, "clip": Linear(0.5)},
    ),
    "sgd-limited": (
        SGD(lr="lr", momentum=0.9, clip_value="limit", clip_norm=0.1),
        {"limit": Linear(0.05, floor=0.01)},
    ),
    "adam": (
        Adam(lr="lr", betas=("b", 0.99), weight_decay="wd", clip_norm=0.1),
        {"b": Linear(0.9), "wd": 0.1},
    ),
    "adamw": (
        AdamW(lr="lr", betas=(0.9, "b"), eps=1e-4, weight_decay="wd"),
        {"b": Linear(0.99), "wd": Linear(0.1)},
    ),
    "rmsprop": (RMSprop(lr="lr", alpha="a", momentum=0.5, weight_decay=0.1), {"a": Linear(0.99)}),
    "rmsprop-plain": (RMSprop(lr="lr"), {}),
    "adagrad": (
        Adagrad(lr="lr", lr_decay="d", initial_accumulator_value=0.1, weight_decay=0.01),
        {"d": Linear(0.1)},
    ),
}
by_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def optimized(name, base=Dropping):
    optimizer, extra = OPTIMIZERS[name]
    trials = [Trial(config={"lr": rate, **extra}, seed=k, epochs=4) for k, rate in enumerate(RATES)]
    return in_double(base, optimizer=optimizer), trials


@pytest.mark.sample(4)
@by_optimizer
def test_optimizers_follow_their_schedules(name):
    task, trials = optimized(name)
    backend = fused(task, size=3)
    found, wanted = together(backend, trials), alone(task, trials)
    for one, other in zip(found, wanted, strict=True):
        mses = [[m["mse"] for m in result.metrics] for result in (one, other)]
        assert mses[0] == pytest.approx(mses[1], rel=DOUBLE)
        model = [
            {n: t for n, t in r.state.tensors.items() if n.startswith("model")}
            for r in (one, other)
        ]
        assert all(torch.allclose(t, model[1][n], rtol=0, atol=DOUBLE) for n, t in model[0].items())


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_leave_the_state_that_torch_leaves(name):
    task, trials = optimized(name)
    found, wanted = together(fused(task, size=3), trials), alone(task, trials)
    for one, other in zip(found, wanted, strict=True):
        assert_same_state(one.state, other.state, tolerance=DOUBLE)


@pytest.mark.parametrize("levels", [[0.0, 0.9, 0.9], [0.9, 0.0, 0.5]], ids=["later", "pause"])
def test_momentum_that_comes_and_goes(levels):
    task = in_double(Toy, optimizer=SGD(lr="lr", momentum="m"))
    momentum = MultiStep(levels, milestones=[1, 2])
    check(task, [Trial(config={"lr": 0.05, "m": m}, epochs=4) for m in (momentum, 0.9)])


@pytest.mark.sample(8)
@by_optimizer
@pytest.mark.parametrize("first", ["fused", "solo"])
def test_a_state_goes_on_in_the_other_back_end(name, first):
    task, trials = optimized(name)
    whole = alone(task, trials)
    makers = {
        "fused": lambda: fused(task, size=3),
        "solo": lambda: SoloBackend(task, device=here()),
    }
    (second,) = makers.keys() - {first}

    def train(kind, part):
        if kind == "fused":
            return together(makers[kind](), part)
        return [together(makers[kind](), [trial])[0] for trial in part]

    half = [Trial(config=t.config, seed=t.seed, epochs=2) for t in trials]
    rest = [
        Trial(config=t.config, seed=t.seed, epochs=4, start=2, state=result.state)
        for t, result in zip(trials, train(first, half), strict=True)
    ]
    for one, other in zip(train(second, rest), whole, strict=True):
        mses = [m["mse"] for m in one.metrics], [m["mse"] for m in other.metrics[2:]]
        assert mses[0] == pytest.approx(mses[1], rel=DOUBLE)


def test_a_state_is_a_copy():
    task = Toy()
    backend = fused(task)
    results = together(backend, [Trial(config={"lr": 0.05})])
    before = {name: t.clone() for name, t in results[0].state.tensors.items()}
    together(backend, [Trial(config={"lr": 0.5}, seed=1)])
    assert all(torch.equal(t, before[name]) for name, t in results[0].state.tensors.items())


# -- batches -------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("toy", [Toy, Dropping, Buffered, Attending])
def test_batch_sizes_may_differ_within_a_block(toy):
    task = in_double(toy, batch_size="size")
    trials = [
        Trial(config={"lr": 0.02, "size": size}, seed=k) for k, size in enumerate([8, 6, 7, 9, 8])
    ]
    assert num_blocks(task, trials) == 1
    check(task, trials, size=3)


def test_attention_with_dropout_in_single_precision():
    """On a GPU, torch's kernel for it draws the mask; in double precision it has no such kernel."""
    sizes = [{"size": 8}, {"size": 7}, {"size": 8}]
    task = variant(Attending, batch_size="size")
    trials = [Trial(config={"lr": 0.02, **size}, seed=k) for k, size in enumerate(sizes)]
    check(task, trials, tolerance=10 * SINGLE)


class Penalised(Toy):
    """A penalty on weights, of which some may have as many rows as the batch."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 0.05 * sum(p.square().sum() for p in model.parameters())


def penalised(*, width):
    """Return a trial of small batches that goes on with one of large batches, for an epoch."""
    task = in_double(Penalised, batch_size="batch")
    configs = [{"lr": 0.02, "width": width, "batch": size} for size in (7, 7, 8)]
    return task, [Trial(config=c, seed=k, epochs=(3, 1, 1)[k]) for k, c in enumerate(configs)]


def test_a_weight_has_as_many_rows_as_the_batch():
    """Which tensors have the rows of a batch is told by their size."""
    check(*penalised(width=9), at_once=2)
    task, trials = penalised(width=8)
    one, _, other = together(fused(task), trials, at_once=2)
    for result in (one, other):
        assert isinstance(result.error, UnfusableError)
        assert "may have 8 rows, too" in str(result.error)


def test_a_new_step_is_checked_on_a_trial_that_is_padded(monkeypatch):
    monkeypatch.setattr(Structure, "_check_padded", lambda *args, **options: None)
    task, trials = penalised(width=8)
    one, _, other = together(fused(task), trials, at_once=2)
    assert isinstance(one.error, UnverifiedError)
    assert other.error is None


def test_batch_sizes_far_apart_have_blocks_of_their_own():
    task = in_double(Dropping, batch_size="size")
    trials = [
        Trial(config={"lr": 0.02, "size": size}, seed=k) for k, size in enumerate([4, 20, 8, 19, 5])
    ]
    assert num_blocks(task, trials) == 3
    check(task, trials, at_once=3)


def test_padding_in_memory_that_held_anything():
    """Draws for padding rows must not come from uninitialised memory."""
    task = in_double(Dropping, batch_size="size")
    trials = [Trial(config={"lr": 0.02, "size": s}, seed=s) for s in (8, 6)]
    with uninitialised_memory_is_nan():
        check(task, trials)


class uninitialised_memory_is_nan:  # noqa: N801 (used like a function)
    """Makes ``torch.empty`` return the worst case: NaNs."""

    def __enter__(self):
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *exc):
        torch.use_deterministic_algorithms(self._before[0])
        torch.utils.deterministic.fill_uninitialized_memory = self._before[1]


@pytest.mark.parametrize("toy", [BatchNormed, Images])
def test_batch_norm_keeps_batch_sizes_apart(toy):
    task = in_double(toy, batch_size="size")
    trials = [
        Trial(config={"lr": 0.02, "size": size}, seed=k) for k, size in enumerate([8, 5, 8, 5])
    ]
    assert num_blocks(task, trials) == 2
    check(task, trials)


@pytest.mark.parametrize("toy", [Dropping, BatchNormed])
def test_a_batch_size_that_follows_a_schedule(toy):
    task = in_double(toy, batch_size="size")
    sizes = [8, MultiStep([4, 8], milestones=[2]), 5]
    trials = [
        Trial(config={"lr": 0.02, "size": size}, seed=k, epochs=4) for k, size in enumerate(sizes)
    ]
    check(task, trials)


class Pairs(Dropping):
    def data(self, hp):
        arrays = super().data(hp)
        return TensorDataset(*arrays.train), TensorDataset(*arrays.valid)


@pytest.mark.parametrize("at_once", [2, 4])
def test_data_sets(at_once):
    trials = [Trial(config={"lr": 0.05 / (k + 1)}, seed=k % 2) for k in range(5)]
    check(Pairs(), trials, at_once=at_once, tolerance=SINGLE)


def test_data_that_depend_on_a_hyper_parameter():
    class Shifted(Dropping):
        def data(self, hp):
            arrays = super().data(hp)
            (x, y), (vx, vy) = arrays.train, arrays.valid
            return ArrayData(train=(x + hp.shift, y), valid=(vx + hp.shift, vy))

    trials = [Trial(config={"lr": 0.05, "shift": k % 2}, seed=k) for k in range(5)]
    check(Shifted(), trials, at_once=3, tolerance=SINGLE)


# -- models that differ --------------------------------------------------------------------


def widths(*each):
    return [Trial(config={"lr": 0.05, "width": width}, seed=k) for k, width in enumerate(each)]


def test_widths_may_differ_within_a_block():
    task = in_double(Toy)
    trials = widths(16, 12, 14, 16, 13)
    assert num_blocks(task, trials) == 1
    check(task, trials, size=3)


def padded(backend):
    return [trial for trial in backend.blocks.home if trial.is_narrow]


def test_a_block_of_one_trial_has_its_width():
    task = in_double(Toy)
    trials = widths(16, 12, 14, 12, 16)
    check(task, trials, size=1)
    backend = fused(task, size=1)
    for slot, trial in enumerate(trials):
        backend.put(slot, trial.member)
    assert not padded(backend)
    assert num_blocks(task, trials, size=1) == len(trials)


class OverABase(Toy):
    """A network over a frozen layer that is the same in all trials."""

    def network(self, hp):
        base = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        nn.init.eye_(base.weight)
        nn.init.zeros_(base.bias)
        return nn.Sequential(base, *super().network(hp))


@pytest.mark.parametrize(("size", "num_padded"), [(2, 1), (1, 0)])
def test_a_wider_trial_that_comes_last(size, num_padded):
    backend = fused(in_double(OverABase), size=size)
    for slot, trial in enumerate(widths(12, 16)):
        backend.put(slot, trial.member)
    assert len(padded(backend)) == num_padded


def test_blocks_of_one_that_were_found_to_pay_best():
    """The options of a wider trial hold for narrower ones, which take as long."""
    backend = fused(in_double(Toy))
    wide, *narrow = (
        (backend.prepare(trial.member), trial.member.values) for trial in widths(16, 12, 12)
    )
    key = backend.blocks.key(*wide)
    backend.blocks.configure(key, BlockOptions(size=1))
    for slot, (trial, values) in enumerate((wide, *narrow)):
        assert backend.blocks.host(trial, values) == (key if slot else None)
        backend.place(slot, trial, values)
    assert not padded(backend)
    assert len(set(backend.blocks.home.values())) == 3
    backend.release(0)
    assert backend.blocks.host(*narrow[0]) is None, "no wider trial is in training"


class ShareOfLarge(Toy):
    """A metric over the width: padding has no large weights."""

    def metrics(self, model, batch):
        weights = next(model.parameters())
        return {**super().metrics(model, batch), "large": (weights.abs() > 0.6).double().mean()}


def test_metrics_over_widths_do_not_see_the_padding():
    task = in_double(ShareOfLarge)
    trials = widths(16, 12, 14, 16)
    assert num_blocks(task, trials) == 1
    check(task, trials)


@by_optimizer
@pytest.mark.parametrize("order", [(16, 12, 14, 12, 16, 13), (12, 16, 13, 14, 16, 12)])
def test_trials_of_other_widths_take_over_rows(name, order):
    optimizer, extra = OPTIMIZERS[name]
    trials = [
        Trial(
            config={"lr": RATES[k % len(RATES)], "width": width, **extra}, seed=k, epochs=2 + k % 3
        )
        for k, width in enumerate(order)
    ]
    check(in_double(Toy, optimizer=optimizer), trials, at_once=3, size=3)


class Large(Toy):
    dtype = torch.float32
    optimizer = AdamW(lr="lr")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at Linux's page tables")
def test_moments_of_narrower_trials_take_less_memory():
    """What lies outside of the narrower model is never written to."""
    if here().type != "cpu":
        pytest.skip("a GPU's rows are allocated as a whole")
    held = {}
    for width in (40_000, 24_000):
        backend = fused(Large())
        trials = widths(40_000, width)
        for slot, trial in enumerate(trials):
            backend.put(slot, trial.member)
        backend.step({
            slot: epoch_plan(backend, trial.timeline, epoch=0, slot=slot)
            for slot, trial in enumerate(trials)
        })
        (block,) = set(backend.blocks.home.values())
        held[width] = sum(map(bytes_held, block._state._moments.values()))
    # Adam has two moments of each number. The first layer has six in a row.
    assert held[24_000] < held[40_000] - 0.9 * 2 * 16_000 * 6 * 4


def bytes_held(tensor):
    """Return how much of a tensor's memory the system has given."""
    size = mmap.PAGESIZE
    first, last = tensor.data_ptr() // size, (tensor.data_ptr() + tensor.nbytes - 1) // size
    with pathlib.Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = array.array("Q", file.read(8 * (last + 1 - first)))
    return size * sum(entry >> 63 for entry in entries)


class NotingItsWidth(Toy):
    def model(self, hp):
        out = super().model(hp)
        out.until = hp.width  # code may read it at any step
        return out


def test_models_with_other_settings_have_blocks_of_their_own():
    assert num_blocks(in_double(NotingItsWidth), widths(16, 12, 16)) == 2


def test_a_much_narrower_model_has_a_block_of_its_own():
    task = in_double(Toy)
    trials = widths(64, 2)
    assert num_blocks(task, trials) == 2
    check(task, trials)


@pytest.mark.parametrize("toy", [Normed, BatchNormed])
def test_normalised_features_keep_widths_apart(toy):
    task = in_double(toy)
    trials = widths(16, 12, 16)
    assert num_blocks(task, trials) == 2
    check(task, trials)


class DroppingBefore(Toy):
    """A task whose masks have the width of the inputs, whatever the hidden layer's width."""

    def network(self, hp):
        return nn.Sequential(nn.Dropout(0.3), *super().network(hp))


class DroppingBetween(Toy):
    """A task whose masks have the width of the hidden layer."""

    def network(self, hp):
        first, activation, last = super().network(hp)
        return nn.Sequential(first, activation, nn.Dropout(0.3), last)


@pytest.mark.parametrize(
    ("toy", "num"),
    [(DroppingBefore, 1), (DroppingBetween, 2)],  # padded masks differ from solo ones
)
def test_widths_may_differ_where_masks_do_not(toy, num):
    task = in_double(toy)
    trials = widths(16, 12, 16, 12)
    assert num_blocks(task, trials) == num
    check(task, trials)


def test_dropout_may_follow_a_schedule_in_its_block():
    class Fading(Dropping):
        def adapt(self, model, hp):
            model[2].p = hp.dropout

    rates = [0.3, MultiStep([0.5, 0.1, 0.0], milestones=[1, 2]), 0.0, Step(0.9, [2])]
    trials = [
        Trial(config={"lr": 0.05, "dropout": rate}, seed=k, epochs=4)
        for k, rate in enumerate(rates)
    ]
    task = in_double(Fading)
    backend = check(task, trials)
    assert [len(blocks) for blocks in backend.blocks.by_key.values()] == [1]


class Sloping(Toy):
    def network(self, hp):
        return nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 1))

    def adapt(self, model, hp):
        model[1].negative_slope = hp.slope


@pytest.mark.parametrize("at_once", [2, 4])
def test_what_changes_the_computation_moves_to_another_block(at_once):
    slopes = [0.3, MultiStep([0.3, 0.1, 0.3], milestones=[1, 2]), 0.1, Step(0.1, [2])]
    trials = [
        Trial(config={"lr": 0.05, "slope": slope}, seed=k, epochs=4)
        for k, slope in enumerate(slopes)
    ]
    check(in_double(Sloping), trials, at_once=at_once)


class Weighted(Toy):
    """A task that stores its loss weight on itself."""

    def adapt(self, model, hp):
        self.weight = hp.weight

    def loss(self, model, batch):
        return super().loss(model, batch) * self.weight


def test_attributes_of_the_task_keep_trials_apart():
    trials = [Trial(config={"lr": 0.01, "weight": weight}) for weight in (1.0, 2.0)]
    check(in_double(Weighted), trials)


@pytest.mark.parametrize("at_once", [2, 3, 4])
def test_attributes_of_the_task_may_change(at_once):
    weights = [MultiStep([1.0, 2.0], milestones=[1]), 1.0, 1.0, Step(2.0, [2])]
    trials = [
        Trial(config={"lr": 0.01, "weight": weight}, seed=k, epochs=4)
        for k, weight in enumerate(weights)
    ]
    check(in_double(Weighted), trials, at_once=at_once)


# -- which trials are packed together ------------------------------------------------------


@st.composite
def crowds(draw):
    trials = [
        Trial(
            config={"lr": 0.05, "size": draw(st.sampled_from([4, 7, 8, 20]))},
            seed=draw(st.integers(0, 2)),
            epochs=draw(st.integers(1, 4)),
        )
        for _ in range(draw(st.integers(1, 7)))
    ]
    slots = draw(st.permutations(range(draw(st.integers(1, 5)))))
    return trials, slots, draw(st.integers(1, 4))


@given(crowds())
@few
def test_trials_that_come_and_go_equal_trials_alone(crowd):
    trials, slots, size = crowd
    task = in_double(Dropping, batch_size="size")
    found = together(fused(task, size=size), trials, slots=slots)
    wanted = alone(task, trials)
    for result in (*found, *wanted):
        for metrics in result.metrics:
            metrics.pop("train_loss")
    assert_same(found, wanted, tolerance=DOUBLE)


class Masks(Toy):
    """A task whose weight gradient is the mask alone: equal masks give bit-identical parameters."""

    def network(self, hp):
        return nn.Sequential(nn.Dropout(hp.dropout), nn.Linear(6, 1))

    def loss(self, model, batch):
        x, _ = batch
        return model(torch.ones_like(x)).sum() / 64


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.2, 0.5, 0.7])), min_size=1, max_size=6
    ),
    st.integers(1, 4),
    st.integers(1, 5),
)
@few
def test_masks_are_those_of_the_trial_alone_in_every_pack(neighbours, size, at_once):
    task = variant(Masks, optimizer=SGD(lr=0.5))
    trials = [
        Trial(config={"dropout": dropout}, seed=seed, epochs=1 + seed)
        for seed, dropout in neighbours
    ]
    found = together(fused(task, size=size), trials, at_once=at_once)
    for result, trial in zip(found, trials, strict=True):
        (by_itself,) = together(fused(task, size=1), [trial])
        assert_same([result], [by_itself])


def test_masks_are_those_of_plain_pytorch():
    task = variant(Masks, optimizer=SGD(lr=0.5))
    trials = [Trial(config={"dropout": 0.5}, seed=k, epochs=2) for k in range(3)]
    found, wanted = together(fused(task), trials), alone(task, trials)
    for one, other in zip(found, wanted, strict=True):
        for name in ("model.1.weight", "model.1.bias"):
            assert torch.equal(one.state.tensors[name], other.state.tensors[name])
    weights = [r.state.tensors["model.1.weight"] for r in wanted]
    assert not torch.equal(weights[0], weights[1])


def test_an_mlp_is_bit_identical_wherever_it_stands():
    task = Dropping()
    mine = Trial(config={"lr": 0.05}, seed=5, epochs=3)
    others = [Trial(config={"lr": 0.1, "dropout": 0.6}, seed=k, epochs=1 + k % 3) for k in range(4)]
    results = []
    for position in range(4):
        crowd = [*others[:position], mine, *others[position:]]
        results.append(together(fused(task, size=5), crowd)[position])
        results.append(together(fused(task, size=2), crowd, at_once=3)[position])
    (by_itself,) = together(fused(task, size=1), [mine])
    # On a GPU, the matrix product's kernel depends on the number of trials.
    tolerance = 0.0 if here().type == "cpu" else SINGLE
    for result in results:
        assert_same([result], [by_itself], tolerance=tolerance)


@pytest.mark.parametrize("toy", [Toy, Dropping])
def test_steps_as_a_compiled_graph_are_those_of_plain_calls(toy, monkeypatch):
    """The graph is run as it is: what a compiler makes of it is PyTorch's own affair."""
    graphs = []

    def kept_as_it_is(graph, **options):
        graphs.append(graph)
        assert options == {"fullgraph": True, "dynamic": False}
        return graph

    monkeypatch.setattr(torch, "compile", kept_as_it_is)
    task = in_double(toy)
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=4, compile=True))
    trials = [Trial(config={"lr": lr}, seed=k) for k, lr in enumerate([0.05, 0.01, 0.02])]
    found, wanted = together(backend, trials), alone(task, trials)
    assert graphs
    for result in (*found, *wanted):
        assert result.error is None
        for metrics in result.metrics:
            metrics.pop("train_loss")
    assert_same(found, wanted, tolerance=DOUBLE)


# -- errors and divergence -----------------------------------------------------------------


def test_divergence_is_that_of_one_trial():
    task = in_double(Dropping)
    trials = [Trial(config={"lr": lr}, seed=k) for k, lr in enumerate([0.05, 1e200, 0.02])]
    found, wanted = together(fused(task), trials), alone(task, trials)
    # The pack itself may have caused the divergence, so the trial is trained again alone.
    assert isinstance(found[1].error, UnverifiedError)
    assert not found[1].error.mismatch
    assert isinstance(wanted[1].error, DivergedError)
    loss = re.search("loss of epoch . is (inf|nan)", str(wanted[1].error))
    assert f"{loss.group()} in a pack" in str(found[1].error)
    for k in (0, 2):
        assert found[k].error is None
        assert_same_state(found[k].state, wanted[k].state, tolerance=DOUBLE)


def faults(*each):
    return [
        Trial(config={"lr": 0.05, "width": 4, "fault": fault}, seed=k, epochs=4)
        for k, fault in enumerate(each)
    ]


@pytest.mark.parametrize("at_once", [2, 4])
def test_an_error_in_the_code_of_one_trial(at_once):
    """The failing trial is not fused from that epoch on, and the others are unaffected."""
    trials = faults(MultiStep(["", "raise"], milestones=[1]), "", "", "")
    found = together(fused(FaultyTask()), trials, at_once=at_once)
    assert isinstance(found[0].error, UnfusableError)
    assert "the task's own error" in str(found[0].error)
    assert_same(found[1:], alone(FaultyTask(), trials)[1:], tolerance=SINGLE)


class Failing(Dataset):
    def __init__(self, at):
        self._at, self._num_read = at, 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self._num_read += 1
        if self._num_read == self._at:
            raise OSError("the data set's own error")
        return normal(6, seed=index), normal(1, seed=index)


def test_an_error_in_the_data_of_one_trial():
    class Task(Toy):
        def data(self, hp):
            return Failing(hp.at), Failing(0)

    trials = [Trial(config={"lr": 0.05, "at": at}) for at in (0, 45, -1)]
    found = together(fused(Task()), trials)
    assert [type(result.error) for result in found] == [type(None), OSError, type(None)]
    assert_same(found[::2], alone(Task(), trials[::2]), tolerance=SINGLE)


class Augmented(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return normal(6, seed=index) + 0.1 * torch.rand(6), normal(1, seed=index)


def test_data_that_draw_at_random():
    class Task(Toy):
        def data(self, hp):
            return Augmented(), TensorDataset(normal(4, 6), normal(4, 1))

    check(Task(), [Trial(config={"lr": 0.05}, seed=k) for k in range(3)], tolerance=SINGLE)


def test_an_error_in_the_metrics_of_one_trial():
    class Task(Toy):
        def metrics(self, model, batch):
            if model[0].weight.abs().max() > 2:
                raise OSError("the task's own error")
            return super().metrics(model, batch)

    trials = [Trial(config={"lr": lr}, seed=k) for k, lr in enumerate([0.05, 1.0, 0.05])]
    found = together(fused(Task()), trials)
    assert isinstance(found[1].error, OSError)
    assert_same(found[::2], alone(Task(), trials[::2]), tolerance=SINGLE)


@pytest.mark.parametrize("kind", ["item", "number"])
def test_metrics_that_cannot_be_fused_are_worked_out_one_by_one(kind):
    class Task(Toy):
        def metrics(self, model, batch):
            mse = super().metrics(model, batch)["mse"]
            return {"mse": mse.item() if kind == "item" else float(mse > 1)}

    check(Task(), [Trial(config={"lr": 0.05}, seed=k) for k in range(3)], tolerance=SINGLE)


# -- tasks that cannot be fused ------------------------------------------------------------


class Forward(nn.Module):
    """A linear layer with a custom forward pass."""

    def __init__(self, forward):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.calls = 0
        self._compute = forward

    def forward(self, x):
        return self._compute(self, x)


def counted(self, x):
    self.calls += 1
    return self.inner(x) * (1 + self.calls % 2)


def warming_up(self, x):
    """Compute a linear layer, but only for the first calls, so that a few steps do not show it."""
    self.calls += 1
    return self.inner(x) * (1.0 if self.calls < 20 else 0.5)


def branching(self, x):
    return self.inner(x) if self.inner(x).mean() > 0 else self.inner(2 * x)


def hooked():
    model = Forward(lambda self, x: self.inner(x))
    model.inner.register_forward_hook(lambda *_: None)
    return model


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 3, batch_first=True)

    def forward(self, x):
        return self.lstm(x.unsqueeze(1))[0].sum(2)


UNFUSABLE = {
    "another computation each time": (lambda: Forward(counted), "computing its loss changes"),
    "attributes": (lambda: Forward(warming_up), "computing its loss changes"),
    "branch": (lambda: Forward(branching), "reads the value of a tensor"),
    "hooks": (hooked, "hooks"),
    "lstm": (Recurrent, "recurrent layers.*nn.LSTM"),
    "python stream": (
        lambda: Forward(lambda self, x: self.inner(x) * random.random()),
        "Python's or NumPy's random stream",
    ),
    "torch stream": (
        lambda: Forward(lambda self, x: self.inner(x + torch.rand(6, device=x.device))),
        r"draws random numbers \(aten::rand\)",
    ),
    "torch stream, of a trial's shape": (
        lambda: Forward(lambda self, x: self.inner(x) + torch.randn_like(self.inner(x))),
        "randn_like: it draws random numbers, and in a fused step only dropout may",
    ),
    "sparse": (
        lambda: Forward(
            lambda self, x: torch.sparse.mm(
                torch.eye(len(x), device=x.device).to_sparse(), self.inner(x)
            )
        ),
        "dry run failed with NotImplementedError",
    ),
}


def task_with(make, **attributes):
    class Task(Toy):
        def network(self, hp):
            return make()

    return variant(Task, **attributes)


def refuses(task, message):
    with pytest.raises(UnfusableError, match=message) as caught:
        fused(task).put(0, Trial(config={"lr": 0.05}).member)
    assert len(str(caught.value)) > 10
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", UNFUSABLE)
def test_models_that_cannot_be_fused(kind):
    make, message = UNFUSABLE[kind]
    refuses(task_with(make), message)


def test_a_loss_that_reads_a_value():
    class Task(Toy):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return loss * min(1.0, loss.item())

    refuses(Task(), r"reads the value of a tensor \(.?item")


def test_a_loss_for_each_row():
    class Task(Toy):
        def loss(self, model, batch):
            return super().loss(model, batch).expand(8)

    refuses(Task(), "only for scalar outputs")


def test_nothing_to_train():
    class Task(Toy):
        def loss(self, model, batch):
            return super().loss(model, batch) + torch.zeros(1, requires_grad=True).sum()

        def model(self, hp):
            return super().model(hp).requires_grad_(False)

    refuses(Task(), "nothing in it is trained")


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Optimizer(torch.optim.Adadelta, lr="lr"), "no optimizer over rows for Adadelta"),
        (SGD(lr="lr", maximize=True), "maximize=True.*not offered"),
        (Adam(lr="lr", amsgrad=True), "amsgrad=True.*not offered"),
        (RMSprop(lr="lr", centered=True), "centered=True.*not offered"),
        (Adam(lr=torch.tensor(0.1)), "lr=.*is a tensor"),
    ],
    ids=["adadelta", "maximize", "amsgrad", "centered", "tensor"],
)
def test_optimizers_that_are_not_offered(optimizer, message):
    refuses(variant(Toy, optimizer=optimizer), message)


def test_options_that_only_choose_an_implementation_do_not_matter():
    task = in_double(Toy, optimizer=SGD(lr="lr", momentum=0.9, foreach=False))
    check(task, [Trial(config={"lr": 0.05}, seed=k) for k in range(2)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda x, y: {"x": x, "y": 3}, "not a tensor of rows"),
        (lambda x, y: {"x": x, "y": y[:-1]}, "differ in length"),
    ],
    ids=["number", "lengths"],
)
def test_batches_that_are_no_rows(rows, message):
    with pytest.raises(UnfusableError, match=message):
        dry_run(Toy(), Toy().network({}), rows(normal(8, 6), normal(8, 1)))


def test_the_number_of_steps_is_known():
    backend = fused(Toy())
    backend.put(3, Trial(config={"lr": 0.1}).member)
    assert backend.num_steps(3, {"lr": 0.1}) == math.ceil(20 / 8)


def test_the_model_in_a_slot_can_be_used_at_any_time():
    task = Dropping()
    backend = fused(task)
    backend.put(0, Trial(config={"lr": 0.05}).member)
    model = backend.model(0)
    x = normal(3, 6).to(here())
    with torch.no_grad():
        before = model.eval()(x)
    backend.start({0: EpochPlan(epoch=0, values={"lr": 0.05})})
    backend.one_step()
    with torch.no_grad():
        after = backend.model(0).eval()(x)
    assert backend.model(0) is model
    assert not torch.equal(before, after)
    backend.release(0)
    with torch.no_grad():
        assert torch.equal(model(x), after)
    F.mse_loss(model(x), torch.ones(3, 1, device=here())).backward()
    assert model[0].weight.grad is not None
