"""Batch normalisation of uneven parts equals that of the whole batch."""

from __future__ import annotations

import copy
import pickle
import threading
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.hetero.memberships import ThreadCluster
from thrifty.core import HeteroError
from thrifty.hetero import WholeBatchNorm
from thrifty.hetero.training._model_state import SharedSums, whole_batch_norm


CHANNELS = 3
SHAPES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (4, 2), nn.BatchNorm3d: (2, 1, 3)}
PARTS = {"two": (9, 2), "three": (6, 1, 4), "one": (11,)}
exact = {"rtol": 1e-12, "atol": 1e-12}


def layer_of(kind, **options):
    """Return a layer with running statistics from one forward pass."""
    torch.manual_seed(0)
    layer = kind(CHANNELS, **options).double()
    with torch.no_grad():
        for value in layer.parameters():
            value.normal_()
        layer(torch.randn(5, CHANNELS, *SHAPES[kind], dtype=torch.double) + 2)
    return layer


def whole(layer, shared):
    """Return the layer, which from now on uses the statistics of the global batch."""
    whole_batch_norm(layer, shared)
    return layer


def batch_of(kind, seed=1, num=11):
    generator = torch.Generator().manual_seed(seed)
    shape = (num, CHANNELS, *SHAPES[kind])
    x, weight = (torch.randn(shape, generator=generator, dtype=torch.double) for _ in range(2))
    return 3 * x + 1, weight


def alone(layer, x, weight):
    x = x.clone().requires_grad_()
    out = layer(x)
    (out * weight).sum().backward()
    return out.detach(), x.grad


def in_parts(layer, parts, *batches):
    """Return each worker's layer, and its part's outputs and gradients; empty parts are shadows."""
    bounds = [0]
    for size in parts:
        bounds.append(bounds[-1] + size)

    def job(begin, end):
        def run(members):
            members.agree(step=0)
            shared = SharedSums(members.all_reduce)
            mine = whole(copy.deepcopy(layer), shared)
            before = copy.deepcopy(mine.state_dict())
            with shared.step(together=False):
                alone(mine, *batches[0])  # teaches a shadow which sums it must join
            mine.load_state_dict(before)
            mine.zero_grad()
            done = []
            for x, weight in batches:
                if begin == end:
                    shared.shadow()
                    continue
                with shared.step(together=True):
                    done.append(alone(mine, x[begin:end], weight[begin:end]))
            return done, mine

        return run

    names = [f"w{rank}" for rank in range(len(parts))]
    done = ThreadCluster().run({
        name: job(*bound) for name, bound in zip(names, pairwise(bounds), strict=True)
    })
    return [done[name] for name in names]


def assert_same_layers(workers, layer):
    """Assert that gradients sum to those of one process and all layers have its statistics."""
    for name, value in layer.named_parameters():
        grads = [dict(mine.named_parameters())[name].grad for _, mine in workers]
        total = sum(grad for grad in grads if grad is not None)
        torch.testing.assert_close(total, value.grad, **exact)
    for _, mine in workers:
        assert mine.state_dict().keys() == layer.state_dict().keys()
        for name, value in layer.named_buffers():
            torch.testing.assert_close(dict(mine.named_buffers())[name], value, **exact)


OPTIONS = {
    "plain": {},
    "average of all": {"momentum": None},
    "slow": {"momentum": 0.01, "eps": 0.1},
    "not affine": {"affine": False},
    "untracked": {"track_running_stats": False},
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_parts_are_the_whole_batch(kind, options, parts):
    layer = layer_of(kind, **options)
    batches = [batch_of(kind, seed) for seed in (1, 2)]
    workers = in_parts(layer, parts, *batches)
    layer.zero_grad()
    for step, (x, weight) in enumerate(batches):
        out, grad = alone(layer, x, weight)
        torch.testing.assert_close(torch.cat([done[step][0] for done, _ in workers]), out, **exact)
        torch.testing.assert_close(torch.cat([done[step][1] for done, _ in workers]), grad, **exact)
    assert_same_layers(workers, layer)


@pytest.mark.parametrize("momentum", [0.2, None])
@pytest.mark.parametrize(
    "removed",
    [["num_batches_tracked"], ["running_mean", "running_var"]],
    ids=["counter", "statistics"],
)
def test_removed_buffers_are_not_tracked_as_in_torch(removed, momentum):
    layer = layer_of(nn.BatchNorm1d, momentum=momentum)
    for name in removed:
        layer.register_buffer(name, None)
    batches = [batch_of(nn.BatchNorm1d, seed) for seed in (1, 2)]
    workers = in_parts(layer, (7, 4), *batches)
    for batch in batches:
        alone(layer, *batch)
    assert_same_layers(workers, layer)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_layer_without_weight_or_bias_trains_as_in_torch(name):
    layer = layer_of(nn.BatchNorm1d)
    layer.register_parameter(name, None)  # as ``bias=False`` does in newer versions of torch
    x, weight = batch_of(nn.BatchNorm1d)
    workers = in_parts(layer, (7, 4), (x, weight))
    layer.zero_grad()
    out, _ = alone(layer, x, weight)
    torch.testing.assert_close(torch.cat([done[0][0] for done, _ in workers]), out, **exact)
    assert_same_layers(workers, layer)


def test_one_value_per_channel_over_all_workers_is_refused_as_in_torch():
    """A worker without samples raises the same error instead of waiting for the others."""
    layer, (x, weight) = layer_of(nn.BatchNorm1d), batch_of(nn.BatchNorm1d)

    def job(num):
        def run(members):
            members.agree(step=0)
            shared = SharedSums(members.all_reduce)
            mine = whole(copy.deepcopy(layer), shared)
            with shared.step(together=False):
                alone(mine, x, weight)
            if not num:
                with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
                    shared.shadow()
            else:
                with (
                    shared.step(together=True),
                    pytest.raises(ValueError, match="more than 1 value per channel") as caught,
                ):
                    mine(x[:num])
            return str(caught.value)

        return run

    said = ThreadCluster().run({"a": job(1), "b": job(0)})
    assert said["a"] == said["b"]


def test_one_sample_with_several_values_per_channel_trains_as_in_torch():
    layer, (x, weight) = layer_of(nn.BatchNorm2d), batch_of(nn.BatchNorm2d)
    workers = in_parts(layer, (1, 0), (x[:1], weight[:1]))
    out, _ = alone(layer, x[:1], weight[:1])
    torch.testing.assert_close(workers[0][0][0][0], out, **exact)


def test_three_dimensions_and_frozen_weights():
    layer = layer_of(nn.BatchNorm3d).requires_grad_(False)
    x, weight = batch_of(nn.BatchNorm3d)
    workers = in_parts(layer, (9, 2), (x, weight))
    out, grad = alone(layer, x, weight)
    torch.testing.assert_close(torch.cat([done[0][0] for done, _ in workers]), out, **exact)
    torch.testing.assert_close(torch.cat([done[0][1] for done, _ in workers]), grad, **exact)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_worker_without_samples_keeps_the_statistics_of_the_others(momentum):
    layer = layer_of(nn.BatchNorm1d, momentum=momentum)
    batches = [batch_of(nn.BatchNorm1d, seed) for seed in (1, 2, 3)]
    workers = in_parts(layer, (7, 0, 4), *batches)
    layer.zero_grad()
    for x, weight in batches:
        alone(layer, x, weight)
    assert_same_layers(workers, layer)
    states = [mine.state_dict() for _, mine in workers]
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert all(torch.equal(state[name], states[0][name]) for state in states)


def test_several_layers_sum_in_the_order_of_the_others():
    """A shadow takes part in each sum of the forward and the backward pass."""

    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 5), nn.BatchNorm1d(5)
    ).double()

    def job(part):
        def run(members):
            members.agree(step=0)
            shared = SharedSums(members.all_reduce)
            net = copy.deepcopy(plain)
            whole_batch_norm(net, shared)
            before = copy.deepcopy(net.state_dict())
            with shared.step(together=False):
                net(x[:2]).square().sum().backward()
            net.load_state_dict(before)
            if not len(part):
                shared.shadow()
            else:
                with shared.step(together=True):
                    net(part).square().sum().backward()
            return net.state_dict()

        return run

    x, _ = batch_of(nn.BatchNorm1d)
    done = ThreadCluster().run({"a": job(x[:8]), "b": job(x[:0]), "c": job(x[8:])})
    assert all(torch.equal(done["a"][name], done["b"][name]) for name in done["a"])
    assert int(done["b"]["2.num_batches_tracked"]) == 1


def test_evaluation_is_the_plain_layer_s_and_sums_nothing():
    def refuse(tensor):
        raise AssertionError("a sum in evaluation")

    layer = layer_of(nn.BatchNorm2d).eval()
    shared = SharedSums(refuse)
    mine = whole(copy.deepcopy(layer), shared)
    assert not mine.training
    x, _ = batch_of(nn.BatchNorm2d)
    with shared.step(together=True):
        assert torch.equal(mine(x), layer(x))


def test_a_frozen_layer_without_statistics_uses_those_of_the_whole_batch():
    layer = layer_of(nn.BatchNorm1d, track_running_stats=False).eval()
    x, weight = batch_of(nn.BatchNorm1d)
    workers = in_parts(layer, (7, 4), (x, weight))
    out, _ = alone(layer, x, weight)
    torch.testing.assert_close(torch.cat([done[0][0] for done, _ in workers]), out, **exact)


def test_outside_of_a_step_it_is_the_plain_layer():
    def refuse(tensor):
        raise AssertionError("a sum outside of a step")

    layer = layer_of(nn.BatchNorm1d)
    mine = whole(copy.deepcopy(layer), SharedSums(refuse))
    x, _ = batch_of(nn.BatchNorm1d)
    assert torch.equal(mine(x), layer(x))
    assert torch.equal(mine.running_var, layer.running_var)


def test_a_rehearsal_sums_nothing():
    def refuse(tensor):
        raise AssertionError("a sum in a rehearsal")

    shared = SharedSums(refuse)
    mine = whole(layer_of(nn.BatchNorm1d), shared)
    x, weight = batch_of(nn.BatchNorm1d)
    with shared.step(together=False):
        out, _ = alone(mine, x, weight)
    torch.testing.assert_close(out, layer_of(nn.BatchNorm1d)(x), **exact)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
def test_states_can_be_exchanged_with_plain_layers(kind):
    layer = layer_of(kind)
    mine = whole(kind(CHANNELS).double(), SharedSums(None))
    mine.load_state_dict(layer.state_dict())
    plain = kind(CHANNELS).double()
    plain.load_state_dict(mine.state_dict())
    assert list(mine.state_dict()) == list(layer.state_dict())
    for name, value in layer.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)


def test_gradient_is_that_of_finite_differences():
    shared = SharedSums(None)
    mine = whole(layer_of(nn.BatchNorm1d), shared)
    x = batch_of(nn.BatchNorm1d, num=4)[0].requires_grad_()
    mine.track_running_stats = False  # gradcheck makes many passes
    with shared.step(together=True):
        assert torch.autograd.gradcheck(
            lambda x, weight, bias: torch.func.functional_call(
                mine, {"weight": weight, "bias": bias}, (x,)
            ),
            (x, mine.weight, mine.bias),
        )


def test_inputs_are_checked_as_by_the_plain_layer():
    for kind, wrong in ((nn.BatchNorm1d, (2, 3, 4, 5)), (nn.BatchNorm2d, (2, 3))):
        mine = whole(kind(CHANNELS), SharedSums(None))
        with pytest.raises(ValueError, match=r"expected .*D input"):
            mine(torch.zeros(wrong))


def test_layers_at_any_depth_sum_and_keep_their_parameters():
    net = nn.Sequential(
        nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm2d(2)), nn.LayerNorm(2)
    )
    parameters = list(net.parameters())
    shared = SharedSums(None)
    assert whole_batch_norm(net, shared) == 2
    assert isinstance(net[0], WholeBatchNorm)
    assert isinstance(net[1][1], WholeBatchNorm)
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_half_precision_goes_through_single_precision():
    """As in torch, bfloat16 inputs give bfloat16 outputs, with statistics in float32."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 3, generator=generator).bfloat16()
    plain, whole = nn.Sequential(nn.BatchNorm1d(3)), nn.Sequential(nn.BatchNorm1d(3))
    shared = SharedSums(None)
    whole_batch_norm(whole, shared)
    with shared.step(together=True):
        out = whole(x)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), plain(x).float(), atol=1e-2)
    assert torch.allclose(whole[0].running_mean, plain[0].running_mean, atol=1e-3)


def test_a_layer_that_stands_twice_counts_once():
    norm = nn.BatchNorm1d(3)
    net = nn.Sequential(norm, nn.Linear(3, 3), norm)
    assert whole_batch_norm(net, SharedSums(None)) == 1
    assert net[0] is net[2] is norm
    assert isinstance(norm, WholeBatchNorm)


class Held(nn.Module):
    """Calls a layer that it holds in a list, not as a module."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.steps = [norm]

    def forward(self, x):
        return self.steps[0](x)


@pytest.mark.parametrize("net", [Held, lambda norm: norm], ids=["in a list", "alone"])
def test_a_layer_sums_wherever_it_is_called_from(net):
    summed = []
    shared = SharedSums(summed.append)
    model = net(nn.BatchNorm1d(3))
    assert whole_batch_norm(model, shared) == 1
    with shared.step(together=True):
        model(torch.randn(4, 3))
    assert len(summed) == 2


def test_the_next_trainer_of_a_model_sums_with_its_own_workers():
    first, second = [], []
    net = nn.Sequential(nn.BatchNorm1d(3))
    whole_batch_norm(net, SharedSums(first.append))
    shared = SharedSums(second.append)
    assert whole_batch_norm(net, shared) == 1
    with shared.step(together=True):
        net(torch.randn(4, 3))
    assert (len(first), len(second)) == (0, 2)


class Activated(nn.BatchNorm1d):
    """Batch normalisation and an activation in one layer, as in timm."""

    def forward(self, x):
        return torch.relu(super().forward(x))


class Called(nn.BatchNorm1d):
    """Adds to the layer where it is called."""

    def __call__(self, x):
        return torch.relu(super().__call__(x))


def patched():
    layer = nn.BatchNorm1d(3)
    plain = layer.forward
    layer.forward = lambda x: 3 * plain(x)
    return layer


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: Activated(3), r"layer '1.0' \(Activated\) is batch .* `forward` of its own"),
        (lambda: Called(3), r"\(Called\) is batch normalisation with a `__call__` of its own"),
        (patched, r"\(BatchNorm1d\) is .* `forward` of its own.* or pass .*batch_norm='local'"),
        (nn.LazyBatchNorm1d, r"\(LazyBatchNorm1d\) has no shape yet; run the model on a batch"),
    ],
    ids=["forward", "call", "patched", "lazy"],
)
def test_layers_that_compute_in_their_own_way_are_refused(layer, said):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(layer()))
    with pytest.raises(HeteroError, match=said):
        whole_batch_norm(net, SharedSums(None))
    assert type(net[0]) is nn.BatchNorm1d


class Frozen(nn.BatchNorm1d):
    """Never trains its statistics, and accepts only inputs of two dimensions."""

    def train(self, mode=True):
        return super().train(False)

    def _check_input_dim(self, x):
        if x.dim() != 2:
            raise ValueError("a matrix, please")


def test_other_methods_of_a_subclass_keep_working():
    mine = whole(Frozen(3), SharedSums(None)).train()
    assert isinstance(mine, Frozen)
    assert not mine.training
    with pytest.raises(ValueError, match="a matrix, please"):
        mine(torch.zeros(2, 3, 4))


def test_hooks_keep_working_and_can_still_be_removed():
    layer = nn.BatchNorm1d(3)
    before = layer.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0] + 1,))
    after = layer.register_forward_hook(lambda module, inputs, out: 5 * out)
    plain, shared = copy.deepcopy(layer), SharedSums(None)
    whole(layer, shared)
    x = torch.randn(4, 3)
    with shared.step(together=True):
        torch.testing.assert_close(layer(x), plain(x))
    before.remove()
    after.remove()
    torch.testing.assert_close(layer.eval()(x), layer(x))
    assert not layer._forward_hooks


def test_parametrizations_keep_working():
    layer = nn.BatchNorm1d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    plain, shared = copy.deepcopy(layer), SharedSums(None)
    x = torch.randn(4, 3)
    whole(layer, shared)
    with shared.step(together=True):
        torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), plain(x))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_are_plain_layers(again):
    lock = threading.Lock()
    net = nn.Sequential(whole(nn.BatchNorm1d(3), SharedSums(lambda tensor: lock)))
    other = again(net)
    assert type(other[0]) is nn.BatchNorm1d
    assert torch.equal(other[0].running_mean, net[0].running_mean)
    assert other[0].running_mean is not net[0].running_mean
