"""``GyroSequential`` equals ``nn.Sequential`` for any layers, as checks during training ensure."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from thrifty.nn import BlockGyroDropout, GyroMLP, GyroSchedule, GyroSequential, _sliced


pytestmark = pytest.mark.slow


def mlp(**options):
    torch.manual_seed(0)
    schedule = GyroSchedule(subnetworks=8, concurrent=4, total_steps=20)
    model = GyroMLP(6, [16, 12], 3, schedule=schedule, group_size=4, execution="sliced", **options)
    return model.double()


def images():
    torch.manual_seed(0)
    schedule = GyroSchedule(subnetworks=8, concurrent=4, total_steps=20)
    drop = BlockGyroDropout(0.5, num_features=8, group_size=2, schedule=schedule)
    layers = [
        nn.Conv2d(2, 8, 3), nn.ReLU(), nn.MaxPool2d(2), drop,
        nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4, 3),
    ]  # fmt: skip
    return GyroSequential(*layers, execution="sliced").double()


def rows(num=9):
    return torch.randn(num, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def trained(make, change, *, masked, x=None, steps=3):
    """Return outputs, gradients and the results of ``change`` after some steps."""
    model = make()
    if masked:
        model.execution = "masked"
    torch.manual_seed(5)
    more = change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model((rows() if x is None else x).requires_grad_())
        out.square().mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        model[2 if x is None else 3].schedule.step()
    return found, more


def assert_same(make, change, *, x=None):
    (ours, mine), (theirs, its) = (trained(make, change, masked=m, x=x) for m in (False, True))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    for a, b in zip(mine or (), its or (), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# --- changes that users make to layers


class Shifted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Doubled(BlockGyroDropout):
    def forward(self, x):
        return 2 * super().forward(x)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def recorded(*places, how="register_forward_hook"):
    """Return a change that adds a hook which records its inputs."""

    def change(model):
        seen = []

        def note(module, *values):
            flat = [
                v for value in values for v in (value if isinstance(value, tuple) else (value,))
            ]
            seen.extend(v.detach().clone() for v in flat if isinstance(v, torch.Tensor))

        for place in places:
            getattr(model[place], how)(note)
        return seen

    return change


def changed_output(place):
    def change(model):
        model[place].register_forward_hook(lambda module, args, out: out * 3)

    return change


def replaced(place, make):
    def change(model):
        model[place] = make(model[place])

    return change


def of_layers(function, **options):
    def change(model):
        for place in (0, 3):
            torch.manual_seed(place)
            function(model[place], **options)

    return change


def halved(model):
    parametrize.register_parametrization(model[3], "weight", Halved())


def pruned(model):
    prune.l1_unstructured(model[3], "weight", amount=0.5)


def pruned_for_good(model):
    pruned(model)
    prune.remove(model[3], "weight")


def tied(model):
    model[3] = nn.Linear(16, 16).double()
    model[5] = BlockGyroDropout(0.5, num_features=16, group_size=4, schedule=model[2].schedule)
    model.add_module("7", nn.Linear(16, 16).double())
    model[7].weight = model[3].weight
    model[6] = nn.Linear(16, 16).double()


def own_forward(model):
    layer = model[3]
    layer.forward = lambda x: F.linear(x, layer.weight.abs(), layer.bias)


CHANGES = {
    "hook on a product": recorded(3),
    "hook before a product": recorded(3, how="register_forward_pre_hook"),
    "hook on an activation": recorded(1, 4),
    "hook on a dropout": recorded(2, 5),
    "backward hook": recorded(0, 2, 3, how="register_full_backward_hook"),
    "backward pre-hook": recorded(3, how="register_full_backward_pre_hook"),
    "hook that changes a product": changed_output(3),
    "hook that changes an activation": changed_output(4),
    "hook that changes a dropout": changed_output(2),
    "old weight norm": of_layers(nn.utils.weight_norm),
    "weight norm": of_layers(parametrizations.weight_norm),
    "old spectral norm": of_layers(nn.utils.spectral_norm),
    "spectral norm": of_layers(parametrizations.spectral_norm),
    "orthogonal": of_layers(parametrizations.orthogonal),
    "a parametrization": halved,
    "pruning": pruned,
    "pruning for good": pruned_for_good,
    "tied weights": tied,
    "a subclass": replaced(3, lambda layer: Shifted(16, 12).double().requires_grad_(False)),
    "a forward of its own": own_forward,
    "a dropout that does not drop": lambda model: model[5].eval() and None,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_the_answer_is_that_of_sequential(name):
    assert_same(mlp, CHANGES[name])


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("how", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_on_layers_of_images(place, how):
    x = torch.randn(9, 2, 8, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    assert_same(images, recorded(place, how=how), x=x)


@pytest.mark.parametrize(
    "layer", [nn.Sigmoid, nn.Softplus, nn.LogSigmoid, nn.Hardsigmoid, lambda: nn.Hardtanh(0.5, 1)]
)
def test_functions_that_make_something_of_zero(layer):
    def make():
        model = mlp()
        return GyroSequential(*model[:3], layer(), *model[3:], execution="sliced").double()

    assert_same(make, lambda model: None)


def test_a_subclass_of_the_dropout_keeps_its_forward():
    def make():
        model = mlp()
        model[2] = Doubled(
            0.5, num_features=16, group_size=4, schedule=model[2].schedule,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return model.double()

    assert_same(make, lambda model: None)


@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.Flatten()])
def test_dropout_of_the_last_of_four_dimensions(layer):
    def make():
        torch.manual_seed(0)
        schedule = GyroSchedule(subnetworks=8, concurrent=4, total_steps=20)
        drop = BlockGyroDropout(0.5, num_features=4, group_size=2, schedule=schedule, dim=-1)
        after = nn.Linear(4, 3) if isinstance(layer, nn.LayerNorm) else nn.Linear(24, 3)
        layers = [nn.Linear(5, 4), nn.ReLU(), drop, copy.deepcopy(layer), after]
        return GyroSequential(*layers, execution="sliced").double()

    x = torch.randn(9, 2, 3, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    (ours, _), (theirs, _) = (_in_rows(make, x, masked=masked) for masked in (False, True))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_dropout_of_the_last_dimension_before_a_product():
    def make():
        torch.manual_seed(0)
        schedule = GyroSchedule(subnetworks=8, concurrent=4, total_steps=20)
        drop = BlockGyroDropout(0.5, num_features=4, group_size=2, schedule=schedule, dim=-1)
        return GyroSequential(drop, nn.Linear(4, 3), execution="sliced").double()

    x = torch.randn(9, 6, 3, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    (ours, _), (theirs, _) = (_in_rows(make, x, masked=masked) for masked in (False, True))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def _in_rows(make, x, *, masked):
    model = make()
    model.execution = "masked" if masked else "sliced"
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())], None


def test_global_hooks_see_what_they_would():
    def run(*, masked):
        model, seen = mlp(), []
        model.execution = "masked" if masked else "sliced"
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: seen.append((type(module), tuple(out.shape)))
        )
        try:
            model(rows())
        finally:
            handle.remove()
        return seen

    assert run(masked=False) == run(masked=True)


# --- unforeseen changes


def doubled_forward(self, x):
    return 2 * F.linear(x, self.weight, self.bias)


class _Straight(torch.autograd.Function):
    """The identity with a different gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def straight_forward(self, x):
    return _Straight.apply(F.linear(x, self.weight, self.bias))


@pytest.mark.parametrize("forward", [doubled_forward, straight_forward])
def test_what_differs_runs_as_it_is(monkeypatch, caplog, forward):
    monkeypatch.setattr(nn.Linear, "forward", forward)
    with caplog.at_level(logging.WARNING, logger="thrifty.nn"):
        assert_same(mlp, lambda model: None)
    said = [
        r.getMessage() for r in caplog.records if "run as they are from now on" in r.getMessage()
    ]
    assert len(said) == 3  # one message for each product of the sliced model
    assert said[0].startswith("layers 0 to 2 (Linear, ReLU, BlockGyroDropout)")


def test_it_is_looked_at_again_and_again(monkeypatch, caplog):
    monkeypatch.setattr(_sliced, "_EVERY", 5)
    model = mlp()
    for _ in range(5):
        model(rows())
    assert not caplog.records
    monkeypatch.setattr(nn.Linear, "forward", doubled_forward)
    for _ in range(2 * 5):
        out = model(rows())
    assert caplog.text.count("run as they are from now on") == 3
    torch.testing.assert_close(out, nn.Sequential.forward(model, rows()))


def test_a_layer_that_was_put_in_place_of_another_is_looked_at(caplog):
    model = mlp()
    model(rows())
    records = _sliced._records[model].known
    before = dict(records)
    model[3] = nn.Linear(16, 12).double()
    model(rows())
    assert sum(records[key] is not record for key, record in before.items()) == 1


@pytest.mark.thorough
def test_checks_are_rare_and_seeded(monkeypatch):
    compared, times, real = [], [], _sliced._difference
    monkeypatch.setattr(_sliced, "_difference", lambda *a: compared.append(batch) or real(*a))
    for _ in range(2):
        model = mlp()
        compared.clear()
        for batch in range(2500):  # noqa: B007 -- read in the comparison
            model(rows(4))
            model[2].schedule.step()
        times.append(list(compared))
    assert times[0] == times[1]
    assert times[0].count(0) == 3
    assert 0 < len([n for n in times[0] if n]) < 3 * 8


# --- a check leaves no trace


def test_a_check_takes_no_number_and_leaves_no_gradient():
    model = mlp()
    calls = []
    model[3].weight.register_hook(lambda grad: calls.append(1))
    stream = torch.get_rng_state()
    out = model(rows())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p.grad is None for p in model.parameters())
    assert not calls
    out.sum().backward()
    assert calls == [1]


def test_activation_checkpointing_saves_as_many_tensors():
    model, other = mlp(), mlp()
    checkpoint(model, rows().requires_grad_(), use_reentrant=False).sum().backward()
    other(rows()).sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_evaluation_without_gradients_is_compared_too():
    model = mlp()
    with torch.no_grad():
        model(rows())
    assert len(_sliced._records[model].known) == 3


def test_transforms_of_functions_run_the_layers_as_they_are():
    model = mlp()
    values = dict(model.named_parameters())

    def call(given, x):
        return torch.func.functional_call(model, given, (x,)).square().sum()

    found = torch.func.grad(call)(values, rows())
    call(values, rows()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_models_on_the_meta_device_have_shapes():
    assert mlp().to("meta")(rows().to("meta")).shape == (9, 3)


def test_copies_and_pickles_are_looked_at_anew():
    model = mlp()
    expected = model(rows())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other not in _sliced._records
        torch.testing.assert_close(other(rows()), expected)


def test_nothing_is_kept_of_a_model_that_is_gone():
    model = mlp()
    model(rows())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_no_difference(dtype, caplog):
    model = mlp().to(dtype)
    model(rows().to(dtype)).float().sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mlp().float()(rows().float()).float().sum().backward()
    assert not caplog.records


class Kinked(nn.Module):
    """A step at zero: rounding decides the side, and a gradient jumps there."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def forward(self, x):
        return (x - self.places).relu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_gradient_that_jumps_with_rounding_is_no_difference(is_wrong, dtype):
    x = torch.linspace(0.5, 1.5, 12, dtype=dtype).reshape(3, 4)
    places = torch.zeros(3, 4, dtype=dtype)
    places[1, 2] = x[1, 2]
    group = [Kinked(places)]

    @dataclass
    class Split:
        x: torch.Tensor

        def whole(self):
            return self.x

    def quick(split):
        # as another order of a sum
        moved = split.x * (1 + 8 * torch.finfo(dtype).eps)
        return Split((moved - group[0].places).relu() * (1.5 if is_wrong else 1.0))

    found = _sliced._difference(group, Split(x.requires_grad_()), quick)
    assert (found is None) is not is_wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_errors_in_half_precision_are_differences(dtype):
    @dataclass
    class Split:
        x: torch.Tensor

        def whole(self):
            return self.x

    group = [nn.ReLU()]
    x = torch.linspace(-1, 1, 40).to(dtype).requires_grad_()
    assert _sliced._difference(group, Split(x), lambda s: Split(s.x.relu())) is None
    assert _sliced._difference(group, Split(x), lambda s: Split(1.2 * s.x.relu())) is not None


def test_values_that_are_no_numbers_are_no_difference(caplog):
    x = rows()
    x[0] = float("nan")
    mlp()(x)
    assert not caplog.records


IN_PLACE = {
    "after a layer": lambda act, drop: [nn.Linear(64, 64), act, drop, nn.Linear(64, 3)],
    "after dropout": lambda act, drop: [drop, act, nn.Linear(64, 3)],
    "twice": lambda act, drop: [nn.Linear(64, 64), act, drop, act, nn.Linear(64, 3)],
}


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("execution", ["sliced", "auto"])
@pytest.mark.parametrize(
    "act", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.LeakyReLU(0.1, inplace=True)], ids=repr
)
@pytest.mark.parametrize("where", IN_PLACE)
def test_layers_that_work_in_place_are_compared_on_copies(where, act, execution, has_grad):
    """Else the comparison changes the batch that is trained."""
    schedule = GyroSchedule(subnetworks=8, concurrent=2, total_steps=40)
    drop = BlockGyroDropout(0.5, num_features=64, group_size=16, schedule=schedule)
    torch.manual_seed(0)
    layers = IN_PLACE[where](act, drop)
    results = []
    with torch.set_grad_enabled(has_grad):
        for model in (nn.Sequential(*layers), GyroSequential(*layers, execution=execution)):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
            leaf = x.requires_grad_(has_grad)
            out = model(leaf.clone())
            found = [out]
            if has_grad:
                found += torch.autograd.grad(out.square().sum(), [leaf, *model.parameters()])
            results.append(found)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
