"""A loss either trains uneven workers as one process, or a check during training refuses it."""

from __future__ import annotations

import copy
import logging
import random
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset, default_collate

from tests.hetero.memberships import ThreadCluster
from thrifty.core import DivergedError, HeteroError
from thrifty.hetero import HeteroOptions, HeteroTrainer, StepCurve
from thrifty.nn import GyroMLP, GyroSchedule
from thrifty.testing import VirtualClock

from .jobs import FEATURES, SAMPLES, Worker, distance, model, plain_with, sgd


pytestmark = pytest.mark.slow


SPEEDS = {"a": 1.0, "b": 3.0}
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.2], dtype=torch.double)


def labels(*, ignored=0, tokens=None):
    generator = torch.Generator().manual_seed(11)
    shape = (SAMPLES,) if tokens is None else (SAMPLES, tokens)
    y = torch.randint(0, 3, shape, generator=generator)
    if ignored:
        y.view(-1)[torch.randperm(y.numel(), generator=generator)[:ignored]] = -100
    x = torch.randn(*shape, FEATURES, generator=generator, dtype=torch.double)
    return TensorDataset(x, y)


def trained(loss, dataset, *, net=model, epochs=2, speeds=SPEEDS, dtype=torch.double, **options):
    """Return each worker's model and its reports after training together."""
    some = HeteroOptions.__dataclass_fields__.keys() & options.keys()
    hetero = {name: options.pop(name) for name in some}
    if dtype is not torch.double:
        dataset = TensorDataset(dataset.tensors[0].to(dtype), dataset.tensors[1])

    def job(speed, own):
        own_loss = deepcopy(loss)  # as in a process of its own; the check writes into its tensors

        def run(members):
            clock = VirtualClock()

            def timed(net, batch):
                clock.advance(speed * len(batch[0]))
                return own_loss(net, batch)

            trainer = HeteroTrainer(
                own, sgd(own), dataset, loss=timed, global_batch=16, seed=5, members=members,
                clock=clock, options=HeteroOptions(curve=StepCurve(sample_s=speed), **hetero),
                **options,
            )  # fmt: skip
            reports = list(trainer.run(epochs=epochs))
            assert len(speeds) == 1 or len(set(reports[0].sizes)) == len(set(speeds.values()))
            return own, [report.loss for report in reports]

        return run

    jobs = {name: job(speed, net().to(dtype)) for name, speed in speeds.items()}
    return ThreadCluster().run(jobs)


def refused(loss, dataset, **options):
    """Return the error message of each worker; all of them stop at the first step."""
    said = {}

    def ending(run, name):
        def job(members):
            with pytest.raises(HeteroError) as caught:
                run(members)
            said[name] = str(caught.value)

        return job

    net = options.pop("net", model)
    hetero = {n: options.pop(n) for n in ("batch_norm", "verify") if n in options}
    dtype = options.pop("dtype", torch.double)
    jobs = {}
    for name, speed in SPEEDS.items():
        own = net().to(dtype)
        # A comparison puts the tensors of a loss into double precision for a while, and these
        # workers are threads, so each has its own loss, as processes have.
        copied = copy.deepcopy(loss)

        def run(members, own=own, speed=speed, loss=copied):
            trainer = HeteroTrainer(
                own, sgd(own), dataset, loss=loss, global_batch=16, seed=5, members=members,
                options=HeteroOptions(curve=StepCurve(sample_s=speed), **hetero), **options,
            )  # fmt: skip
            next(trainer.run(epochs=1))

        jobs[name] = ending(run, name)
    ThreadCluster().run(jobs)
    return said


def alone(net, loss, dataset=None, **options):
    """Return a trainer without other workers."""
    return HeteroTrainer(
        net, sgd(net), dataset or labels(), loss=loss, global_batch=16,
        options=HeteroOptions(curve=StepCurve(sample_s=1.0)), **options,
    )  # fmt: skip


def cross_entropy(net, batch, **options):
    x, y = batch
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten(), **options)


def masked_mean(net, batch):
    """Return the mean over tokens with a label, written out by hand."""
    x, y = batch
    loss = F.cross_entropy(net(x).flatten(0, -2), y.clamp(min=0).flatten(), reduction="none")
    kept = (y >= 0).flatten()
    return (loss * kept).sum() / kept.sum()


def squared_error(net, batch):
    x, y = batch
    return F.mse_loss(net(x)[:, 0], y.to(x.dtype))


def contrastive(net, batch):
    out = F.normalize(net(batch[0]), dim=1)
    return F.cross_entropy(out @ out.t() * 5, torch.arange(len(out)))


def num_labels(batch):
    return (batch[1] >= 0).sum()


def sum_of_weights(batch):
    return CLASS_WEIGHTS[batch[1]].sum()


weighted = partial(cross_entropy, weight=CLASS_WEIGHTS)
summed = partial(cross_entropy, reduction="sum")


# --- losses that can be split


RIGHT = {
    "mean": (cross_entropy, labels(), {}),
    "squared error": (squared_error, labels(), {}),
    "as many tokens in each": (cross_entropy, labels(tokens=4), {}),
    "class weights": (weighted, labels(), {"weight": sum_of_weights}),
    "ignored labels": (cross_entropy, labels(ignored=20), {"weight": num_labels}),
    "masked tokens": (masked_mean, labels(tokens=4, ignored=90), {"weight": num_labels}),
    "sum": (summed, labels(), {"reduction": "sum"}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_gradient_is_that_of_one_process(name):
    loss, dataset, options = RIGHT[name]
    net, losses = plain_with(loss, dataset, epochs=2)
    for other, reported in trained(loss, dataset, **options).values():
        assert distance(other, net) < 1e-12
        assert reported == pytest.approx(losses, rel=1e-6)


def test_clipping_comes_after_the_division_by_the_weight():
    options = {"weight": num_labels, "clip_norm": 0.1}
    alone, together = (
        trained(masked_mean, labels(tokens=4, ignored=90), speeds=speeds, **options)
        for speeds in ({"a": 1.0}, SPEEDS)
    )
    # Norms are summed in single precision.
    assert distance(alone["a"][0], together["b"][0]) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_no_difference(dtype):
    trained(cross_entropy, labels(), dtype=dtype, epochs=1)


# --- losses that cannot be split


WRONG = {
    "class weights": (weighted, labels(), "weighted mean"),
    "ignored labels": (cross_entropy, labels(ignored=20), "weighted mean"),
    "masked tokens": (masked_mean, labels(tokens=4, ignored=90), "weighted mean"),
    "sum": (summed, labels(), "It is a sum: pass reduction='sum'"),
    "pairs": (contrastive, labels(), "pairs of samples cannot be split"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_whose_parts_do_not_add_up_is_refused(name):
    loss, dataset, hint = WRONG[name]
    said = refused(loss, dataset)
    assert said.keys() == SPEEDS.keys()
    (text,) = set(said.values())
    assert "the loss cannot be split over workers" in text
    assert hint in text


@pytest.mark.parametrize("name", ["class weights", "masked tokens", "sum", "pairs"])
def test_single_precision_hides_no_such_loss(name):
    loss, dataset, _ = WRONG[name]
    if name == "class weights":
        loss = partial(cross_entropy, weight=CLASS_WEIGHTS.float())
    dataset = TensorDataset(dataset.tensors[0].float(), dataset.tensors[1])
    assert any("differs" in text for text in refused(loss, dataset, dtype=torch.float32).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_difference_is_seen_in_double_precision(dtype):
    """A term of a thousandth of the loss is found even though the rest is a mean."""

    def almost(net, batch):
        out = net(batch[0])
        return cross_entropy(net, batch) + 1e-3 * out.mean(0).square().sum()

    x, y = labels().tensors
    net = model().to(dtype)
    trainer = alone(net, almost, TensorDataset(x.to(dtype), y))
    with pytest.raises(HeteroError, match="cannot be split"):
        next(trainer.run(epochs=1))


def test_weights_that_are_not_those_of_the_loss_are_refused():
    said = refused(weighted, labels(), weight=num_labels)
    assert any("`weight` returned 12, 4, 8 for the 12, 4, 8 samples" in t for t in said.values())


def test_a_mean_that_is_said_to_be_a_sum_is_refused():
    said = refused(cross_entropy, labels(), reduction="sum")
    assert any("leave out reduction='sum'" in text for text in said.values())


def test_a_loss_that_fails_for_some_shares_is_refused():
    def halves(net, batch):
        loss = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
        return loss.view(2, -1).mean()

    net = model()
    trainer = alone(net, halves)
    with pytest.raises(HeteroError, match="loss of 5 samples failed, while that of 16 did not"):
        next(trainer.run(epochs=1))


def test_all_workers_say_what_one_has_found():
    """All workers report an error that only one worker's private samples show."""

    def job(private):
        def run(members):
            net = model()
            trainer = HeteroTrainer(
                net, sgd(net), labels(), loss=cross_entropy, global_batch=32, members=members,
                private=private, options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
            )  # fmt: skip
            with pytest.raises(HeteroError, match=r"cannot be split.*\(found by worker b\)"):
                next(trainer.run(epochs=1))

        return run

    ThreadCluster().run({"a": job(None), "b": job(labels(ignored=30)), "c": job(None)})


def test_one_may_ask_for_each_worker_s_own_loss():
    trained(contrastive, labels(), verify=False)


def test_a_worker_alone_is_checked_too():
    """A single worker is checked too, because the same script may later run on more workers."""
    net = model()
    trainer = alone(net, contrastive)
    with pytest.raises(HeteroError, match="cannot be split"):
        next(trainer.run(epochs=1))


def test_nothing_is_updated_by_a_refused_step():
    net, states = model(norm=True), []
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = alone(net, contrastive)
    with pytest.raises(HeteroError):
        states.append(next(trainer.run(epochs=1)))
    assert not states
    after = net.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


# --- layers that use batch statistics


class OwnBatchNorm(nn.Module):
    """Normalises with handwritten batch statistics, which are not summed over workers."""

    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0, correction=0) + 1) if self.training else x


class Balanced(nn.Module):
    """A model that adds a product of two batch means in training, as experts are balanced."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x):
        out = self.net(x)
        share = out.softmax(1).mean(0)
        return out * (share * share).sum() if self.training else out


def with_layer(layer):
    net = model()
    net.insert(1, layer())
    return net


@pytest.mark.parametrize(
    "net", [partial(with_layer, OwnBatchNorm), Balanced], ids=["own batch norm", "balanced"]
)
def test_layers_that_mix_samples_are_refused(net):
    assert any("differs" in text for text in refused(cross_entropy, labels(), net=net).values())


@pytest.mark.parametrize("kind", ["global", "local"])
@pytest.mark.parametrize("tracked", [True, False])
def test_batch_normalisation_is_not_refused(kind, tracked):
    layer = partial(nn.BatchNorm1d, 8, track_running_stats=tracked)
    trained(cross_entropy, labels(), net=partial(with_layer, layer), batch_norm=kind)


class Relative(nn.BatchNorm1d):
    """Batch normalisation that subtracts the mean of its outputs, in a ``forward`` of its own."""

    def forward(self, x):
        out = super().forward(x)
        return out - out.mean(0, keepdim=True)


def test_the_own_forward_of_batch_normalisation_is_checked():
    net = partial(with_layer, partial(Relative, 8))
    said = refused(cross_entropy, labels(), net=net, batch_norm="local")
    assert any("differs" in text for text in said.values())


class Noisy(nn.Module):
    """A model that draws random numbers in many ways."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x):
        x = x + torch.randn_like(x) * torch.rand(len(x), 1, dtype=x.dtype, generator=self.own)
        x = x * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.8) / 0.8
        return x + x[torch.randperm(len(x))]


class NoisyByNumPy(nn.Module):
    """A model that draws a number for each sample from the global streams."""

    def forward(self, x):
        scale = np.random.rand(len(x)) + np.random.randint(1, 9, size=len(x))  # noqa: NPY002
        scale = scale + np.array([random.gauss(0, 1) for _ in x])
        order = np.random.permutation(len(x))  # noqa: NPY002
        return x * torch.from_numpy(scale).to(x)[:, None] + x[torch.from_numpy(order)]


class ByRow(nn.Module):
    """A model that draws one number at a time from its own stream."""

    def __init__(self):
        super().__init__()
        self.stream = __import__("random").Random(0)

    def forward(self, x):
        scale = [self.stream.random() if self.training else 1.0 for _ in x]
        return x * torch.tensor(scale, dtype=x.dtype)[:, None]


@pytest.mark.parametrize(
    "layer",
    [partial(nn.Dropout, 0.5), partial(nn.AlphaDropout, 0.5), nn.RReLU, Noisy, NoisyByNumPy, ByRow],
    ids=["dropout", "alpha dropout", "rrelu", "noise", "numpy", "rows"],
)
def test_draws_are_no_difference(layer):
    net = with_layer(layer)
    trainer = alone(net, cross_entropy)
    assert len(list(trainer.run(epochs=1))) == 4


@pytest.mark.parametrize("sequential", [True, False])
def test_gyro_dropout_is_no_difference(sequential):
    """Gyro dropout passes, because a sample's subnetwork follows from its index in the batch."""
    schedule = GyroSchedule(subnetworks=8, concurrent=4, total_steps=100)
    net = GyroMLP(
        FEATURES, [16, 8], 3, schedule=schedule, group_size=4, execution="sliced"
    ).double()
    net = net if sequential else nn.Sequential(*net)
    trainer = alone(net, cross_entropy)
    assert len(list(trainer.run(epochs=1))) == 4
    assert int(schedule.position) == 4
    assert net.training


@pytest.mark.parametrize("layer", [nn.Dropout, nn.RReLU, NoisyByNumPy, ByRow])
def test_draws_hide_no_loss_that_is_refused(layer):
    net = with_layer(layer)
    trainer = alone(net, contrastive)
    with pytest.raises(HeteroError, match="cannot be split"):
        next(trainer.run(epochs=1))


def mixed(samples):
    """Mix each sample with another one of the batch."""
    x, y = default_collate(samples)
    share = float(np.random.beta(1.0, 1.0))  # noqa: NPY002
    other = torch.from_numpy(np.random.permutation(len(x)))  # noqa: NPY002
    return share * x + (1 - share) * x[other], y


def test_a_batch_that_is_mixed_is_not_refused():
    trainer = alone(model(), cross_entropy, collate=mixed)
    assert len(list(trainer.run(epochs=1))) == 4


class Drawing:
    """A collate function that draws from a generator of its own."""

    def __init__(self, draw, *, kind):
        self.rng, self.draw = kind(0), draw

    def __call__(self, samples):
        x, y = default_collate(samples)
        return self.draw(x, self.rng), y


DRAWING = {
    "a number": lambda x, rng: x * rng.random(),
    "numbers": lambda x, rng: x + torch.tensor([[rng.random()] for _ in x], dtype=x.dtype),
}


@pytest.mark.parametrize("kind", [np.random.default_rng, random.Random])
@pytest.mark.parametrize("draw", DRAWING)
def test_draws_of_a_collate_function_from_its_own_generator_are_no_difference(draw, kind):
    collate = Drawing(DRAWING[draw], kind=kind)
    assert len(list(alone(model(), cross_entropy, collate=collate).run(epochs=1))) == 4
    trainer = alone(model(), contrastive, collate=Drawing(DRAWING[draw], kind=kind))
    with pytest.raises(HeteroError, match="cannot be split"):
        next(trainer.run(epochs=1))


def test_batches_that_draw_and_cannot_be_cut_are_not_checked_with_a_warning(caplog):
    def collate(samples, rng=np.random.default_rng(0)):  # noqa: B008 (one generator is meant)
        x, y = default_collate(samples)
        return x + torch.from_numpy(rng.random((len(x), 1))), y, torch.ones(3)

    def loss(net, batch):
        return cross_entropy(net, batch[:2])

    assert len(list(alone(model(), loss, collate=collate).run(epochs=1))) == 4
    assert any("`collate` draws from a generator of its own" in each for each in caplog.messages)


def test_the_functions_that_draw_are_those_of_before():
    before = np.random.rand, random.random
    next(alone(with_layer(NoisyByNumPy), cross_entropy).run(epochs=1))
    assert before == (np.random.rand, random.random)


def test_what_can_be_checked_in_evaluation_only_is_said(caplog):
    net = with_layer(ByRow)
    trainer = alone(net, cross_entropy)
    with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
        next(trainer.run(epochs=1))
    assert "checked in evaluation mode only" in caplog.text


# --- state that a pass leaves behind


class Centred(nn.Module):
    """A model that tracks the mean of its inputs in a buffer."""

    def __init__(self, *, used=True):
        super().__init__()
        self.used = used
        self.register_buffer("centre", torch.zeros(8, dtype=torch.double))

    def forward(self, x):
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - self.centre if self.used and not self.training else x


class Queue(nn.Module):
    """A model that keeps past inputs in a plain attribute and adds their mean."""

    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(1, 8, dtype=torch.double)

    def forward(self, x):
        out = x + self.queue.mean(0)
        self.queue = torch.cat([self.queue, x.detach()])[-20:]
        return out


class Scaled(nn.Module):
    """A model that tracks the size of its inputs in a Python number."""

    size = 1.0

    def forward(self, x):
        out = x / self.size
        self.size = 0.9 * self.size + 0.1 * float(x.detach().abs().mean())
        return out


class Criterion(nn.Module):
    """A criterion, outside the model, that tracks the outputs as self-distillation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.double))

    def forward(self, out, y):
        loss = F.cross_entropy(out - self.centre, y)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return loss


def of_criterion(made):
    def loss(net, batch):
        return made(net(batch[0]), batch[1])

    return loss


@pytest.mark.parametrize(
    ("layer", "name"), [(Centred, "1.centre"), (Queue, "1.queue"), (Scaled, "1.size")]
)
def test_what_follows_the_samples_is_refused(layer, name):
    said = refused(cross_entropy, labels(), net=partial(with_layer, layer))
    assert any(f"'{name}' in the model or the loss follows the samples" in t for t in said.values())


def test_a_criterion_that_follows_the_samples_is_refused():
    criterion = Criterion()
    trainer = alone(model(), of_criterion(criterion))
    with pytest.raises(HeteroError, match=r"'Criterion.centre' in the model or the loss follows"):
        next(trainer.run(epochs=1))


def test_a_buffer_that_nothing_depends_on_is_not():
    trained(cross_entropy, labels(), net=partial(with_layer, partial(Centred, used=False)))


class Clamping(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 3.0, dtype=torch.double))

    def forward(self, x):
        self.scale.data.clamp_(max=1.0)
        return x * self.scale


def test_a_parameter_that_a_forward_pass_changes_is_refused():
    said = refused(cross_entropy, labels(), net=partial(with_layer, Clamping))
    assert any("the forward pass changes parameter '1.scale'" in t for t in said.values())


class Counting(nn.Module):
    """A model that counts calls in every way except a buffer."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.net, self.seen = model(), []
        self.kept = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.kept += 1
        self.seen.append(len(x))
        return self.net(x)


GLOBAL_CALLS = 0


def test_a_check_leaves_no_trace():
    calls, sizes = 0, []

    def noting(net, batch):
        nonlocal calls
        global GLOBAL_CALLS
        calls += 1
        GLOBAL_CALLS += 1
        sizes.append(len(batch[0]))
        return cross_entropy(net, batch)

    net, before = Counting(), GLOBAL_CALLS
    trainer = alone(net, noting)
    stream = torch.get_rng_state()
    list(trainer.run(epochs=1))
    assert calls == GLOBAL_CALLS - before == net.calls == int(net.kept) == 4
    assert sizes == net.seen == [16, 16, 16, 12]
    assert torch.equal(torch.get_rng_state(), stream)
    assert {p.dtype for p in net.parameters()} == {torch.double}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["old", "parametrized"])
def test_normalised_weights_are_trained_as_by_one_process(kind):
    """Normalised weights pass the check, although a pass changes buffers or plain attributes."""

    def net():
        made = model()
        spectral, weight = (
            (nn.utils.spectral_norm, nn.utils.weight_norm)
            if kind == "old"
            else (parametrizations.spectral_norm, parametrizations.weight_norm)
        )
        torch.default_generator.manual_seed(0)
        spectral(made[0])
        weight(made[2])
        return made.double()

    expected, _ = plain_with(cross_entropy, labels(), epochs=2, net=net())
    for other, _ in trained(cross_entropy, labels(), net=net).values():
        assert distance(other, expected) < 1e-10


# --- weights


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_finite_number(value):
    net = model()
    trainer = alone(net, cross_entropy, weight=lambda batch: value)
    with pytest.raises(HeteroError, match=f"`weight` returned {value} for a batch of 16 samples"):
        next(trainer.run(epochs=1))


def test_a_sum_has_no_weights():
    net = model()
    with pytest.raises(HeteroError, match="`weight` belongs to a mean"):
        alone(net, summed, weight=num_labels, reduction="sum")


def test_a_reduction_is_a_mean_or_a_sum():
    net = model()
    with pytest.raises(HeteroError, match="`reduction` must be 'mean' or 'sum', got 'max'"):
        alone(net, summed, reduction="max")


def sparse_labels(*, at):
    """Return data of which only some samples have a label."""
    x, y = labels().tensors
    y = torch.full_like(y, -100)
    y[at] = 1
    return TensorDataset(x, y)


def test_a_share_without_weight_adds_nothing():
    """A share without weight adds nothing, even if its loss is NaN as all samples are ignored."""
    dataset = sparse_labels(at=slice(0, SAMPLES, 7))
    net, _ = plain_with(masked_mean, dataset, epochs=1)
    for other, _ in trained(masked_mean, dataset, weight=num_labels, epochs=1).values():
        assert distance(other, net) < 1e-12


def test_a_batch_without_weight_diverges_as_in_one_process():
    with pytest.raises(DivergedError, match="the loss of step 1 is nan"):
        trained(masked_mean, sparse_labels(at=slice(0, 0)), weight=num_labels, speeds={"a": 1.0})


def test_a_share_without_weight_cannot_take_part_in_batch_normalisation():
    def job(members):
        net = model(norm=True)
        trainer = HeteroTrainer(
            net, sgd(net), sparse_labels(at=slice(0, 0)), loss=masked_mean, weight=num_labels,
            global_batch=16, members=members, options=HeteroOptions(curve=StepCurve(sample_s=1.0)),
        )  # fmt: skip
        with pytest.raises(HeteroError, match="weight 0, and batch normalisation"):
            next(trainer.run(epochs=1))

    ThreadCluster().run({"a": job})


# --- when checks happen


def test_a_loss_that_changes_its_mind_is_found_out(monkeypatch):
    """Checks continue at random steps, so a loss that changes later is found."""
    monkeypatch.setattr("thrifty.hetero._loss_check._LEAST_GAP", 3)
    net, wrong = model(), []

    def changing(net, batch):
        return (weighted if wrong else cross_entropy)(net, batch)

    trainer = alone(net, changing, clock=VirtualClock())
    reports = trainer.run(epochs=10)
    wrong += [next(reports), next(reports)]
    with pytest.raises(HeteroError, match="cannot be split"):
        list(reports)
    assert 2 < trainer.steps < 9


def test_checks_are_in_no_time_that_a_worker_tells():
    clock = VirtualClock()
    net = model()

    def timed(net, batch):
        clock.advance(float(len(batch[0])))
        return cross_entropy(net, batch)

    trainer = alone(net, timed, clock=clock)
    first, second, *_ = list(trainer.run(epochs=1))
    assert (first.busy_s, first.step_s) == ((16.0,), 16.0)
    assert first.check_s == 32.0  # a whole batch and its parts
    assert second.check_s == 0.0


def test_it_is_checked_again_when_workers_are_others():
    cluster = ThreadCluster()
    cluster.kill("b", after=8)
    team = {name: Worker(lambda size, step: float(size)) for name in "abc"}
    done = cluster.run({name: worker.job(4) for name, worker in team.items()})
    checked = [report.step for report in done["a"].reports if report.check_s]
    (changed,) = [r.step for r in done["a"].reports[1:] if r.events]
    assert checked == [1, changed]
