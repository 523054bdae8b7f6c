"""Trials with one frozen base: kept once, computed once, and each trial's result its own."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.core import StateError, TaskError
from thrifty.integrations._object_graphs import _bytes as copied_bytes
from thrifty.pack import EMA, SWA, BlockOptions, FusedBackend, SoloBackend, UnfusableError
from thrifty.pack._frozen import (
    CAN_SHARE,
    FrozenTensors,
    address,
    bytes_of,
    cheap_copy,
    digest_of,
    has_views,
    is_same_memory,
    is_shared,
    snapshot,
    unshare_before_steps,
)
from thrifty.pack.fused._fusable import signature
from thrifty.pack.identity import content_digest
from thrifty.pack.task._sources import _content as data_content
from thrifty.pack.task._trial_stream import digest_of as batch_digest
from thrifty.pack.trial._weights import load_model
from thrifty.pack.verify import tensor_content
from thrifty.run._alone import epoch_plan
from thrifty.space import MultiStep, Step


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


DOUBLE = 1e-10
WIDTH = 160


class Net(nn.Module):
    """A frozen trunk of two layers and a trained head."""

    def __init__(self, *, between: nn.Module | None = None, base: int = 0) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), between or nn.Identity(), nn.Linear(WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            for n, parameter in enumerate(self.trunk.parameters()):
                parameter.copy_(0.1 * normal(*parameter.shape, seed=7 * base + n))
        self.trunk.requires_grad_(False)

    def forward(self, x):
        return self.head(self.trunk(x).tanh())


class Headed(Toy):
    dtype = torch.float64

    def network(self, hp):
        return Net(base=hp.get("base", 0))


class DroppingTrunk(Headed):
    def network(self, hp):
        return Net(between=nn.Dropout(hp.get("dropout", 0.3)))


class NormedTrunk(Headed):
    """Its batch normalisation updates running statistics although it is frozen."""

    def network(self, hp):
        return Net(between=nn.BatchNorm1d(WIDTH))


class Checkpointed(Headed):
    def loss(self, model, batch):
        x, y = batch
        hidden = checkpoint(model.trunk, x, use_reentrant=False).tanh()
        return F.mse_loss(model.head(hidden), y)

    def metrics(self, model, batch):
        x, y = batch
        return {"mse": F.mse_loss(model(x), y)}


class TiedAdapter(nn.Module):
    """A frozen table that is used twice, with an adapter on each use."""

    def __init__(self, scale=1.0) -> None:
        super().__init__()
        self.table = nn.Parameter(normal(WIDTH, 6, seed=3) / 6, requires_grad=False)
        self.into = nn.Parameter(torch.zeros(WIDTH, 6))
        self.out = nn.Linear(6, 1)
        self.scale = scale

    def forward(self, x):
        hidden = F.linear(x, self.table) + self.scale * F.linear(x, self.into)
        return self.out(hidden.tanh() @ self.table)


class Tied(Headed):
    def network(self, hp):
        return TiedAdapter(hp.get("scale", 1.0))


class Teacher(Headed):
    """A frozen copy that follows the trained network within the loss."""

    def network(self, hp):
        model = Net()
        model.teacher = nn.Linear(WIDTH, 1).requires_grad_(False)
        return model

    def loss(self, model, batch):
        x, y = batch
        with torch.no_grad():
            for mine, its in zip(model.teacher.parameters(), model.head.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
            aim = model.teacher(model.trunk(x).tanh())
        return F.mse_loss(model(x), y) + F.mse_loss(model(x), aim)


class Thawing(Headed):
    """The trunk's last layer is unfrozen by a schedule."""

    def adapt(self, model, hp):
        model.trunk[3].requires_grad_(hp.get("closed", 1.0) < 0.5)


class Freezing(Headed):
    """The head's hidden layer is trained for two epochs, then frozen."""

    def network(self, hp):
        model = Net()
        model.head = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1))
        return model

    def adapt(self, model, hp):
        model.head[0].requires_grad_(hp.get("open", 1.0) > 0.5)


class Overwriting(Headed):
    """``adapt`` writes into the frozen trunk."""

    def adapt(self, model, hp):
        with torch.no_grad():
            model.trunk[0].bias.fill_(hp.get("shift", 0.0))


def fused(task):
    return FusedBackend(task, device=here(), block=BlockOptions(size=8))


def check(task, configs, *, seeds=(0, 0, 1), epochs=3):
    """Check that packed trials equal those alone; return the back-end."""
    trials = [
        Trial(config={"lr": 0.05 / (k + 1), **config}, seed=seeds[k % len(seeds)], epochs=epochs)
        for k, config in enumerate(configs)
    ]
    backend = fused(task)
    found, wanted = together(backend, trials), alone(task, trials)
    for result in (*found, *wanted):
        for metrics in result.metrics:
            metrics.pop("train_loss")  # it is summed in the precision of the block
    assert_same(found, wanted, tolerance=DOUBLE)
    return backend


# -- one memory ----------------------------------------------------------------------------


def test_equal_frozen_tensors_have_one_memory():
    frozen, models = FrozenTensors(), [Net() for _ in range(3)]
    shared = [frozen.adopt(model) for model in models]
    assert frozen.num_bytes == sum(p.nbytes for p in models[0].trunk.parameters())
    assert all(each == shared[0] for each in shared)
    assert len({address(model.trunk[0].weight) for model in models}) == 1
    assert len({address(model.head.weight) for model in models}) == 3
    assert all(torch.equal(model.trunk[0].weight, Net().trunk[0].weight) for model in models)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data.add_(1),
        lambda p: p.numpy().fill(3.0),
        lambda p: nn.init.zeros_(p),
        lambda p: p.detach()[0].copy_(torch.ones(6)),
        lambda p: torch.utils.dlpack.from_dlpack(p.detach()).zero_(),
        lambda p: p.untyped_storage().fill_(0),
        lambda p: p.data.share_memory_().zero_(),
        lambda p: torch.mul(p.data, 2, out=p.data),
        lambda p: stepped(p, fused=True),
        lambda p: stepped(p, foreach=True),
    ],
    ids=[
        "data", "numpy", "init", "view", "dlpack", "storage", "shared", "out", "fused", "foreach",
    ],
)  # fmt: skip
def test_writing_gives_a_model_memory_of_its_own(write):
    frozen, models = FrozenTensors(), [Net() for _ in range(2)]
    shared = [frozen.adopt(model)["trunk.0.weight"] for model in models]
    write(models[0].trunk[0].weight)
    assert torch.equal(models[1].trunk[0].weight, Net().trunk[0].weight)
    assert not torch.equal(models[0].trunk[0].weight, Net().trunk[0].weight)
    assert [shared[k].is_in(models[k].trunk[0].weight) for k in range(2)] == [False, True]


def stepped(parameter, **options):
    parameter.requires_grad_().grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], **options).step()


@pytest.mark.parametrize("kind", [FusedBackend, SoloBackend])
def test_a_write_that_pytorch_does_not_see_is_an_error(kind, monkeypatch):
    """As on a GPU, where kernels for lists of tensors write into shared memory."""

    class Scaling(Headed):
        def adapt(self, model, hp):
            if hp.get("shift", 0.0):
                weight = model.trunk[0].weight
                if here().type == "cuda":
                    torch._foreach_mul_([weight.data], 2.0)
                else:
                    ctypes.memset(address(weight), 1, 8)

    monkeypatch.setattr("thrifty.pack._frozen._writes_are_unseen", lambda _: True)
    shifts = [MultiStep([0.0, 1.0], milestones=[1]), 0.0]
    trials = [Trial(config={"lr": 0.05, "shift": shift}, epochs=2) for shift in shifts]
    trials = trials[:1] if kind is SoloBackend else trials
    for result in together(kind(Scaling(), device=here()), trials):
        assert len(result.metrics) == 1, "the epoch before the write counts"
        assert isinstance(result.error, StateError)
        assert "'trunk.0.weight' of Scaling.model has changed in memory" in str(result.error)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_an_optimizer_writes_into_memory_of_its_own(options):
    """Kernels for lists of tensors on a GPU write into shared memory, unless it is unshared."""
    frozen, models = FrozenTensors(), [Net().to(here()) for _ in range(2)]
    shared = [frozen.adopt(model) for model in models]
    layer = models[0].trunk[0].requires_grad_()
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1, **options)
    unshare_before_steps(optimizer)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert not is_shared(layer.weight)
    assert is_shared(layer.bias), "nothing is written into it"
    assert torch.equal(models[1].trunk[0].weight.cpu(), Net().trunk[0].weight)
    assert [shared[k]["trunk.0.weight"].is_in(models[k].trunk[0].weight) for k in range(2)] == [
        False,
        True,
    ]


def test_tensors_of_equal_numbers_and_other_bits_stay_apart():
    frozen, models = FrozenTensors(), [Net() for _ in range(2)]
    for model, zero in zip(models, (0.0, -0.0), strict=True):
        model.trunk[0].bias.data.fill_(zero)
        frozen.adopt(model)
    assert len({address(model.trunk[0].bias) for model in models}) == 2


def test_a_model_without_frozen_parameters_is_left_alone():
    model = nn.BatchNorm1d(4)
    assert FrozenTensors().adopt(model) == {}
    assert not is_shared(model.running_mean)


def test_copies_and_digests_leave_shared_tensors_shared():
    frozen, model = FrozenTensors(), Net()
    shared = frozen.adopt(model)["trunk.0.weight"]
    copy = cheap_copy(model.trunk[0].weight.detach())
    assert shared.digest == digest_of(model.trunk[0].weight) == digest_of(copy)
    assert shared.is_in(model.trunk[0].weight)
    copy.zero_()
    assert shared.is_in(model.trunk[0].weight)


@pytest.mark.parametrize(
    "read",
    [tensor_content, content_digest, digest_of, data_content, batch_digest, copied_bytes],
    ids=["state", "identity", "base", "data", "batch", "copies"],
)
def test_whatever_compares_a_tensor_leaves_it_as_it_was(read):
    frozen, model = FrozenTensors(), Net()
    shared = frozen.adopt(model)["trunk.0.weight"]
    own = torch.ones(1000)
    for tensor in (own, model.trunk[0].weight.detach(), torch.ones(0), torch.tensor(1.5)):
        assert read(tensor) == read(tensor.clone())
    assert shared.is_in(model.trunk[0].weight)
    own.resize_(2000)  # what NumPy has seen cannot be resized, nor be shared later


class Scratch(nn.Module):
    """Has a buffer that grows with the batch."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 1)
        self.register_buffer("scratch", torch.zeros(1, 6), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            torch.tanh(self.frozen(x), out=self.scratch.resize_(x.shape))
        return self.head(self.scratch.clone())


class Growing(Toy):
    def network(self, hp):
        return Scratch()


def test_a_frozen_buffer_that_grows_is_refused_with_what_to_do():
    (result,) = together(SoloBackend(Growing(), device=here()), [Trial(config={"lr": 0.1})])
    with pytest.raises(TaskError, match="give it its full size in __init__"):
        raise result.error


# -- one computation -----------------------------------------------------------------------


def products(backend):
    """Return the shapes of the results of all matrix products of the training step."""
    (block,) = {id(b): b for b in backend.blocks.home.values()}.values()
    bound = next(b for b in block._programs._bound.values() if b.variant.training)
    program = bound.recorded.program
    return [
        tuple(program.meta[call.outputs[0]][0])
        for call in program.calls
        if call.function.name() in ("aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm")
    ]


def under_way(task, trials, *, epochs=1):
    """Return a back-end whose trials have trained some epochs and are still in their slots."""
    backend = fused(task)
    for slot, trial in enumerate(trials):
        backend.put(slot, trial.member)
    for epoch in range(epochs):
        plans = {
            slot: epoch_plan(backend, trial.timeline, epoch=epoch, slot=slot)
            for slot, trial in enumerate(trials)
        }
        done = set()
        while len(done) < len(trials):
            done |= backend.step(plans).keys()
            plans = {}
    return backend


def test_what_depends_on_the_batch_and_the_base_alone_is_computed_once():
    trials = [Trial(config={"lr": 0.01 * k}) for k in (1, 2, 3)]
    shapes = products(under_way(Headed(), trials))
    assert shapes.count((8, WIDTH)) == 2, "the two layers of the trunk, for all three trials"
    assert not any(shape[-1] == WIDTH and shape[0] == 3 and len(shape) == 3 for shape in shapes[:2])


class MostlyTrained(Headed):
    def network(self, hp):
        model = Net()
        model.head = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1))
        return model


def test_trials_on_other_batches_multiply_the_base_by_the_rows_of_all():
    trials = [Trial(config={"lr": 0.01 * k}, seed=k) for k in (1, 2, 3)]
    assert products(under_way(MostlyTrained(), trials)).count((24, WIDTH)) == 2


def test_trials_that_see_the_same_batches_have_a_block_if_most_is_computed_once_for_them():
    trials = [Trial(config={"lr": 0.01 * k}, seed=k // 2) for k in (2, 3, 4, 5)]
    backend = under_way(Headed(), trials)
    blocks = list({id(b): b for b in backend.blocks.home.values()}.values())
    assert [[t.seed for t in block.trials] for block in blocks] == [[1, 1], [2, 2]]
    for epoch, number in ((0, 3), (1, 2)):
        backend.put(9 + epoch, Trial(config={"lr": 0.1}, seed=1, start=epoch).member)
        assert len({id(b) for b in backend.blocks.home.values()}) == number
        backend.release(9 + epoch)
    assert_same(
        together(fused(Headed()), trials, at_once=3), alone(Headed(), trials), tolerance=DOUBLE
    )


def test_a_block_holds_the_base_once():
    def state_bytes(num):
        backend = under_way(Headed(), [Trial(config={"lr": 0.01 * (k + 1)}) for k in range(num)])
        (block,) = {id(b): b for b in backend.blocks.home.values()}.values()
        return sum(t.nbytes for t in block._state.tensors())

    base = sum(p.nbytes for p in Headed().model({}).trunk.parameters())
    assert state_bytes(3) < base


# -- results -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [Headed, DroppingTrunk, NormedTrunk, Checkpointed, Tied])
def test_packed_trials_equal_trials_alone(task):
    check(task(), [{}] * 4)


def test_dropout_rates_of_a_trunk_may_differ():
    check(DroppingTrunk(), [{"dropout": 0.1}, {"dropout": 0.4}, {}])


class ReadAsArray(Headed):
    """``adapt`` reads a frozen layer as an array, which PyTorch takes for writing."""

    def adapt(self, model, hp):
        model.trunk[0].weight.cpu().numpy().mean()


def test_reading_a_base_as_an_array():
    trials = [Trial(config={"lr": 0.05 / (k + 1)}) for k in range(3)]
    backend = fused(ReadAsArray())
    with contextlib.suppress(UnfusableError):  # such trials may be trained alone
        for slot, trial in enumerate(trials):
            backend.put(slot, trial.member)
    found, wanted = alone(ReadAsArray(), trials), alone(Headed(), trials)
    assert_same(found, wanted)


def test_two_bases_of_equal_shape_stay_apart():
    check(Headed(), [{"base": k % 2} for k in range(4)])
    trials = [Trial(config={"lr": 0.01, "base": k % 2}) for k in range(4)]
    backend = under_way(Headed(), trials, epochs=2)
    blocks = [backend.blocks.home[backend.trial(k)] for k in range(4)]
    assert blocks[0] is blocks[2] is not blocks[1] is blocks[3]
    assert all(block.structure.held for block in blocks)


def test_trials_that_all_have_another_base_are_packed_as_before():
    task = Headed()
    check(task, [{"base": k} for k in range(5)])
    backend = fused(task)
    for k in range(5):
        backend.put(k, Trial(config={"lr": 0.1, "base": k}).member)
    assert len({id(backend.blocks.home[backend.trial(k)]) for k in (2, 3, 4)}) == 1


def test_a_teacher_that_follows_is_each_trials_own():
    check(Teacher(), [{}] * 3)


def test_a_layer_that_is_unfrozen_half_way():
    opens = Step(1.0, [2], gamma=0.0)
    check(Thawing(), [{"closed": opens}, {"closed": opens}, {"closed": 1.0}], epochs=4)


def test_a_layer_that_is_frozen_half_way():
    check(Freezing(), [{"open": Step(1.0, [2], gamma=0.0)}, {"open": 1.0}], epochs=4)


def test_adapt_that_writes_into_the_base():
    check(Overwriting(), [{"shift": 0.5}, {"shift": 0.5}, {"shift": 0.1}])


# -- checkpoints ---------------------------------------------------------------------------


def test_a_checkpoint_names_the_base_and_holds_what_is_trained():
    task = Headed()
    (result,) = alone(task, [Trial(config={"lr": 0.05})])
    names = set(result.state.tensors)
    assert not any("trunk" in name for name in names)
    assert any("head.weight" in name for name in names)
    trained = sum(p.nbytes for p in task.model({}).head.parameters())
    assert sum(t.nbytes for t in result.state.tensors.values()) <= 1.1 * 2 * trained + 64


@pytest.mark.parametrize("backend", [SoloBackend, fused])
def test_a_trial_continues_from_a_checkpoint_without_the_base(backend):
    task, config = Headed(), {"lr": 0.05}
    (whole,) = together(backend(task), [Trial(config=config, epochs=4)])
    (first,) = together(backend(task), [Trial(config=config, epochs=2)])
    (rest,) = together(
        backend(Headed()), [Trial(config=config, epochs=4, start=2, state=first.state)]
    )
    assert rest.metrics == whole.metrics[2:]
    assert all(torch.equal(rest.state.tensors[n], t) for n, t in whole.state.tensors.items())


class Tabled(Headed):
    """A frozen buffer is as large as a layer, and one that steps change is not frozen."""

    def network(self, hp):
        model = Net()
        model.register_buffer("table", normal(WIDTH, WIDTH, seed=3))
        model.register_buffer("calls", normal(WIDTH, WIDTH, seed=4))
        return model

    def loss(self, model, batch):
        model.calls += 1
        return super().loss(model, batch) + 0 * model.table.sum() + 0 * model.calls.sum()


def test_a_large_buffer_that_is_not_changed_is_left_out_of_checkpoints():
    (whole,) = alone(Tabled(), [Trial(config={"lr": 0.05}, epochs=4)])
    (first,) = alone(Tabled(), [Trial(config={"lr": 0.05}, epochs=2)])
    assert "model.table" not in first.state.tensors
    assert "model.calls" in first.state.tensors
    assert "table" in first.state.base.tensors
    later = Trial(config={"lr": 0.05}, epochs=4, start=2, state=first.state)
    (rest,) = alone(Tabled(), [later])
    assert rest.metrics == whole.metrics[2:]


class Averaged(Headed):
    average = (EMA(0.5), SWA(start=2))


def test_averages_share_the_base():
    config = {"lr": 0.05}
    (whole,) = alone(Averaged(), [Trial(config=config, epochs=4)])
    (first,) = alone(Averaged(), [Trial(config=config, epochs=2)])
    (rest,) = alone(Averaged(), [Trial(config=config, epochs=4, start=2, state=first.state)])
    assert rest.metrics == whole.metrics[2:]
    assert not any("trunk" in name for name in whole.state.tensors)
    backend = SoloBackend(Averaged(), device=here())
    backend.put(0, Trial(config=config).member)
    backend.step({0: epoch_plan(backend, Trial(config=config).timeline, epoch=0, slot=0)})
    average = backend.trial.averaged_model("ema")
    assert address(average.trunk[0].weight) == address(backend.trial.model.trunk[0].weight)
    assert is_shared(average.trunk[0].weight)


class AveragedChanged(Averaged):
    def network(self, hp):
        return Net(base=5)


def test_averages_keep_the_base_of_their_checkpoint():
    config = {"lr": 0.05}
    (whole,) = alone(Averaged(), [Trial(config=config, epochs=4)])
    (first,) = alone(Averaged(), [Trial(config=config, epochs=2)])
    later = Trial(config=config, epochs=4, start=2, state=first.state)
    (rest,) = alone(AveragedChanged(), [later])
    assert rest.metrics == [pytest.approx(each, rel=DOUBLE) for each in whole.metrics[2:]]
    backend = SoloBackend(AveragedChanged(), device=here())
    backend.put(0, later.member)
    model, average = backend.trial.model, backend.trial.averaged_model("ema")
    with torch.no_grad():
        model.trunk[0].weight.zero_()
    assert average.trunk[0].weight.abs().sum() > 0, "it does not follow what is written"


class AveragedTurning(Averaged):
    """A frozen layer becomes its transpose, in the memory that it had."""

    def network(self, hp):
        model = Net()
        model.source = nn.Parameter(model.trunk[3].weight.detach().clone(), requires_grad=False)
        return model

    def adapt(self, model, hp):
        weight = model.source.detach()
        turned = weight.t() if hp["turned"] > 0.5 else weight
        model.trunk[3].weight = nn.Parameter(turned, requires_grad=False)


def test_an_average_follows_a_layer_that_becomes_its_transpose():
    config = {"lr": 0.05, "turned": MultiStep([0.0, 1.0], milestones=[2])}
    (whole,) = alone(AveragedTurning(), [Trial(config=config, epochs=3)])
    (first,) = alone(AveragedTurning(), [Trial(config=config, epochs=2)])
    last = Trial(config=config, epochs=3, start=2, state=first.state)
    (rest,) = alone(AveragedTurning(), [last])
    assert rest.metrics == [pytest.approx(each, rel=DOUBLE) for each in whole.metrics[2:]]
    backend = SoloBackend(AveragedTurning(), device=here())
    backend.put(0, Trial(config=config, epochs=3).member)
    for epoch in range(3):
        backend.step({0: epoch_plan(backend, last.timeline, epoch=epoch, slot=0)})
    model, average = backend.trial.model, backend.trial.averaged_model("ema")
    mean = average.trunk[3].weight
    assert not torch.equal(mean, model.source), "it has moved towards the transpose"
    assert (mean - model.trunk[3].weight).abs().max() < 0.2 * (mean - model.source).abs().max()


class AveragedHeadOnly(Averaged):
    """The state of its model leaves out the trunk."""

    def network(self, hp):
        model = Net()

        def leave_out(module, state, prefix, _):
            for name in [name for name in state if ".trunk." in f".{name}"]:
                del state[name]

        def tolerate(module, found):
            found.missing_keys[:] = [k for k in found.missing_keys if "trunk" not in k]

        model.register_state_dict_post_hook(leave_out)
        model.register_load_state_dict_post_hook(tolerate)
        return model


def test_an_average_of_a_model_whose_state_leaves_out_the_base():
    config = {"lr": 0.05}
    (whole,) = alone(AveragedHeadOnly(), [Trial(config=config, epochs=3)])
    (first,) = alone(AveragedHeadOnly(), [Trial(config=config, epochs=1)])
    last = Trial(config=config, epochs=3, start=1, state=first.state)
    (rest,) = alone(AveragedHeadOnly(), [last])
    assert rest.metrics == whole.metrics[1:]


class AveragedTeacher(Averaged):
    """Its frozen trunk moves in training, and so does its average."""

    def metrics(self, model, batch):
        return {"mse": super().loss(model, batch)}

    def loss(self, model, batch):
        with torch.no_grad():
            model.trunk[0].weight.mul_(0.99)
        return super().loss(model, batch)


@pytest.mark.parametrize("task", [Averaged, AveragedTeacher])
def test_averages_are_those_of_torch(task):
    backend = SoloBackend(task(), device=here())
    backend.put(0, Trial(config={"lr": 0.05}).member)
    trial = backend.trial
    wanted = AveragedModel(trial.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    update = trial.update

    def noted(batch):
        update(batch)
        wanted.update_parameters(trial.model)

    trial.update = noted
    for epoch in range(2):
        backend.step({
            0: epoch_plan(backend, Trial(config={"lr": 0.05}).timeline, epoch=epoch, slot=0)
        })
    found = dict(trial.averaged_model("ema").named_parameters())
    for name, tensor in wanted.module.named_parameters():
        assert torch.equal(found[name], tensor), name


class Changed(Headed):
    def network(self, hp):
        return Net(base=5)


def test_a_checkpoint_does_not_fit_another_base():
    (first,) = alone(Headed(), [Trial(config={"lr": 0.05}, epochs=1)])
    state = replace(first.state, base=None)  # of an earlier version
    trial = Trial(config={"lr": 0.05}, start=1, state=state)
    with pytest.raises(StateError, match=r"frozen parameter 'trunk\.0\.weight' is not what it was"):
        SoloBackend(Changed(), device=here()).put(0, trial.member)


def test_a_trial_that_was_loaded_shares_the_base_again():
    (first,) = alone(Headed(), [Trial(config={"lr": 0.05}, epochs=1)])
    backend = SoloBackend(Headed(), device=here())
    backend.put(0, Trial(config={"lr": 0.05}, start=1, state=first.state).member)
    assert is_shared(backend.model.trunk[0].weight)


@pytest.mark.parametrize("backend", [SoloBackend, fused])
def test_a_trial_keeps_the_base_of_its_checkpoint(backend):
    config = {"lr": 0.05}
    (whole,) = together(backend(Headed()), [Trial(config=config, epochs=4)])
    (first,) = alone(Headed(), [Trial(config=config, epochs=2)])
    (rest,) = together(
        backend(Changed()), [Trial(config=config, epochs=4, start=2, state=first.state)]
    )
    assert rest.metrics == [pytest.approx(each, rel=DOUBLE) for each in whole.metrics[2:]]
    assert not any("trunk" in name for name in rest.state.tensors)
    assert rest.state.base.digest == whole.state.base.digest


def test_a_layer_trained_before_it_was_frozen_is_in_the_checkpoint():
    trial = Trial(config={"lr": 0.05, "open": Step(1.0, [1], gamma=0.0)}, epochs=3)
    (result,) = alone(Freezing(), [trial])
    assert any("head.0.weight" in name for name in result.state.tensors)


def test_what_reads_a_model_leaves_it_shared():
    frozen, model = FrozenTensors(), Net()
    model.also = [model.trunk[0].weight]  # found as an attribute, by content
    shared = frozen.adopt(model)["trunk.0.weight"]
    signature(model, attributes={})
    content_digest(model)
    assert shared.is_in(model.trunk[0].weight)


def test_memory_of_an_array_is_left_alone():
    frozen, models, arrays = FrozenTensors(), [Net(), Net()], []
    for model in models:
        arrays.append(model.trunk[0].weight.detach().clone().numpy())
        model.trunk[0].weight.data = torch.from_numpy(arrays[-1])
        frozen.adopt(model)
    for k, (model, array) in enumerate(zip(models, arrays, strict=True)):
        array[:] = k + 7
        assert (model.trunk[0].weight == k + 7).all()


def test_without_lazy_clones_each_model_keeps_its_own(monkeypatch):
    monkeypatch.setattr("thrifty.pack._frozen.CAN_SHARE", False)
    frozen, models = FrozenTensors(), [Net() for _ in range(2)]
    assert [frozen.adopt(model) for model in models] == [{}, {}]
    weights = [model.trunk[0].weight for model in models]
    assert address(weights[0]) == weights[0].data_ptr() != address(weights[1])
    assert not is_shared(weights[0])
    check(Headed(), [{}] * 2)


@pytest.mark.parametrize(
    "view", [lambda p: p.detach()[:2], lambda p: p.numpy()[:2]], ids=["tensor", "array"]
)
def test_a_view_that_the_model_keeps_goes_on_seeing_its_parameter(view):
    frozen, models, views = FrozenTensors(), [Net() for _ in range(2)], []
    for model in models:
        views.append(view(model.trunk[0].weight))
        frozen.adopt(model)
    for k, (model, kept) in enumerate(zip(models, views, strict=True)):
        kept[:] = k + 7
        assert (model.trunk[0].weight[:2] == k + 7).all()


# -- loading -------------------------------------------------------------------------------


def lent():
    """Return a model with a frozen layer that it shares."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    FrozenTensors().adopt(model)
    return model


needs_sharing = pytest.mark.skipif(not CAN_SHARE, reason="models share no memory")


@needs_sharing
def test_loading_leaves_what_is_there_already_shared():
    model = lent()
    state = {**model.state_dict(), "1.weight": torch.zeros(1, 3)}
    load_model(model, state)
    assert is_shared(model[0].weight)
    assert not model[1].weight.any()
    load_model(model, {**state, "0.bias": torch.ones(3)})
    assert model[0].bias.tolist() == [1.0] * 3


@needs_sharing
def test_code_that_loads_a_state_itself_gets_all_of_it():
    model, seen = lent(), set()

    def note(module, state, *rest):
        seen.update(state)

    model.register_load_state_dict_pre_hook(note)
    load_model(model, model.state_dict())
    assert seen == {"0.weight", "0.bias", "1.weight", "1.bias"}


@needs_sharing
@pytest.mark.parametrize("change", [{"other": torch.ones(1)}, {"1.bias": None}])
def test_a_state_of_another_model_is_an_error(change):
    model = lent()
    state = {n: t for n, t in {**model.state_dict(), **change}.items() if t is not None}
    with pytest.raises(RuntimeError, match="key"):
        load_model(model, state)


@needs_sharing
def test_a_snapshot_of_a_shared_tensor_takes_no_memory_and_keeps_its_values():
    model = lent()
    before = snapshot(model[0].weight)
    assert is_same_memory(before, model[0].weight)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    assert not is_same_memory(before, model[0].weight)
    assert torch.allclose(before + 1.0, model[0].weight)
    own = snapshot(model[1].weight)
    assert torch.equal(own, model[1].weight)
    assert address(own) != address(model[1].weight)


@needs_sharing
def test_bytes_are_those_of_the_values_wherever_they_are():
    model = lent()
    for tensor in (model[0].weight, model[1].weight, model[0].weight.t(), torch.zeros(0)):
        wanted = tensor.detach().clone().numpy().tobytes()
        assert b"".join(bytes_of(tensor)) == wanted
    assert is_shared(model[0].weight)
    assert not has_views(model[1].weight)


class Loaded(Headed):
    """Its weights lie in a mapped file, as those of ``from_pretrained`` do."""

    def __init__(self, file, *, aside=False) -> None:
        self.file, self.aside = file, aside

    def network(self, hp):
        model = Net()
        model.load_state_dict(load_file(self.file), assign=True)
        model.trunk.requires_grad_(False)
        if self.aside:
            object.__setattr__(model, "aside", model.trunk[0].weight.detach())
        return model


@pytest.fixture
def saved(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(Net().double().state_dict(), file)
    return file


@needs_sharing
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells of mappings")
def test_tensors_of_a_mapped_file_are_shared_and_left_out_of_checkpoints(saved):
    task = Loaded(saved)
    of = [Trial(config={"lr": 0.05 * (k + 1)}, seed=k) for k in range(2)]
    backend = FusedBackend(task, device=here(), block=BlockOptions(size=2))
    for slot, trial in enumerate(of):
        backend.put(slot, trial.member)
    one, other = (backend.trial(slot) for slot in range(2))
    assert set(one.frozen) == {name for name, _ in Net().named_parameters() if "trunk" in name}
    assert all(one.frozen[name] is other.frozen[name] for name in one.frozen)
    saved.write_bytes(b"other content")  # what is shared is no part of the file any more
    assert torch.equal(one.model.trunk[0].weight, Net().double().trunk[0].weight)


@needs_sharing
def test_a_tensor_of_a_mapped_file_that_something_else_has_is_left_alone(saved):
    model = Loaded(saved, aside=True).network({})
    shared = FrozenTensors().adopt(model)
    assert "trunk.0.weight" not in shared
    assert "trunk.3.weight" in shared
