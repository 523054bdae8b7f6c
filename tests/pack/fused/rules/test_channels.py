"""Images with one channel: their memory format depends on their strides alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.pack.fused.twin import check, group_of, normal, put
from thrifty.pack.fused._record import record


pytestmark = pytest.mark.usefixtures("device")


BATCH = 5


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))


def narrow_network():
    """Return a network that also has a single channel in the middle."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 1), nn.ReLU(), nn.Conv2d(1, 2, 3)
    )  # fmt: skip


def recorded(make, *, shared):
    """Record a step of one trial on one-channel images, including its backward pass."""
    group = group_of(1, channels_last=True)
    model = make()
    leaves = [p.detach().unsqueeze(0).clone().requires_grad_() for p in model.parameters()]
    images = torch.randn(BATCH, 1, 8, 8)

    def step():
        packed = copy.deepcopy(model)
        for (name, _), leaf in zip(list(model.named_parameters()), leaves, strict=True):
            put(packed, "_parameters", name, group.pack(leaf))
        out = group.first(packed(images if shared else group.pack(images.unsqueeze(0))))
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    return record(step, [images, *leaves])[0]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make", [network, narrow_network])
def test_what_is_computed_from_images_of_one_channel_lies_channels_last(make, shared):
    program = recorded(make, shared=shared)
    laid_out = [
        torch.empty_strided(shape, stride, device="meta")
        for call in program.calls
        if not call.function.is_view
        for shape, stride, _ in (program.meta[number] for number in call.outputs)
        if len(shape) == 4 and shape[0] == BATCH
    ]
    assert len(laid_out) >= 4
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in laid_out)
    assert all(t.stride(1) == 1 for t in laid_out)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make", [network, narrow_network])
def test_images_of_one_channel_channels_last(make, shared, size):
    check(
        lambda m, x: m(x),
        lambda s: [normal(BATCH, 1, 8, 8, seed=s, shared=shared, size=size)],
        make=make,
        size=size,
        channels_last=True,
    )
