"""``thrifty.pack(models, ...)`` equals the loop that one would write for a single model."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th
from tests.devices import here
from tests.pack._faults import wrong_from
from tests.pack._toys import Attending, BatchNormed, Dropping, Images, Toy, normal
from thrifty.core import UsageError, derive_seed, step_seed
from thrifty.pack.fused._block import Block
from thrifty.pack.fused._fusable import RULES


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def mlps(num, *, rates=(0.0,)):
    torch.default_generator.manual_seed(0)
    return [
        nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Dropout(rates[k % len(rates)]), nn.Linear(8, 1)
        )
        for k in range(num)
    ]


def batch(seed, *, rows=8):
    x = normal(rows, 6, seed=seed)
    return x, x.sin().sum(1, keepdim=True)


def plain(models, steps, *, optimizer, values, seeds=None, loss=loss):
    """Train each model by itself; ``steps`` holds batches and values for each step."""
    models = copy.deepcopy(models)
    losses = []
    for k, model in enumerate(models):
        seed = k if seeds is None else seeds[k]
        spec = optimizer.build(model.parameters(), values[k])
        mine = []
        for number, (each, now) in enumerate(steps):
            spec.param_groups[0].update(optimizer.resolve(now[k]))
            model.train()
            torch.default_generator.manual_seed(step_seed(derive_seed(seed, "pack"), number))
            spec.zero_grad()
            value = loss(model, each[k])
            value.backward()
            limit = optimizer.clipping(now[k]).norm
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            spec.step()
            mine.append(value.detach())
        losses.append(torch.stack(mine))
    return models, torch.stack(losses, 1)


def assert_same(models, others, *, tolerance=1e-5):
    for model, other in zip(models, others, strict=True):
        mine, wanted = model.state_dict(), other.state_dict()
        assert mine.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.allclose(mine[name], tensor, rtol=tolerance, atol=tolerance), name


OPTIMIZERS = {
    "sgd": th.SGD(lr="lr", momentum=0.9, clip_norm=1.0),
    "adam": th.Adam(lr="lr", eps=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shared", [True, False], ids=["one batch", "own batches"])
def test_it_is_the_plain_loop(name, shared):
    optimizer, models = OPTIMIZERS[name], mlps(3, rates=(0.3, 0.0, 0.5))
    values = [{"lr": 0.05 / (k + 1)} for k in range(3)]
    steps = [([batch(s if shared else 10 * s + k) for k in range(3)], values) for s in range(4)]
    wanted, wanted_losses = plain(models, steps, optimizer=optimizer, values=values)
    packed = th.pack(models, loss=loss, optimizer=optimizer, values=values)
    assert packed.fused is None
    losses = [packed.step(each[0]) if shared else packed.step(batches=each) for each, _ in steps]
    assert packed.fused is True
    assert torch.allclose(torch.stack(losses), wanted_losses, rtol=1e-5, atol=1e-6)
    assert_same(models, wanted)


def test_batches_of_different_lengths():
    optimizer, models, values = OPTIMIZERS["sgd"], mlps(3, rates=(0.3,)), [{"lr": 0.05}] * 3
    lengths = [(8, 5, 8), (3, 3, 3), (2, 8, 4)]
    steps = [
        ([batch(10 * s + k, rows=rows) for k, rows in enumerate(each)], values)
        for s, each in enumerate(lengths)
    ]
    wanted, _ = plain(models, steps, optimizer=optimizer, values=values)
    packed = th.pack(models, loss=loss, optimizer=optimizer, values=values)
    for each, _ in steps:
        packed.step(batches=each)
    assert packed.fused is True
    assert_same(models, wanted)


def test_values_may_change_between_steps():
    optimizer, models = OPTIMIZERS["sgd"], mlps(2)
    moving = [[{"lr": 0.1 / (s + 1)}, {"lr": 0.02 * s}] for s in range(4)]
    steps = [([batch(s)] * 2, now) for s, now in enumerate(moving)]
    wanted, _ = plain(models, steps, optimizer=optimizer, values=moving[0])
    packed = th.pack(models, loss=loss, optimizer=optimizer, values=moving[0])
    for each, now in steps:
        for k in range(2):
            packed.values[k]["lr"] = now[k]["lr"]
        packed.step(each[0])
    assert_same(models, wanted)


def test_the_callers_values_are_left_alone():
    values = [{"lr": 0.1}]
    packed = th.pack(mlps(1), loss=loss, optimizer=OPTIMIZERS["sgd"], values=values)
    packed.values[0]["lr"] = 0.5
    assert values == [{"lr": 0.1}]


@pytest.mark.parametrize("seeds", [[5, 5], [5, 6]])
def test_equal_seeds_draw_equal_masks(seeds):
    first = mlps(1, rates=(0.5,))[0]
    models = [first, copy.deepcopy(first)]
    packed = th.pack(models, loss=loss, optimizer=th.SGD(lr=0.1), seeds=seeds)
    for s in range(3):
        packed.step(batch(s))
    same = torch.equal(models[0][0].weight, models[1][0].weight)
    assert same == (seeds[0] == seeds[1])


def test_the_callers_random_streams_are_left_alone():
    packed = th.pack(mlps(2, rates=(0.5,)), loss=loss, optimizer=th.SGD(lr=0.1))
    torch.default_generator.manual_seed(3)
    before = torch.get_rng_state()
    packed.step(batch(0))
    packed.step(batch(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dropout_rate_may_change_between_steps():
    models, optimizer = mlps(2, rates=(0.0,)), th.SGD(lr=0.1)
    packed = th.pack(models, loss=loss, optimizer=optimizer)
    packed.step(batch(0))
    before = models[0][0].weight.clone()
    for model in models:
        model[2].p = 1.0
    packed.step(batch(1))
    assert torch.equal(models[0][0].weight, before)  # its whole hidden layer is dropped


@pytest.mark.parametrize("toy", [Images, BatchNormed, Attending, Dropping])
def test_other_models(toy):
    task = toy()
    torch.default_generator.manual_seed(0)
    models = [task.network({}) for _ in range(2)]
    arrays = task.data({}).train
    each = tuple(t[:8] for t in arrays)
    optimizer, values = th.SGD(lr=0.02), [{}, {}]
    steps = [([each] * 2, values)] * 3
    wanted, _ = plain(models, steps, optimizer=optimizer, values=values, loss=task.loss)
    packed = th.pack(models, loss=task.loss, optimizer=optimizer)
    for _ in range(3):
        packed.step(each)
    assert packed.fused is True
    assert_same(models, wanted)


def test_models_can_be_used_between_steps():
    models = mlps(2, rates=(0.2,))
    names = list(models[0].state_dict())
    packed = th.pack(models, loss=loss, optimizer=th.SGD(lr=0.1))
    assert list(packed) == models
    assert len(packed) == 2
    x, _ = batch(9)
    seen = []
    for s in range(3):
        packed.step(batch(s))
        with torch.no_grad():
            seen.append(models[0].eval()(x).clone())
    assert not torch.equal(seen[0], seen[1])
    state = models[1].state_dict()
    assert list(state) == names
    fresh = mlps(1)[0]
    fresh.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(fresh.eval()(x), models[1].eval()(x))


def test_weights_may_be_set_between_steps():
    models = mlps(2)
    packed = th.pack(models, loss=loss, optimizer=th.SGD(lr=0.1))
    packed.step(batch(0))
    fresh = mlps(4)[3]
    models[0].load_state_dict(fresh.state_dict())
    packed.step(batch(1))
    wanted, _ = plain([fresh], [([batch(1)], [{}])], optimizer=th.SGD(lr=0.1), values=[{}])
    assert_same(models[:1], wanted)


# -- models that cannot be fused -----------------------------------------------------------


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.inner(self.dropout(x)) * min(1.0, x.abs().max().item())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: [*mlps(1), nn.Linear(6, 1)], "differ in structure"),
        (lambda: [Reading(), Reading()], "reads the value"),
    ],
    ids=["structures", "item"],
)
def test_otherwise_they_are_trained_in_turn(make, reason, caplog):
    models, values = make(), [{"lr": 0.05}, {"lr": 0.01}]
    steps = [([batch(s)] * 2, values) for s in range(3)]
    wanted, losses = plain(models, steps, optimizer=OPTIMIZERS["sgd"], values=values)
    packed = th.pack(models, loss=loss, optimizer=OPTIMIZERS["sgd"], values=values)
    found = torch.stack([packed.step(each[0]) for each, _ in steps])
    assert packed.fused is False
    (record,) = caplog.records
    assert "in turn" in record.getMessage()
    assert reason in record.getMessage()
    assert torch.equal(found, losses)
    assert_same(models, wanted, tolerance=0)


def test_optimizers_of_different_kinds_are_trained_in_turn(caplog):
    values = [{"m": 0.0}, {"m": 0.9}]
    models, optimizer = mlps(2), th.SGD(lr=0.05, momentum="m")
    steps = [([batch(s)] * 2, values) for s in range(3)]
    wanted, _ = plain(models, steps, optimizer=optimizer, values=values)
    packed = th.pack(models, loss=loss, optimizer=optimizer, values=values)
    for each, _ in steps:
        packed.step(each[0])
    assert packed.fused is False
    assert "optimizers differ in kind" in caplog.text
    assert_same(models, wanted, tolerance=0)


# -- checks --------------------------------------------------------------------------------


def test_a_wrong_first_step_is_undone_and_they_are_trained_in_turn(monkeypatch, caplog):
    number = wrong_from(monkeypatch, 0)
    models, values = mlps(3), [{"lr": 0.05}] * 3
    steps = [([batch(s)] * 3, values) for s in range(3)]
    wanted, losses = plain(models, steps, optimizer=OPTIMIZERS["adam"], values=values)
    packed = th.pack(models, loss=loss, optimizer=OPTIMIZERS["adam"], values=values)
    found = torch.stack([packed.step(each[0]) for each, _ in steps])
    assert number == [1], "it was fused once"
    assert packed.fused is False
    assert "differs by" in caplog.text
    assert torch.equal(found, losses)
    assert_same(models, wanted, tolerance=0)


def test_an_error_in_the_first_step_is_met_in_turn(monkeypatch, caplog):
    def broken(self, **_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Block, "one_step", broken)
    models, values = mlps(2), [{"lr": 0.05}] * 2
    steps = [([batch(s)] * 2, values) for s in range(2)]
    wanted, _ = plain(models, steps, optimizer=OPTIMIZERS["sgd"], values=values)
    packed = th.pack(models, loss=loss, optimizer=OPTIMIZERS["sgd"], values=values)
    for each, _ in steps:
        packed.step(each[0])
    assert packed.fused is False
    assert "no such kernel" in caplog.text
    assert_same(models, wanted, tolerance=0)


def test_a_later_wrong_step_is_told(monkeypatch):
    """Whichever step is checked next, the message names a step before which all was right."""
    wrong_from(monkeypatch, 3)
    packed = th.pack(
        mlps(2), loss=loss, optimizer=OPTIMIZERS["sgd"], values=[{"lr": 1e-4}, {"lr": 2e-4}]
    )

    def many_steps():
        for number in range(5_000):
            packed.step(batch(number % 7))

    with pytest.raises(th.PackMismatchError) as error:
        many_steps()
    first = int(re.search(r"not verified is step (\d+)", str(error.value)).group(1))
    assert 1 <= first <= 3


@pytest.mark.parametrize("at", [2, 13], ids=["early", "at an unchecked step"])
@pytest.mark.parametrize("what", ["closure", "list", "global", "child", "frozen"])
def test_what_changes_between_steps_is_recorded_anew(what, at, monkeypatch):
    factor, factors = 1.0, [1.0]

    def scaled(model, batch):
        return factor * factors[0] * SCALE * loss(model, batch)

    optimizer, models, values = th.SGD(lr="lr"), mlps(2), [{"lr": 0.05}] * 2
    wanted = copy.deepcopy(models)
    packed = th.pack(models, loss=scaled, optimizer=optimizer, values=values)
    twin = th.pack(wanted, loss=scaled, optimizer=optimizer, values=values)
    twin.fused = False
    for number in range(at + 2):
        if number == at:
            if what == "closure":
                factor = 3.0
            elif what == "list":
                factors[0] = 3.0
            elif what == "global":
                monkeypatch.setitem(globals(), "SCALE", 3.0)
            for model in [*models, *wanted]:
                if what == "child":
                    model[1] = nn.ReLU()
                elif what == "frozen":
                    model[0].weight.requires_grad_(False)
        packed.step(batch(number))
        twin.step(batch(number))
        assert packed.fused is True
        assert twin.fused is False
        assert_same(models, wanted)


SCALE = 1.0


# -- errors --------------------------------------------------------------------------------


def test_no_models():
    with pytest.raises(UsageError, match="at least one model"):
        th.pack([], loss=loss, optimizer=th.SGD(lr=0.1))


@pytest.mark.parametrize("what", ["values", "seeds"])
def test_not_one_for_each_model(what):
    given = {"values": [{}], "seeds": [1]}[what]
    with pytest.raises(UsageError, match=f"2 models and 1 {what}; give one for each"):
        th.pack(mlps(2), loss=loss, optimizer=th.SGD(lr=0.1), **{what: given})


def test_steps_without_batches():
    packed = th.pack(mlps(2), loss=loss, optimizer=th.SGD(lr=0.1))
    with pytest.raises(UsageError, match="takes a batch for all, or"):
        packed.step()
    with pytest.raises(UsageError, match="takes a batch for all, or"):
        packed.step(batch(0), batches=[batch(0)] * 2)
    with pytest.raises(UsageError, match="2 models and 3 batches"):
        packed.step(batches=[batch(0)] * 3)


def test_a_hyper_parameter_that_is_not_there():
    with pytest.raises(th.TaskError, match="follows hyper-parameter 'lr'"):
        th.pack(mlps(1), loss=loss, optimizer=th.SGD(lr="lr"))


# -- the package ---------------------------------------------------------------------------


def test_the_package_is_a_function_and_a_package():
    assert callable(th.pack)
    assert callable(th.pack.register_rule)
    assert th.pack.pack is not None
    assert isinstance(th.pack(mlps(1), loss=loss, optimizer=th.SGD(lr=0.1)), th.pack.Pack)


def cube(x):
    """Return the cube, as a function that torch does not know."""
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(cube, (x,), x)
    return _plain_cube(x)


def _plain_cube(x):
    return torch.from_numpy(x.detach().cpu().numpy() ** 3).to(x.device) + 0 * x


class Cubed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, x):
        return self.inner(cube(x))


def test_a_rule_for_a_function_of_ones_own(monkeypatch):
    models, used = [Cubed(), Cubed()], []
    values, optimizer = [{}, {}], th.SGD(lr=0.01)
    steps = [([batch(10 * s + k) for k in range(2)], values) for s in range(3)]
    wanted, _ = plain(models, steps, optimizer=optimizer, values=values)

    @th.pack.register_rule(cube)
    def rule(group, x):
        used.append(group.size)
        return group.pack(group.first(x) ** 3)

    try:
        packed = th.pack(models, loss=loss, optimizer=optimizer)
        for each, _ in steps:
            packed.step(batches=each)
    finally:
        del RULES[cube]
    assert packed.fused is True
    assert used
    assert_same(models, wanted)


def test_without_the_rule_it_is_not_fused(caplog):
    packed = th.pack([Cubed(), Cubed()], loss=loss, optimizer=th.SGD(lr=0.01))
    packed.step(batches=[batch(0), batch(1)])
    assert packed.fused is False
    assert "not fused" in caplog.text


def test_a_rule_that_refuses():
    @th.pack.register_rule(cube)
    def rule(group, x):
        raise th.pack.UnfusableError("cubes cannot be packed")

    task = type("Task", (Toy,), {"network": lambda self, hp: Cubed()})()
    backend = th.pack.FusedBackend(task, device=here())
    try:
        with pytest.raises(th.pack.UnfusableError, match="cubes cannot be packed"):
            backend.put(0, th.pack.Member(values={"lr": 0.1}, seed=0))
    finally:
        del RULES[cube]
