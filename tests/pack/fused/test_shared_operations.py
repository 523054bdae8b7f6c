"""Trials over one frozen trunk that are checked alone compute its operations once."""

from __future__ import annotations

import logging
import weakref
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.pack import FusedBackend
from thrifty.pack._frozen import CAN_SHARE, FrozenTensors
from thrifty.pack.fused import _block, _checking, _evaluation, _row_state
from thrifty.pack.fused._activations import ActivationStore
from thrifty.pack.fused._shared_operations import SharedOperations
from thrifty.pack.fused._step import BlockOptions
from thrifty.pack.fused._tape import BufferPool
from thrifty.pack.verify import CheckBudget


pytestmark = pytest.mark.skipif(not CAN_SHARE, reason="this PyTorch has no lazy clones")

CPU = torch.device("cpu")


class Net(nn.Module):
    """A frozen trunk and a trained head."""

    def __init__(self, trunk: nn.Module, *, seed: int = 0) -> None:
        super().__init__()
        self.trunk = trunk.requires_grad_(False)
        self.head = nn.Linear(8, 3)
        with torch.no_grad():
            self.head.weight.copy_(normal(3, 8, seed=seed))

    def forward(self, x):
        return self.head(self.trunk(x))


def several(trunk, *, num=4):
    """Return models with equal trunks, which share their memory, and other heads."""
    frozen = FrozenTensors()
    models = [Net(deepcopy(trunk), seed=seed) for seed in range(num)]
    kept = [frozen.adopt(model) for model in models]
    assert all(kept)
    return models, kept


def outputs(models, batches, *, operations=None):
    found = []
    for model, batch in zip(models, batches, strict=True):
        if operations is None:
            found.append(model(batch))
            continue
        (lent,) = operations.lend([batch])
        with operations:
            found.append(model(lent))
    return found


def check(trunk, *, num_shared, batch=None, num=4, grad=False):
    """Compare models in turn with models that share nothing; count what was shared."""
    batch = normal(5, 6) if batch is None else batch
    models, _kept = several(trunk, num=num)
    torch.manual_seed(0)
    operations = SharedOperations(CPU)
    with torch.set_grad_enabled(grad):
        wanted = outputs(deepcopy(models), [batch.clone() for _ in models])
        torch.manual_seed(0)
        found = outputs(models, [batch.clone() for _ in models], operations=operations)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
        if grad:
            one.sum().backward()
    assert operations.num_shared == num_shared
    return models, operations


def layers(*between):
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 8))


@pytest.mark.parametrize("grad", [False, True])
def test_a_frozen_trunk_is_computed_once(grad):
    models, _ = check(layers(nn.Tanh()), num_shared=3 * 3, grad=grad)
    if grad:
        assert all(model.head.weight.grad is not None for model in models)
        assert all(model.trunk[0].weight.grad is None for model in models)


@pytest.mark.parametrize(
    "layer", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.LayerNorm(8), nn.Softmax(1)]
)
def test_layers_of_common_trunks_are_shared(layer):
    check(layers(layer), num_shared=3 * 3)


def test_convolutions_and_frozen_statistics_are_shared():
    trunk = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 8)
    ).eval()
    check(trunk, num_shared=3 * 4, batch=normal(5, 1, 4, 4))


def test_batch_statistics_are_each_trials_own():
    # the first layer, and the count of batches, which begins equal
    models, _ = check(layers(nn.BatchNorm1d(8)), num_shared=3 * 2)
    for model in models:
        assert model.trunk[1].num_batches_tracked == 1
        assert model.trunk[1].running_mean.abs().sum() > 0


def test_random_draws_are_each_trials_own():
    check(layers(nn.Dropout(0.5)), num_shared=3)


class WritesThroughNumpy(nn.Module):
    def forward(self, x):
        x.detach().numpy()[0] += 1
        return x


class WritesInPlace(nn.Module):
    def forward(self, x):
        x.data.mul_(2)
        x[0] = 7
        return x


class Remembers(nn.Module):
    """Keeps what it was given, as a memory bank does."""

    def forward(self, x):
        self.seen = x
        return x.clone().relu_() + x


def test_what_code_writes_through_numpy_is_its_own():
    check(layers(WritesThroughNumpy()), num_shared=3)


def test_what_code_writes_in_place_is_its_own():
    models, _ = several(layers(WritesInPlace()))
    batch = normal(5, 6)
    wanted = [model(batch) for model in deepcopy(models)]
    found = outputs(models, [batch.clone() for _ in models], operations=SharedOperations(CPU))
    assert all(map(torch.equal, found, wanted))


def test_a_later_trial_does_not_change_what_an_earlier_one_remembers():
    models, _ = check(nn.Sequential(nn.Linear(6, 8), Remembers()), num_shared=3 * 4)
    first = models[0].trunk[1].seen.clone()
    models[1].trunk[1].seen.zero_()
    assert torch.equal(models[0].trunk[1].seen, first)
    assert torch.equal(models[2].trunk[1].seen, first)


class Counts(nn.Module):
    """Runs code that knows how often it has run."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_each_trial_runs_all_of_its_own_code():
    models, _ = several(layers(Counts()))
    models[2].trunk[1].calls = 5
    batch = normal(5, 6)
    wanted = outputs(deepcopy(models), [batch.clone() for _ in models])
    found = outputs(models, [batch.clone() for _ in models], operations=SharedOperations(CPU))
    assert all(map(torch.equal, found, wanted))
    assert [model.trunk[1].calls for model in models] == [1, 1, 6, 1]


def test_a_trial_whose_batch_differs_by_a_sign_of_zero_shares_nothing():
    models, _ = several(layers(), num=2)
    batches = [torch.zeros(5, 6), -torch.zeros(5, 6)]
    operations = SharedOperations(CPU)
    found = outputs(models, batches, operations=operations)
    assert all(map(torch.equal, found, outputs(models, batches)))
    assert not operations.num_shared


def test_a_trial_with_other_frozen_values_shares_what_comes_before_them():
    models, _ = several(layers(), num=2)
    with torch.no_grad():
        models[1].trunk[1].weight.mul_(2)
    batch = normal(5, 6)
    operations = SharedOperations(CPU)
    found = outputs(models, [batch.clone(), batch.clone()], operations=operations)
    assert all(map(torch.equal, found, outputs(models, [batch, batch])))
    assert operations.num_shared == 1  # the first layer


def test_settings_of_torch_are_compared():
    models, _ = several(nn.Sequential(nn.Linear(6, 8)), num=2)
    operations = SharedOperations(CPU)
    before = torch.get_float32_matmul_precision()
    try:
        for model, precision in zip(models, ("highest", "medium"), strict=True):
            torch.set_float32_matmul_precision(precision)
            outputs([model], [normal(5, 6).float()], operations=operations)
    finally:
        torch.set_float32_matmul_precision(before)
    assert not operations.num_shared


def test_no_more_is_kept_than_memory_allows(monkeypatch):
    monkeypatch.setattr("thrifty.pack.fused._shared_operations.MEMORY_SHARE", 0.0)
    check(layers(nn.Tanh()), num_shared=0)


# -- trials of a block ---------------------------------------------------------------------


class Headed(Toy):
    dtype = torch.float64

    def network(self, hp):
        trunk = nn.Sequential(nn.Linear(6, 160), nn.Tanh(), nn.Linear(160, 8))
        for n, parameter in enumerate(trunk.parameters()):
            parameter.data = 0.1 * normal(*parameter.shape, seed=n)
        net = Net(trunk)
        net.head = nn.Linear(8, 1)
        return net


RATES = tuple(Trial(config={"lr": 0.01 * n}) for n in range(1, 7))


def packed(task=None):
    store = ActivationStore(limit_bytes=10**6)
    return together(FusedBackend(task or Headed(), device=here(), activations=store), RATES)


@pytest.fixture
def shared(monkeypatch):
    """The numbers of operations that were shared, by each user of them."""
    found: list[SharedOperations] = []

    class Noted(SharedOperations):
        def __init__(self, device):
            super().__init__(device)
            found.append(self)

    monkeypatch.setattr(_block, "SharedOperations", Noted)
    monkeypatch.setattr(_evaluation, "SharedOperations", Noted)
    return found


@pytest.mark.slow
def test_checks_of_a_block_share_the_trunk_and_results_are_those_alone(shared):
    assert_same(packed(), alone(Headed(), RATES), tolerance=1e-10)
    assert sum(each.num_shared for each in shared) > 0


@pytest.fixture
def by_themselves(monkeypatch):
    """The trials that were evaluated alone and not in turn, where checks cost nothing."""
    found = []
    evaluate = _evaluation.Evaluation._alone

    def noted(self, trial):
        found.append(trial)
        return evaluate(self, trial)

    monkeypatch.setattr(_evaluation.Evaluation, "_alone", noted)
    monkeypatch.setattr(
        _evaluation.Evaluation, "_is_due", lambda _, trial: not trial.is_evaluation_verified
    )
    return found


IN_THREES = [replace(trial, epochs=1) for trial in [*RATES, *RATES[:3]]]


def packed_in_threes(task=None):
    store = ActivationStore(limit_bytes=10**6)
    options = BlockOptions(size=3)
    backend = FusedBackend(task or Headed(), device=here(), activations=store, block=options)
    return together(backend, IN_THREES)


@pytest.mark.slow
@pytest.mark.parametrize(("is_affordable", "num"), [(False, 1), (True, 3)])
def test_turns_are_compared_in_the_first_block_and_later_as_often_as_is_affordable(
    monkeypatch, by_themselves, is_affordable, num
):
    monkeypatch.setattr(CheckBudget, "allows", lambda *_: is_affordable)
    assert_same(packed_in_threes(), alone(Headed(), IN_THREES), tolerance=1e-10)
    assert len(by_themselves) == num


SCALE = {"by": 1.0}


class Scaled(Headed):
    """Reads a global dict in its metrics."""

    def metrics(self, model, batch):
        return {name: SCALE["by"] * value for name, value in super().metrics(model, batch).items()}


@pytest.mark.slow
def test_turns_in_which_a_value_changes_do_not_count(monkeypatch, by_themselves, caplog):
    caplog.set_level(logging.INFO, "thrifty")
    monkeypatch.setattr(CheckBudget, "allows", lambda *_: False)
    monkeypatch.setitem(SCALE, "by", 1.0)
    in_turn, num_turns = _evaluation.evaluate_in_turn, []

    def changing(trials):
        found = in_turn(trials)
        num_turns.append(trials)
        if len(num_turns) == 2:
            SCALE["by"] = 2.0
        return found

    monkeypatch.setattr(_evaluation, "evaluate_in_turn", changing)
    packed_in_threes(Scaled())
    assert "one after the other" in caplog.text
    assert len(by_themselves) >= 1 + 3


@pytest.mark.slow
@pytest.mark.parametrize(("keeps_trunk", "num_kept"), [(True, 1), (False, 0)])
def test_steps_alone_are_freed_before_the_next_trial_takes_one(monkeypatch, keeps_trunk, num_kept):
    taken, alive = [], []
    step_alone = _checking.step_alone

    def noted(*args, **options):
        alive.append(sum(loss() is not None for loss in taken))
        step = step_alone(*args, **options)
        taken.append(weakref.ref(step.loss))
        return step

    monkeypatch.setattr(_checking, "step_alone", noted)
    store = ActivationStore(limit_bytes=10**6 * keeps_trunk)
    together(FusedBackend(Headed(), device=here(), activations=store), RATES)
    assert len(taken) > len(RATES)
    assert max(alive) == num_kept


@pytest.mark.slow
def test_copies_of_states_are_freed_before_buffers_have_memory_again(monkeypatch):
    copies, left = [], []
    copied, give_memory = _row_state.RowState.copied_tensors, BufferPool._give_memory

    def noted(*args):
        tensors = copied(*args)
        copies.append(weakref.ref(next(iter(tensors.values()))))
        return tensors

    def counted(*args):
        left.append(sum(copy() is not None for copy in copies))
        return give_memory(*args)

    monkeypatch.setattr(_row_state.RowState, "copied_tensors", noted)
    monkeypatch.setattr(BufferPool, "_give_memory", counted)
    packed()
    assert len(copies) > len(RATES)
    assert set(left) == {0}


@pytest.mark.slow
def test_moments_are_copied_when_activations_are_no_longer_needed(monkeypatch):
    """A step needs most memory for its activations; then there are no copies beside them."""
    copies, left = [], []
    copied, gradients = _row_state.RowState.copied_moments, _block.Block._gradients

    def noted(*args):
        moments = copied(*args)
        copies.extend(weakref.ref(each["momentum_buffer"]) for each in moments.values())
        return moments

    def counted(*args):
        left.append(sum(copy() is not None for copy in copies))
        return gradients(*args)

    monkeypatch.setattr(_row_state.RowState, "copied_moments", noted)
    monkeypatch.setattr(_block.Block, "_gradients", counted)
    packed()
    assert copies
    assert set(left) == {0}


@pytest.mark.slow
def test_trials_that_differ_in_turn_are_checked_by_themselves(monkeypatch, shared, caplog):
    caplog.set_level(logging.INFO, "thrifty")
    lend = SharedOperations.lend
    monkeypatch.setattr(
        SharedOperations,
        "lend",
        lambda self, tensors: [each + 1e-12 for each in lend(self, tensors)],
    )
    assert_same(packed(), alone(Headed(), RATES), tolerance=1e-10)
    assert "without sharing operations" in caplog.text
    assert "one after the other" in caplog.text


SEEN: list[int] = []


class Noting(Headed):
    """Notes each batch in a global variable."""

    def metrics(self, model, batch):
        SEEN.append(len(batch[0]))
        return super().metrics(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "takes_turns"), [(Headed(), True), (Noting(), False)])
def test_metrics_that_change_what_other_trials_see_take_no_turns(monkeypatch, task, takes_turns):
    turns = []

    def noted(trials):
        turns.append(trials)
        return {}

    monkeypatch.setattr(_evaluation, "evaluate_in_turn", noted)
    packed(task)
    assert bool(turns) is takes_turns


@pytest.mark.slow
def test_operations_that_cannot_be_shared_are_computed(monkeypatch):
    def fail(*_):
        raise RuntimeError("not with shared memory")

    monkeypatch.setattr(SharedOperations, "__torch_dispatch__", fail)
    assert_same(packed(), alone(Headed(), RATES), tolerance=1e-10)
