from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.depth import draws
from tests.pack.fused.twin import check, normal


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


KINDS = {
    1: (nn.Conv1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.ConvTranspose3d),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@given(data=st.data())
@settings(max_examples=draws(15, 60), deadline=None)
def test_every_convolution(data):
    num_spatial = data.draw(st.integers(1, 3))
    transposed = data.draw(st.booleans())
    groups = data.draw(st.sampled_from((1, 2)))
    options = {
        "kernel_size": data.draw(st.integers(1, 3)),
        "stride": data.draw(st.integers(1, 2)),
        "dilation": data.draw(st.integers(1, 2)),
        "groups": groups,
        "bias": data.draw(st.booleans()),
    }
    if transposed:
        options["padding"] = data.draw(st.integers(0, 1))
        if options["stride"] == 2:
            options["output_padding"] = data.draw(st.integers(0, 1))
    else:
        options["padding"] = data.draw(
            st.sampled_from((0, 1, "valid") if options["stride"] == 2 else (0, 1, "same"))
        )
        options["padding_mode"] = data.draw(st.sampled_from(("zeros", "circular", "reflect")))
        if isinstance(options["padding"], str) and options["stride"] == 2:
            options["padding_mode"] = "zeros"
    shape = (2, 2 * groups, *[7] * num_spatial)
    shared = data.draw(st.booleans())
    axis = data.draw(st.sampled_from((0, 1)))
    if data.draw(st.booleans()) and options.get("padding_mode") in (None, "zeros"):
        shape, axis = shape[1:], 0
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, axis=axis, shared=shared, size=2)],
        make=lambda: KINDS[num_spatial][transposed](2 * groups, 2 * groups, **options),
        size=2,
    )


@pytest.mark.parametrize("stride", [1, (2, 1)])
@pytest.mark.parametrize("padding", [0, (1, 2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 7, 6), (2, 7, 6)])
@pytest.mark.parametrize("most", [2**29, 2**10])
def test_convolutions_as_products(monkeypatch, stride, padding, bias, shape, most):
    """On a GPU, convolutions of few channels are products; elsewhere, they can be."""
    module = "thrifty.pack.fused.rules._channels"
    monkeypatch.setattr(f"{module}._prefers_products", lambda _: True)
    monkeypatch.setattr(f"{module}.MOST_COPIED", most)
    check(
        lambda m, x: m(x),
        lambda s: [normal(*shape, seed=s, axis=len(shape) - 3)],
        make=lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), stride=stride, padding=padding, bias=bias),
            nn.ReLU(),
            nn.Conv2d(3, 2, 1, bias=bias),
            nn.Dropout(0.3),
        ),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_several_layers_keep_the_layout(shared):
    check(
        lambda m, x: m(x).flatten(1),
        lambda s: [normal(2, 3, 8, 8, seed=s, shared=shared)],
        make=lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding="same"),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, groups=4),
            nn.ConvTranspose2d(4, 2, 2, stride=2),
        ),
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_channels_last(shared, training):
    """The channels-last memory format changes no numbers, including the dropout masks."""
    check(
        lambda m, x: (m[:9](x), m(x)),
        lambda s: [normal(2, 3, 9, 9, seed=s, shared=shared)],
        make=lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding="same", bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
            nn.GroupNorm(2, 4),
            nn.MaxPool2d(2),
            nn.InstanceNorm2d(4, affine=True),
            nn.Dropout2d(0.3),
            nn.Dropout(0.2),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16, 3),
        ),
        training=training,
        channels_last=True,
    )


def test_patches_in_channels_last():
    """Dropout works on a transposed convolution output, as in vision transformers."""

    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 3, 3)
            self.places = nn.Parameter(torch.zeros(1, 9, 4))
            self.dropout = nn.Dropout(0.3)

        def forward(self, x):
            return self.dropout(self.convolution(x).flatten(2).transpose(1, 2) + self.places)

    for channels_last in (False, True):
        check(
            lambda m, x: m(x),
            lambda s: [normal(2, 3, 9, 9, seed=s)],
            make=Patches,
            channels_last=channels_last,
        )
