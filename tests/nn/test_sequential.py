import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from thrifty.core import LayerError
from thrifty.nn import BlockGyroDropout, GyroMLP, GyroSchedule, GyroSequential, _sequential, _sliced
from thrifty.perf import SlicingCosts


pytestmark = pytest.mark.slow


def drop(schedule, units, size, p=0.5, dim=None):
    return BlockGyroDropout(p, num_features=units, group_size=size, schedule=schedule, dim=dim)


def mlp(s):
    return [
        nn.Linear(5, 16),
        nn.ReLU(),
        drop(s, 16, 4),
        nn.Linear(16, 12),
        nn.GELU(),
        drop(s, 12, 3, 0.25),
        nn.Linear(12, 2),
    ]


def images(s):
    return [
        nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), drop(s, 8, 2),
        nn.Conv2d(8, 6, 3, stride=2, dilation=1), nn.Tanh(), drop(s, 6, 3), nn.Flatten(),
        nn.Linear(6, 4), nn.ReLU(), drop(s, 4, 1), nn.Linear(4, 2),
    ]  # fmt: skip


def normalised(s):
    return [
        nn.Linear(5, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        drop(s, 16, 4),
        nn.Linear(16, 8),
        drop(s, 8, 4),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    ]


def sequences(s):
    return [nn.Linear(5, 16), nn.GELU(), drop(s, 16, 4), nn.Linear(16, 5)]


def flattened(s):
    return [nn.Linear(5, 16), drop(s, 16, 4), nn.Flatten(), nn.Linear(48, 3)]


def ungrouped(s):
    """Return layers where the units of dropout are not those of the product before it."""
    return [
        nn.Linear(5, 16),
        nn.ReLU(),
        drop(s, 3, 1, 0.34, dim=1),
        nn.Linear(16, 4),
        drop(s, 4, 2),
        drop(s, 4, 2),
    ]


def grouped(s):
    return [
        nn.Conv2d(2, 8, 3, groups=2),
        nn.ReLU(),
        drop(s, 8, 2),
        nn.Conv2d(8, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ]


def deep_rows(s):
    """Return products of four-dimensional inputs; dropout drops channels unless ``dim`` is set."""
    return [
        nn.Linear(4, 8),
        nn.ReLU(),
        drop(s, 2, 1),
        nn.Linear(8, 4),
        nn.ReLU(),
        drop(s, 4, 2, dim=-1),
        nn.Linear(4, 3),
    ]


NETWORKS = {
    "deep rows": (deep_rows, (2, 3, 4)),
    "mlp": (mlp, (5,)),
    "images": (images, (2, 8, 8)),
    "normalised": (normalised, (5,)),
    "sequences": (sequences, (3, 5)),
    "flattened": (flattened, (3, 5)),
    "ungrouped": (ungrouped, (3, 5)),
    "grouped": (grouped, (2, 5, 5)),
}


def pair(make, *, concurrent=4, **options):
    schedule = GyroSchedule(subnetworks=8, concurrent=concurrent, total_steps=20)
    layers = make(schedule)
    plain = nn.Sequential(*copy.deepcopy(layers)).double()
    return plain, GyroSequential(*layers, **options).double()


def run(model, x):
    x = x.clone().requires_grad_()
    out = model(x)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    return [out, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 12), concurrent=st.integers(1, 5), seed=st.integers(0, 99))
def test_sliced_is_masked(name, batch, concurrent, seed):
    torch.manual_seed(seed)
    make, shape = NETWORKS[name]
    plain, sliced = pair(make, concurrent=concurrent, execution="sliced")
    x = torch.randn(batch, *shape).double()
    for ours, theirs in zip(run(sliced, x), run(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_in_single_precision_to_a_millionth(name, caplog):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    plain, sliced = pair(make, execution="sliced")
    x = torch.randn(9, *shape)
    for ours, theirs in zip(run(sliced.float(), x), run(plain.float(), x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert "run as they are" not in caplog.text


def test_a_part_of_the_layers_has_the_same_options():
    schedule = GyroSchedule(subnetworks=8, concurrent=2, total_steps=20)
    costs = SlicingCosts(margin=2.0)
    model = GyroMLP(6, [8, 4], 3, group_size=2, schedule=schedule, execution="masked")
    model.costs = costs
    part = model[:3]
    assert type(part) is GyroSequential
    assert (part.execution, part.costs, len(part)) == ("masked", costs, 3)
    assert part[2] is model[2]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:1000 forward passes")
def test_gradients_are_those_of_finite_differences():
    for make, shape in (NETWORKS["mlp"], NETWORKS["images"]):
        _, model = pair(make, execution="sliced")
        values = [p.detach().clone().requires_grad_() for p in model.parameters()]
        names = [name for name, _ in model.named_parameters()]

        def call(x, *given, model=model, names=names):
            return torch.func.functional_call(model, dict(zip(names, given, strict=True)), x)

        x = torch.randn(5, *shape).double().requires_grad_()
        assert torch.autograd.gradcheck(call, (x, *values))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_network_computes_what_the_plain_one_does(name):
    make, shape = NETWORKS[name]
    plain, sliced = pair(make, execution="sliced")
    x = torch.randn(8, *shape).double()
    compiled = torch.compile(sliced, backend="eager", fullgraph=True)
    for ours, theirs in zip(run(compiled, x), run(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.compiler.reset()


@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_device(device, name):
    make, shape = NETWORKS[name]
    plain, sliced = (model.to(device) for model in pair(make, execution="sliced"))
    x = torch.randn(9, *shape).double().to(device)
    for ours, theirs in zip(run(sliced, x), run(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_something_is_left_out(monkeypatch):
    """Sliced products have the shapes of the kept groups."""
    seen = []
    product = _sequential.gyro_linear

    def watched(x, weight, bias, **kept):
        out = product(x, weight, bias, **kept)
        seen.append((tuple(x.shape), tuple(out.shape)))
        return out

    monkeypatch.setattr(_sequential, "gyro_linear", watched)
    _, model = pair(mlp, execution="sliced")
    model(torch.randn(8, 5).double())  # the first batch is computed both ways
    seen.clear()
    model(torch.randn(8, 5).double())
    assert seen == [((4, 2, 5), (4, 2, 8)), ((4, 2, 8), (4, 2, 9)), ((4, 2, 9), (4, 2, 2))]


def test_autocast_computes_in_half_precision():
    plain, sliced = pair(mlp, execution="sliced")
    x = torch.randn(8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [model.float()(x) for model in (plain, sliced)]
    assert outs[1].dtype == torch.bfloat16
    torch.testing.assert_close(*outs, rtol=0.05, atol=0.05)


def test_frozen_layers_and_inputs_that_want_no_gradient():
    plain, sliced = pair(mlp, execution="sliced")
    x = torch.randn(8, 5).double()
    for model in (plain, sliced):
        model[3].weight.requires_grad_(False)
        model(x).sum().backward()
        assert model[3].weight.grad is None
    torch.testing.assert_close(sliced[0].weight.grad, plain[0].weight.grad)


def test_evaluation_and_empty_batches_are_those_of_sequential():
    plain, sliced = pair(mlp, execution="sliced")
    x = torch.randn(7, 5).double()
    assert torch.equal(sliced.eval()(x), plain.eval()(x))
    assert sliced.train()(x[:0]).shape == (0, 2)


def test_states_are_those_of_sequential():
    plain, sliced = pair(mlp)
    assert list(sliced.state_dict()) == list(plain.state_dict())
    sliced.load_state_dict(plain.state_dict())


def test_costs_choose_and_say_so_once(caplog):
    _sequential._said.clear()
    never = SlicingCosts(margin=1e9)
    plain, model = pair(mlp, costs=never)
    x = torch.randn(8, 5).double()
    for ours, theirs in zip(run(model, x), run(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(caplog.records) == 3
    assert "a layer of 16 x 12 weights is multiplied whole and masked" in caplog.text
    model(x)
    assert len(caplog.records) == 3


class TwoSided(SlicingCosts):
    """Costs where slicing pays only if both sides are sliced."""

    def pays(self, product):
        return product.inputs_kept < product.inputs and product.outputs_kept < product.outputs


def test_one_side_alone_need_not_pay(monkeypatch):
    """A product between two dropouts is sliced on both sides, even if one side would not pay."""
    seen = []
    product = _sequential.gyro_linear

    def watched(x, weight, bias, *, inputs, outputs):
        seen.append((inputs is not None, outputs is not None))
        return product(x, weight, bias, inputs=inputs, outputs=outputs)

    monkeypatch.setattr(_sequential, "gyro_linear", watched)
    plain, model = pair(mlp, costs=TwoSided())
    x = torch.randn(8, 5).double()
    model(x)  # the first batch is computed both ways
    seen.clear()
    for ours, theirs in zip(run(model, x), run(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert seen == [(True, True)]


def test_gyro_mlp():
    schedule = GyroSchedule(subnetworks=8, concurrent=2, total_steps=20)
    generator = torch.Generator().manual_seed(0)
    model = GyroMLP(
        6,
        [8, 4],
        3,
        p=0.5,
        group_size=2,
        schedule=schedule,
        activation=nn.Tanh,
        generator=generator,
    )
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, BlockGyroDropout] * 2 + [
        nn.Linear
    ]
    assert all(model[i].schedule is schedule for i in (2, 5))
    assert len(list(model.parameters())) == 6


def test_bad_options():
    with pytest.raises(
        LayerError, match="execution='fast'; give one of 'auto', 'sliced', 'masked'"
    ):
        GyroSequential(nn.Linear(2, 2), execution="fast")
    own = {"num_features": 4, "group_size": 2, "subnetworks": 4, "concurrent": 2, "total_steps": 9}
    with pytest.raises(LayerError, match="several schedules"):
        GyroSequential(BlockGyroDropout(**own), nn.Linear(4, 4), BlockGyroDropout(**own))


def test_a_batch_that_no_layer_slices_is_not_split_again(monkeypatch):
    """Splitting costs time, too, above all on a GPU, where a step is launches."""
    schedule = GyroSchedule(subnetworks=4, concurrent=2, total_steps=100)
    model = GyroSequential(*mlp(schedule), costs=SlicingCosts(margin=1e9))
    split = []
    whole = _sequential.Parts.of
    monkeypatch.setattr(
        _sequential.Parts, "of", lambda *args, **kw: split.append(args) or whole(*args, **kw)
    )
    x = torch.randn(8, 5)
    first = model(x)
    assert len(split) == 1
    assert torch.equal(model(x), first)
    assert len(split) == 1
    model(torch.randn(6, 5))
    assert len(split) == 2, "another batch may be worth it"
    model.costs = SlicingCosts(margin=1e-9)
    model(x)
    model(x)
    assert len(split) == 4, "and so may other costs"
    found = copy.deepcopy(model)
    assert found.state_dict().keys() == model.state_dict().keys()


def test_a_capture_replaces_only_what_has_been_compared(monkeypatch):
    """Layers that differed at an earlier batch run unchanged in a graph, and so do new ones."""
    calls = []
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: calls.append(1) or plain(self, x))
    x = torch.randn(8, 32)
    for found, wanted in ((None, 0), ("outputs differ", 2), ("never compared", 2)):
        schedule = GyroSchedule(subnetworks=4, concurrent=2, total_steps=10)
        model = GyroMLP(32, [64], 3, schedule=schedule, group_size=16, execution="sliced")
        with monkeypatch.context() as patch:
            patch.setattr(_sliced, "_difference", lambda *_, found=found: found)
            if found != "never compared":
                model(x)
        with monkeypatch.context() as patch:
            patch.setattr(_sliced, "is_captured", lambda _: True)
            calls.clear()
            model(x)
        assert len(calls) == wanted


def test_what_launches_cost_depends_on_the_batch(monkeypatch):
    """On a GPU, the first batch of a kind slices what a graph would, so that it is compared."""
    schedule = GyroSchedule(subnetworks=4, concurrent=2, total_steps=10)
    model = GyroMLP(32, [64], 3, schedule=schedule, group_size=16)
    on_gpu, known = SimpleNamespace(is_cuda=True), _sequential._Found()
    for captures, wanted in (
        (False, _sequential._CAPTURED_COSTS),
        (False, _sequential._KERNEL_COSTS),
        (True, _sequential._CAPTURED_COSTS),
        (False, _sequential._KERNEL_COSTS),
    ):
        monkeypatch.setattr(_sequential, "is_captured", lambda _, captures=captures: captures)
        assert model._costs_of(on_gpu, key="kind", known=known) is wanted
    assert model._costs_of(torch.ones(1), key="kind", known=known) is _sequential._COSTS
    model.costs = SlicingCosts()
    assert model._costs_of(on_gpu, key="kind", known=known) is model.costs
