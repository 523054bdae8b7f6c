"""Trials over a frozen base in 8 or 4 bits: each has the results that it has alone."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import replace

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import thrifty as th
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.core import StateError, TaskError, derive_seed
from thrifty.pack import BlockOptions, FusedBackend, SoloBackend, UnfusableError
from thrifty.pack._frozen import FrozenTensors, address, copy_of
from thrifty.pack._quantized import (
    first_quantized,
    layer_of,
    quantized_entries,
    quantized_layers,
    settled,
)
from thrifty.pack._state import pack_state
from thrifty.pack.fused._dry_run import dry_run
from thrifty.pack.fused._fusable import signature
from thrifty.pack.task._data import epoch_order


# the devices of these tests are CPUs: on a GPU, other kernels compute, in other precisions
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*will be cast from torch.float32 to float16"),
]

CPU = torch.device("cpu")
WIDTH = 64
LARGE = 512
"""A width with which a base is larger than what checkpoints hold whole."""
FORMATS = ("nf4", "fp4", "nested", "int8")
SINGLE = 2e-5


def quantized(layer, kind, **more):
    """Return a linear layer with a quantised weight, before it is moved to a device."""
    sizes = (layer.in_features, layer.out_features)
    weight = layer.weight.detach().clone()
    if kind == "int8":
        out = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        out.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        options = {
            "quant_type": "fp4" if kind == "fp4" else "nf4",
            "compress_statistics": kind == "nested",
            **more,
        }
        out = bnb.nn.Linear4bit(*sizes, **options)
        out.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=out, **options)
    out.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    return out


class Net(nn.Module):
    """Two quantised layers, one after an adapter and one that follows it, and a trained head."""

    def __init__(self, kind, *, width=WIDTH, base=0):
        super().__init__()
        first, second = nn.Linear(6, width), nn.Linear(width, width)
        with torch.no_grad():
            for n, parameter in enumerate((*first.parameters(), *second.parameters())):
                parameter.copy_(0.2 * normal(*parameter.shape, seed=7 * base + n))
        self.first, self.second = first.requires_grad_(False), quantized(second, kind)
        self.adapter = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        x = self.second(x) + self.adapter(x)
        return self.head(self.second(x.tanh()).tanh())


class Quantized(Toy):
    kind = "nf4"
    width = WIDTH
    base = 0

    def __init__(self, kind="nf4", *, width=WIDTH, base=0):
        self.kind, self.width, self.base = kind, width, base

    def network(self, hp):
        return Net(self.kind, width=self.width, base=self.base)


def trials(*rates, **options):
    return [Trial(config={"lr": rate}, **options) for rate in rates]


def packed(task, of, **options):
    backend = FusedBackend(task, device=CPU, block=BlockOptions(size=8, **options))
    found = together(backend, of)
    assert all(result.error is None for result in found)
    assert not backend.refused
    return found


@pytest.fixture(params=FORMATS)
def task(request):
    return Quantized(request.param)


def plain_loop(task, rate, *, epochs, seed=0):
    """Train as the library's own users do: without an evaluation, which would end the training."""
    torch.manual_seed(derive_seed(seed, "model"))
    model = task.model({}).to("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    x, y = task.data({}).train
    for epoch in range(epochs):
        model.train()
        for rows in epoch_order(20, seed=seed, epoch=epoch).split(8):
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def test_a_trial_alone_equals_a_plain_loop(task):
    (result,) = alone(task, trials(0.02))
    held = result.state.tensors
    for name, tensor in plain_loop(task, 0.02, epochs=3).items():
        assert torch.equal(held[f"model.{name}"], tensor), name


def test_packed_trials_equal_trials_alone(task):
    of = trials(0.02, 0.05, 0.01)
    assert_same(packed(task, of), alone(task, of), tolerance=SINGLE)


def test_trials_are_in_one_block(task):
    backend = FusedBackend(task, device=CPU, block=BlockOptions(size=8))
    for slot, trial in enumerate(trials(0.02, 0.05)):
        backend.put(slot, trial.member)
    assert len({id(home) for home in backend.blocks.home.values()}) == 1


def test_the_base_is_in_memory_once(task):
    frozen = FrozenTensors()
    models = [settled(task.model({}).to(CPU)) for _ in range(3)]
    lent = [frozen.adopt(model) for model in models]
    assert lent[0] == lent[1] == lent[2]
    places = {address(model.second.weight) for model in models}
    for model in models:
        model(normal(4, 6)).sum().backward()
        places.add(address(model.second.weight))
        for name, tensor in quantized_entries(model).items():
            assert torch.equal(tensor, quantized_entries(models[0])[name])
    assert len(places) == 1
    scales = next(iter(quantized_layers(models[0]).values())).entries()
    name = next(iter(scales))
    assert address(layer_of(models[1].second).entries()[name]) == address(scales[name])


def test_copies_share_the_base(task):
    model = settled(task.model({}).to(CPU))
    lent = FrozenTensors().adopt(model)
    copy = copy_of(model)
    assert lent["second.weight"].is_in(copy.second.weight)
    assert address(copy.second.weight) == address(model.second.weight)
    x = normal(4, 6)
    assert torch.equal(copy(x), model(x))
    assert copy.adapter.weight.data_ptr() != model.adapter.weight.data_ptr()


def test_evaluation_changes_nothing_of_a_layer(task):
    model = settled(task.model({}).to(CPU))
    before = {name: t.clone() for name, t in quantized_entries(model).items()}
    signed = signature(model, attributes={})
    with torch.no_grad():
        model.eval()(normal(4, 6))
    model.train()(normal(4, 6)).sum().backward()
    assert model.adapter.weight.grad.abs().sum() > 0, "gradients pass the second product"
    assert signature(model, attributes={}) == signed
    for name, tensor in quantized_entries(model).items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("width", [WIDTH, LARGE], ids=["held", "named"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_trial_continues_from_a_checkpoint(kind, width):
    def task():
        return Quantized(kind, width=width)

    (whole,) = alone(task(), trials(0.01, epochs=4))
    (first,) = alone(task(), trials(0.01, epochs=2))
    (rest,) = alone(task(), trials(0.01, epochs=4, start=2, state=first.state))
    assert rest.metrics == whole.metrics[2:]
    names = [name for name in whole.state.tensors if "model.second" in name]
    assert bool(names) == (width == WIDTH)
    if width == LARGE:
        assert any(name.startswith("second.") for name in whole.state.base.tensors)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_trial_keeps_the_base_of_its_checkpoint(kind):
    (whole,) = alone(Quantized(kind, width=LARGE), trials(0.01, epochs=4))
    (first,) = alone(Quantized(kind, width=LARGE), trials(0.01, epochs=2))
    other = Quantized(kind, width=LARGE, base=3)
    (rest,) = alone(other, trials(0.01, epochs=4, start=2, state=first.state))
    assert rest.metrics == whole.metrics[2:]
    assert rest.state.base.digest == whole.state.base.digest


class Stored(Quantized):
    """The bytes of its base are held as numbers, as for training by FSDP."""

    def network(self, hp):
        model = Net(self.kind)
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.copy_(0.2 * normal(WIDTH, WIDTH, seed=2))
        model.second = quantized(layer, "nf4", quant_storage=self.storage)
        return model


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bytes_that_are_held_as_numbers(storage):
    task = Stored("nf4")
    task.storage = storage
    of = trials(0.02, 0.05)
    assert_same(packed(task, of), alone(task, of), tolerance=SINGLE)
    (result,) = alone(task, trials(0.02))
    for name, tensor in plain_loop(task, 0.02, epochs=3).items():
        assert torch.equal(result.state.tensors[f"model.{name}"], tensor), name


def test_a_dry_run_writes_into_nothing_without_lazy_clones(monkeypatch):
    monkeypatch.setattr("thrifty.pack._frozen.CAN_SHARE", False)
    task = Quantized("nf4")
    model = settled(task.model({}).to(CPU))
    before = model.second.weight.clone()
    batch = tuple(t[:5] for t in task.data({}).train)
    with pytest.raises(UnfusableError, match="its quantised layers are not held once"):
        dry_run(task, model, batch, frozen=())
    assert torch.equal(model.second.weight, before)
    assert address(copy_of(model).second.weight) != address(model.second.weight)


class Twice(Quantized):
    """One quantised layer has two names."""

    def network(self, hp):
        model = Net(self.kind, width=self.width)
        model.also = model.second
        return model


@pytest.mark.parametrize("width", [WIDTH, LARGE], ids=["held", "named"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_layer_with_two_names(kind, width):
    (whole,) = alone(Twice(kind, width=width), trials(0.01, epochs=3))
    (first,) = alone(Twice(kind, width=width), trials(0.01, epochs=1))
    (rest,) = alone(Twice(kind, width=width), trials(0.01, epochs=3, start=1, state=first.state))
    assert rest.metrics == whole.metrics[1:]
    assert_same(packed(Twice(kind), trials(0.02)), alone(Twice(kind), trials(0.02)),
                tolerance=SINGLE)  # fmt: skip


class Anew(Quantized):
    """Each epoch begins with a layer that is quantised anew."""

    def adapt(self, model, hp):
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.copy_(0.2 * normal(WIDTH, WIDTH, seed=5))
        model.second = quantized(layer, self.kind).to(CPU)


def test_a_layer_that_is_made_in_adapt(task):
    made = Anew(task.kind)
    (whole,) = alone(made, trials(0.01, epochs=3))
    (first,) = alone(made, trials(0.01, epochs=1))
    (rest,) = alone(made, trials(0.01, epochs=3, start=1, state=first.state))
    assert rest.metrics == whole.metrics[1:]


def test_two_layers_with_one_weight_in_8_bits_are_refused():
    model = Net("int8").to(CPU)
    other = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    other.weight = model.second.weight
    model.other = other
    with pytest.raises(TaskError, match="two layers in 8 bits have one weight"):
        settled(model)


class Louder(bnb.nn.Linear4bit):  # type: ignore[name-defined]
    def forward(self, x):
        return 2 * super().forward(x)


class Overridden(Quantized):
    def network(self, hp):
        model = Net("nf4")
        model.second.__class__ = Louder
        return model


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_layer_with_a_forward_of_its_own_is_trained_alone():
    task = Overridden()
    model = settled(task.model({}).to(CPU))
    frozen = FrozenTensors().adopt(model)
    batch = tuple(t[:5] for t in task.data({}).train)
    with pytest.raises((UnfusableError, RuntimeError)):  # the library knows no double precision
        dry_run(task, model, batch, frozen=frozen)


@pytest.mark.parametrize("kind", FORMATS)
def test_averages_leave_the_base_as_it_is(kind):
    task = Quantized(kind, width=LARGE)
    task.average = [th.EMA(0.5), th.SWA(start=2)]
    (whole,) = alone(task, trials(0.01, epochs=4))
    (first,) = alone(task, trials(0.01, epochs=2))
    (rest,) = alone(task, trials(0.01, epochs=4, start=2, state=first.state))
    assert rest.metrics == whole.metrics[2:]
    assert not any("second" in name for name in whole.state.tensors)
    backend = SoloBackend(task, device=CPU)
    backend.put(0, trials(0.01)[0].member)
    average = backend.trial.averaged_model("ema")
    assert address(average.second.weight) == address(backend.trial.model.second.weight)


@pytest.mark.parametrize("kind", FORMATS)
def test_packed_numbers_are_not_averaged_without_lazy_clones(kind, monkeypatch):
    monkeypatch.setattr("thrifty.pack._frozen.CAN_SHARE", False)
    task = Quantized(kind)
    task.average = th.EMA(0.9)
    (found,) = alone(task, trials(0.0))
    for metrics in found.metrics:
        assert metrics["ema_mse"] == pytest.approx(metrics["mse"], rel=1e-6)


def test_an_average_of_layers_that_are_made_in_adapt_leaves_other_trials_alone(task):
    made = Anew(task.kind)
    made.average = th.EMA(0.5)
    (wanted,) = alone(made, trials(0.01))
    assert wanted.error is None
    kept = SoloBackend(made, device=CPU)
    kept.put(0, trials(0.01)[0].member)
    before = kept.trial.model.second.weight.clone()
    alone(made, trials(0.02))
    assert torch.equal(kept.trial.model.second.weight, before)
    kept.trial.weights.check()


@pytest.mark.parametrize("kind", FORMATS)
def test_averages_keep_the_base_of_their_checkpoint(kind):
    tasks = [Quantized(kind, width=LARGE), Quantized(kind, width=LARGE, base=3)]
    for each in tasks:
        each.average = th.EMA(0.5)
    (whole,) = alone(tasks[0], trials(0.01, epochs=4))
    (first,) = alone(tasks[0], trials(0.01, epochs=2))
    (rest,) = alone(tasks[1], trials(0.01, epochs=4, start=2, state=first.state))
    assert rest.metrics == whole.metrics[2:]


def test_a_checkpoint_does_not_fit_another_base():
    (first,) = alone(Quantized(width=LARGE), trials(0.01, epochs=1))
    state = replace(first.state, base=None)
    trial = Trial(config={"lr": 0.01}, start=1, state=state)
    with pytest.raises(StateError, match=r"frozen parameter 'first\.weight' is not what it was"):
        SoloBackend(Quantized(width=LARGE, base=3), device=CPU).put(0, trial.member)


@pytest.mark.parametrize(("before", "after"), [("nf4", "nested"), ("nf4", "int8")])
def test_a_checkpoint_of_another_format_is_refused(before, after):
    (first,) = alone(Quantized(before), trials(0.01, epochs=1))
    trial = Trial(config={"lr": 0.01}, start=1, state=first.state)
    with pytest.raises(StateError, match="'second' is quantised in another way"):
        SoloBackend(Quantized(after), device=CPU).put(0, trial.member)


class Several(Quantized):
    """Its base follows a hyper-parameter."""

    def network(self, hp):
        return Net(self.kind, base=hp["base"])


@pytest.mark.parametrize("kind", FORMATS)
def test_two_bases_of_equal_shapes_stay_apart(kind):
    of = [Trial(config={"lr": 0.02, "base": base}) for base in (0, 0, 1, 1)]
    assert_same(packed(Several(kind), of), alone(Several(kind), of), tolerance=SINGLE)
    one, other = (settled(Net(kind, base=base).to(CPU)) for base in (0, 1))
    assert signature(one, attributes={}) != signature(other, attributes={})


class Writing(Quantized):
    """Each step changes a number of the base."""

    def loss(self, model, batch):
        model.second.weight.data.view(-1)[0] += 1
        return super().loss(model, batch)


def test_what_is_written_into_a_base_is_found(task):
    (found,) = alone(Writing(task.kind), trials(0.02))
    with pytest.raises(
        StateError, match=r"'second\.weight' of Writing\.model has changed in memory"
    ):
        raise found.error


def test_metrics_in_8_bits_are_those_of_each_trial_alone():
    """Inputs are rounded by the whole batch, with outliers."""

    class Outliers(Quantized):
        def inputs(self, num, seed):
            x = super().inputs(num, seed)
            x[0] *= 1e3
            return x

    of = trials(1e-4, 2e-4)
    task = Outliers("int8")
    task.eval_batch_size = 3
    assert_same(packed(task, of), alone(task, of), tolerance=1e-3)
    model = settled(task.model({}).to(CPU))
    frozen = FrozenTensors().adopt(model)
    batch = tuple(t[:5] for t in task.data({}).train)
    assert not dry_run(task, model, batch, frozen=frozen).fused_metrics
    model = settled(Net("nf4").to(CPU))
    frozen = FrozenTensors().adopt(model)
    assert dry_run(Quantized("nf4"), model, batch, frozen=frozen).fused_metrics


def test_the_library_says_once_what_it_does(caplog):
    model = settled(Net("int8").to(CPU)).eval()
    with torch.no_grad():
        for _ in range(3):
            model(normal(4, 6))
    assert sum("inputs will be cast" in record.message for record in caplog.records) <= 1


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = bnb.nn.EmbeddingNF4(16, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.table(x.abs().long().sum(1) % 16))


class Embedded(Toy):
    def network(self, hp):
        return Bare()


def test_what_the_library_cannot_save_is_refused():
    with pytest.raises(TaskError, match="the model's 'table' is a EmbeddingNF4, which"):
        SoloBackend(Embedded(), device=CPU).put(0, Trial(config={"lr": 0.01}).member)


class Doubled(Toy):
    """A parameter is a tensor that consists of others, as the weights that torchao quantises."""

    def network(self, hp):
        model = nn.Linear(6, 1)
        weight = TwoTensor(model.weight.detach(), model.weight.detach())
        model.weight = nn.Parameter(weight, requires_grad=False)
        return model


def test_weights_that_consist_of_other_tensors_are_refused():
    with pytest.raises(TaskError, match=r"'model\.weight' is a TwoTensor, a tensor that consists"):
        SoloBackend(Doubled(), device=CPU).put(0, Trial(config={"lr": 0.01}).member)
    with pytest.raises(TaskError, match="the top' is a TwoTensor"):
        pack_state(TwoTensor(torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize("kind", FORMATS)
def test_without_lazy_clones_checkpoints_hold_the_base(kind, monkeypatch):
    monkeypatch.setattr("thrifty.pack._frozen.CAN_SHARE", False)
    (whole,) = alone(Quantized(kind), trials(0.01, epochs=3))
    (first,) = alone(Quantized(kind), trials(0.01, epochs=1))
    other = Quantized(kind, base=3)
    (rest,) = alone(other, trials(0.01, epochs=3, start=1, state=first.state))
    assert rest.metrics == whole.metrics[1:]


def test_a_base_that_differs_between_rows_is_not_packed():
    task = Quantized()
    batch = tuple(t[:5] for t in task.data({}).train)
    with pytest.raises(UnfusableError, match="its quantised layers are not held once"):
        dry_run(task, settled(task.model({}).to(CPU)), batch, frozen=())


def test_a_model_that_was_evaluated_before_is_brought_back():
    model = Net("nf4").to(CPU)
    wanted = {name: t.clone() for name, t in quantized_entries(model).items()}
    with torch.no_grad():
        model.eval()(normal(4, 6))
    settled(model)
    assert torch.equal(model.second.weight, wanted["second.weight"])
    model.train()(normal(4, 6)).sum().backward()
    assert model.adapter.weight.grad.abs().sum() > 0


def test_a_settled_model_can_be_copied_and_stored_whole():
    model = settled(Net("int8").to(CPU))
    model.eval()(normal(4, 6))
    copy = deepcopy(model)
    assert type(copy.second.state) is type(model.second.state)
    assert "is_training" not in vars(copy.second.state)
    state = pickle.loads(pickle.dumps(model.second.state))
    assert type(state) is bnb.MatmulLtState
    assert torch.equal(state.SCB, model.second.state.SCB)


def test_layers_that_are_trained_or_not_quantised_yet_are_left_alone():
    assert layer_of(quantized(nn.Linear(4, 4), "nf4")) is None
    assert layer_of(quantized(nn.Linear(4, 4), "int8")) is None
    assert layer_of(bnb.nn.Linear8bitLt(4, 4).to(CPU)) is None, "it trains its weight"
    assert layer_of(nn.Linear(4, 4)) is None
    assert first_quantized(nn.Sequential(bnb.nn.Linear8bitLt(4, 4), nn.Linear(4, 4))) == ""
    for kind in FORMATS:
        assert first_quantized(nn.Sequential(quantized(nn.Linear(4, 4), kind))) == "0"
