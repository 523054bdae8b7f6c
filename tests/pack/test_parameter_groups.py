"""Parameter groups give the same result in every back-end and in a plain PyTorch loop."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th
from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import TOYS, Frozen, Toy, normal
from thrifty.core import TaskError, derive_seed, step_seed
from thrifty.pack import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    BlockOptions,
    ConcatenatedBackend,
    FusedBackend,
    Optimizer,
    RMSprop,
    SoloBackend,
    epoch_order,
    times,
    unpack_state,
)
from thrifty.space import Cosine, Linear, MultiStep, Warmup


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


DOUBLE = 1e-10
GROUPS = {"*.bias": {"weight_decay": 0}, "0.*": {"lr": times("lr", 0.1)}}
OPTIMIZERS = {
    "sgd": lambda **more: SGD(lr="lr", weight_decay="wd", **more),
    "momentum": lambda **more: SGD(lr="lr", momentum="m", weight_decay="wd", **more),
    "nesterov": lambda **more: SGD(lr="lr", momentum="m", nesterov=True, weight_decay="wd", **more),
    "adam": lambda **more: Adam(lr="lr", weight_decay="wd", **more),
    "adamw": lambda **more: AdamW(lr="lr", weight_decay="wd", **more),
    "rmsprop": lambda **more: RMSprop(lr="lr", momentum="m", weight_decay="wd", **more),
    "adagrad": lambda **more: Adagrad(lr="lr", lr_decay=0.01, weight_decay="wd", **more),
}


def variant(base=Toy, **attributes):
    return type(base.__name__, (base,), attributes)()


def in_double(optimizer, base=Toy):
    return variant(base, dtype=torch.float64, optimizer=optimizer)


def config(k=0, **more):
    lr = Warmup(1, Cosine(0.02 * (k + 1))) if k % 2 else Cosine(0.02 * (k + 1))
    return {"lr": lr, "wd": Linear(0.1, floor=0.05), "m": 0.9 - 0.1 * k, **more}


def trials(num=3, **more):
    return [Trial(config=config(k), seed=k, epochs=3 + k % 2, **more) for k in range(num)]


def without_train_loss(results):
    """Drop ``train_loss``, which packs sum in single precision and which has its own test."""
    for result in results:
        for metrics in result.metrics:
            metrics.pop("train_loss", None)
    return results


def check_fused(task, given, *, blocks=1, **options):
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=8))
    found = together(backend, given, **options)
    wanted = alone(task, given)
    assert [result.error for result in found] == [None] * len(given)
    assert_same(without_train_loss(found), without_train_loss(wanted), tolerance=DOUBLE)
    assert sum(len(each) for each in backend.blocks.by_key.values()) == blocks


def plain_groups(parameters, lr, wd):
    """Return the groups that a user would write by hand for ``GROUPS``."""
    scales = {"0.weight": (0.1, 1), "0.bias": (0.1, 0), "2.weight": (1, 1), "2.bias": (1, 0)}
    return [
        {"params": [parameters[name]], "lr": lr * a, "weight_decay": wd * b}
        for name, (a, b) in scales.items()
    ]


def plain_loop(task, values, *, seed, epochs, clip_norm):
    """Train with AdamW and manual groups, with values from the schedules themselves."""

    def at(name, epoch, step, num):
        return values[name].values(epoch, epoch + 1, epochs=20, steps_per_epoch=num).tolist()[step]

    data = task.data({})
    torch.default_generator.manual_seed(derive_seed(seed, "model"))
    model = task.model({})
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(plain_groups(parameters, at("lr", 0, 0, 1), at("wd", 0, 0, 1)))
    for epoch in range(epochs):
        batches = epoch_order(20, seed=seed, epoch=epoch).split(8)
        model.train()
        for step, rows in enumerate(batches):
            now = [at(name, epoch, step, len(batches)) for name in ("lr", "wd")]
            for group, new in zip(
                optimizer.param_groups, plain_groups(parameters, *now), strict=True
            ):
                group.update(lr=new["lr"], weight_decay=new["weight_decay"])
            torch.default_generator.manual_seed(step_seed(derive_seed(seed, "epoch", epoch), step))
            optimizer.zero_grad()
            task.loss(model, [array[rows] for array in data.train]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return model.state_dict()


# -- solo and concatenated -------------------------------------------------------------------


@pytest.mark.parametrize("backend", [SoloBackend, ConcatenatedBackend])
def test_training_is_a_plain_loop_with_param_groups(backend):
    task = variant(optimizer=AdamW(lr="lr", weight_decay="wd", clip_norm=0.05, groups=GROUPS))
    values = {"lr": Cosine(0.05), "wd": Linear(0.3)}
    (result,) = together(backend(task), [Trial(config=values, seed=2)])
    wanted = plain_loop(task, values, seed=2, epochs=3, clip_norm=0.05)
    for name, tensor in unpack_state(result.state)["model"].items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_concatenated_equals_solo(kind):
    task = variant(optimizer=OPTIMIZERS[kind](groups=GROUPS, clip_norm=0.5))
    given = trials()
    assert_same(together(ConcatenatedBackend(task, device=here()), given), alone(task, given))


# -- fused -----------------------------------------------------------------------------------


@pytest.mark.sample(7)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_equals_solo(kind, clip_norm):
    check_fused(
        in_double(OPTIMIZERS[kind](groups=GROUPS, clip_norm=clip_norm)), trials(4), at_once=3
    )


def test_groups_make_a_difference_in_a_block():
    """Groups change the results of a block; otherwise the tests above would show nothing."""
    given = trials(2)
    grouped, plain = (
        together(FusedBackend(in_double(spec), device=here()), given)
        for spec in (AdamW(lr="lr", groups=GROUPS), AdamW(lr="lr"))
    )
    assert all(a.metrics[0] != b.metrics[0] for a, b in zip(grouped, plain, strict=True))


def test_trials_of_one_block_whose_groups_differ_in_options():
    groups = {"*.bias": {"lr": times("lr", "scale"), "momentum": "bias_m"}}
    task = in_double(SGD(lr="lr", momentum="m", groups=groups))
    given = [
        Trial(config=config(k, scale=Linear(2.0 * k + 1), bias_m=0.5 + 0.1 * k), seed=k)
        for k in range(3)
    ]
    check_fused(task, given)


def test_momentum_in_one_group_only():
    task = in_double(SGD(lr="lr", momentum=0.0, groups={"*.weight": {"momentum": "m"}}))
    check_fused(task, trials())


def test_momentum_that_begins_in_one_group():
    """A trial whose momentum starts at an epoch's end moves to another kind of optimizer."""
    task = in_double(SGD(lr="lr", momentum="m", groups={"*.bias": {"momentum": "bias_m"}}))
    begins = MultiStep([0.0, 0.9], milestones=[1])
    given = [Trial(config=config(0, bias_m=begins), seed=k) for k in range(2)]
    check_fused(task, given, blocks=2)


class Choosing(Toy):
    """A task where a hyper-parameter selects the parameters of a group."""

    def optimizer(self, hp):
        return SGD(lr="lr", momentum="m", groups={hp.pattern: {"lr": 0.001}})


def test_trials_whose_groups_have_other_members_do_not_share_a_block():
    given = [
        Trial(config=config(k, pattern=pattern), seed=k)
        for k, pattern in enumerate(["*.bias", "0.*", "*.bias"])
    ]
    check_fused(variant(Choosing, dtype=torch.float64), given, blocks=2)


def test_a_narrower_model_is_padded_group_by_group():
    task = in_double(AdamW(lr="lr", weight_decay="wd", groups=GROUPS))
    given = [Trial(config=config(0, width=w), seed=w) for w in (8, 6)]
    check_fused(task, given)


class PartlyFrozen(Toy):
    def network(self, hp):
        model = super().network(hp)
        model[0].requires_grad_(False)
        return model


def test_a_group_of_which_nothing_is_trained():
    given = trials()
    # Most is frozen, so trials that see other batches, as those of other seeds, have other blocks.
    task = in_double(OPTIMIZERS["adamw"](groups=GROUPS), PartlyFrozen)
    check_fused(task, given, blocks=len({trial.seed for trial in given}))


def test_what_torch_takes_for_all_parameters_only_is_not_fused():
    groups = {"*.bias": {"initial_accumulator_value": 1.0}}
    backend = FusedBackend(variant(optimizer=Adagrad(lr="lr", groups=groups)), device=here())
    with pytest.raises(th.pack.UnfusableError, match="initial_accumulator_value"):
        backend.put(0, trials(1)[0].member)


@pytest.mark.sample(4)
@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.__name__)
def test_groups_in_models_of_all_kinds(toy):
    """Groups chosen by shape work in every model: matrices and vectors alternate in each."""
    groups = {lambda p: p.ndim < 2: {"weight_decay": 0, "lr": times("lr", 2)}}
    spec = SGD(lr="lr", momentum="m", weight_decay="wd", groups=groups)
    blocks = 3 if toy is Frozen else 1  # seeds draw other frozen weights
    check_fused(in_double(spec, toy), trials(), blocks=blocks)


@pytest.mark.parametrize("way", [(FusedBackend, SoloBackend), (SoloBackend, FusedBackend)])
@pytest.mark.parametrize("kind", ["momentum", "adamw", "adagrad"])
def test_a_state_moves_between_back_ends(kind, way):
    task = in_double(OPTIMIZERS[kind](groups=GROUPS))
    first, second = way
    (half,) = together(first(task), [Trial(config=config(), epochs=2)])
    (rest,) = together(second(task), [Trial(config=config(), epochs=4, start=2, state=half.state)])
    (whole,) = alone(task, [Trial(config=config(), epochs=4)])
    whole.metrics = whole.metrics[2:]
    assert_same(without_train_loss([rest]), without_train_loss([whole]), tolerance=DOUBLE)


class Thawing(Toy):
    """A task whose first layer is trained in some epochs only."""

    def adapt(self, model, hp):
        model[0].requires_grad_(bool(hp.thawed))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "thawed",
    [MultiStep([0, 1], milestones=[1]), MultiStep([1, 0, 1], milestones=[1, 2])],
    ids=["later", "in between"],
)
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "rmsprop"])
def test_parameters_that_are_frozen_for_a_while(kind, thawed):
    """Updates count for each parameter; rows cannot hold counts that differ within a group."""
    task = variant(Thawing, dtype=torch.float64, optimizer=OPTIMIZERS[kind](groups=GROUPS))
    given = [Trial(config=config(k, thawed=thawed), seed=k, epochs=4) for k in range(2)]
    found = together(th.pack.AutoBackend(task, device=here(), prefer="fused"), given)
    assert_same(without_train_loss(found), without_train_loss(alone(task, given)), tolerance=DOUBLE)


# -- methods and factories -------------------------------------------------------------------


class Method(Toy):
    def optimizer(self, hp):
        groups = {"*.bias": {"lr": hp.lr * hp.scale, "weight_decay": 0.0}}
        return AdamW(lr=hp.lr * 0.5, weight_decay="wd", groups=groups)


def test_a_method_is_followed_as_an_attribute_is():
    """A method is followed step by step. Scales of 1 and 2 keep any product exact."""
    groups = {"*.bias": {"lr": times("lr", "scale"), "weight_decay": 0.0}}
    attribute = variant(optimizer=AdamW(lr=times("lr", 0.5), weight_decay="wd", groups=groups))
    given = [Trial(config=config(k, scale=2.0), seed=k) for k in range(2)]
    found = together(SoloBackend(Method(), device=here()), given[:1]) + alone(Method(), given[1:])
    wanted = alone(attribute, given)
    for one, other in zip(found, wanted, strict=True):
        assert one.metrics == other.metrics
        state, expected = (unpack_state(each.state)["model"] for each in (one, other))
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_method_is_fused():
    given = [Trial(config=config(k, scale=Linear(1.0 + k)), seed=k) for k in range(3)]
    check_fused(variant(Method, dtype=torch.float64), given)


class Turning(Toy):
    def optimizer(self, hp):
        return SGD(lr="lr") if hp.m > 0.5 else Adam(lr="lr")


@pytest.mark.parametrize("backend", [SoloBackend, ConcatenatedBackend, FusedBackend])
def test_a_method_that_turns_to_another_optimizer(backend):
    turns = Trial(config={"lr": 0.1, "m": MultiStep([0.9, 0.1], milestones=[1])})
    auto = (
        th.pack.AutoBackend(Turning(), device=here(), prefer="fused")
        if backend is FusedBackend
        else None
    )
    (result,) = together(auto or backend(Turning()), [turns])
    assert len(result.metrics) == 1
    assert isinstance(result.error, TaskError)
    assert "another kind of optimizer while it trains" in str(result.error)


def head_faster(parameters, *, lr):
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 10 * lr}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


@pytest.mark.parametrize("backend", [SoloBackend, ConcatenatedBackend])
def test_groups_of_a_factory_keep_their_ratio_in_training(backend):
    own = variant(optimizer=Optimizer(head_faster, lr="lr"))
    groups = {"2.*": {"lr": times("lr", 10)}}
    ours = variant(optimizer=SGD(lr="lr", momentum=0.9, groups=groups))
    given = trials(2)
    for one, other in zip(
        together(backend(own), given, at_once=1), alone(ours, given), strict=True
    ):
        assert one.metrics == [pytest.approx(each, rel=1e-5) for each in other.metrics]


def test_a_factory_that_is_interrupted_goes_on_to_the_last_bit():
    task = variant(optimizer=Optimizer(head_faster, lr="lr"))
    (half,) = alone(task, [Trial(config=config(1), epochs=2)])
    (rest,) = alone(task, [Trial(config=config(1), epochs=4, start=2, state=half.state)])
    (whole,) = alone(task, [Trial(config=config(1), epochs=4)])
    whole.metrics = whole.metrics[2:]
    assert_same([rest], [whole])


# -- thrifty.pack ----------------------------------------------------------------------------


def loss(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def packed(optimizer, *, in_turn):
    torch.default_generator.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    models = [copy.deepcopy(base).double() for _ in range(3)]
    values = [{"lr": 0.1 * (k + 1), "wd": 0.1, "m": 0.9} for k in range(3)]
    pack = th.pack(models, loss=loss, optimizer=optimizer, values=values)
    if in_turn:
        pack.fused = False
    for step in range(4):
        for own in pack.values:
            own["lr"] *= 0.9
        x = normal(8, 6, seed=step).double()
        pack.step((x, x.sin().sum(1, keepdim=True)))
    return pack


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_packed_models_follow_their_groups(kind):
    spec = OPTIMIZERS[kind](groups=GROUPS, clip_norm=0.5)
    fused, in_turn = packed(spec, in_turn=False), packed(spec, in_turn=True)
    assert fused.fused
    for one, other in zip(fused, in_turn, strict=True):
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name], tensor, rtol=1e-10, atol=1e-10)


def test_packed_models_whose_factory_makes_groups_are_trained_in_turn():
    ours = SGD(lr="lr", momentum=0.9, groups={"2.*": {"lr": times("lr", 10)}})
    own, wanted = (
        packed(Optimizer(head_faster, lr="lr"), in_turn=False),
        packed(ours, in_turn=True),
    )
    assert not own.fused
    for one, other in zip(own, wanted, strict=True):
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name], tensor, rtol=1e-10, atol=1e-10)


def test_packed_models_with_other_members_in_their_groups_are_trained_in_turn(caplog):
    torch.default_generator.manual_seed(0)
    models = [nn.Linear(6, 1), nn.Linear(6, 1)]
    models[1].weight.own = True
    spec = SGD(lr=0.1, groups={lambda p: hasattr(p, "own"): {"lr": 0.2}})
    pack = th.pack(models, loss=loss, optimizer=spec)
    pack.step((normal(8, 6), normal(8, 1)))
    assert not pack.fused
    assert "parameter groups" in caplog.text
