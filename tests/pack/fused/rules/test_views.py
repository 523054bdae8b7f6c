from __future__ import annotations

import pytest
import torch

from tests.pack.fused.twin import check, normal


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


@pytest.mark.sample(60)
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.reshape(4, 15),
        lambda x: x.reshape(4, -1),
        lambda x: x.contiguous().view(-1, 5),
        lambda x: x.reshape((12, 5)),
        lambda x: x.reshape(torch.Size([60])),
        lambda x: torch.reshape(x, (2, 2, 3, 5)),
        lambda x: torch.reshape(x, shape=(-1,)),
        lambda x: x.flatten(),
        lambda x: x.flatten(1),
        lambda x: torch.flatten(x, 0, 1),
        lambda x: torch.flatten(x, start_dim=-2),
        lambda x: x.sum().flatten(),
        lambda x: x.sum().reshape(1, 1),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x[1],
        lambda x: x[:, 0],
        lambda x: x[..., 1:3],
        lambda x: x[:, None, :, [0, 2]],
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: torch.cat([x, x[:, :1]], 1),
        lambda x: torch.stack([x, 2 * x], -1),
        lambda x: tuple(x.chunk(2)),
        lambda x: tuple(torch.split(x, [1, 2], 1)),
        lambda x: tuple(x.unbind(-1)),
        lambda x: tuple(iter(x)),
        lambda x: x.expand(2, 4, 3, 5),
        lambda x: x.repeat(2, 1, 1),
        lambda x: x.view_as(x),
        lambda x: x.unflatten(2, (5, 1)),
        lambda x: torch.roll(x, 1, 0),
        lambda x: x.flip(0),
        lambda x: x.tril(),
        lambda x: torch.einsum("bij,bkj->bik", x, x),
        lambda x: torch.bmm(x, x.mT),
        lambda x: x @ x.transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2)),
        lambda x: torch.nn.functional.interpolate(x, scale_factor=2),
        lambda x: torch.nn.functional.softmax(x, -1),
        lambda x: torch.nn.functional.normalize(x, dim=-1),
        lambda x: x.max(-1).values,
        lambda x: x.gather(1, x.argmax(1, keepdim=True)),
        lambda x: torch.nn.functional.one_hot(x.argmax(1), 3),
    ],
)  # fmt: skip
def test_changes_of_shape(axis, change):
    check(lambda m, x: change(x), lambda s: [normal(4, 3, 5, seed=s, axis=axis)])


def test_another_type_of_the_same_bits():
    check(lambda m, x: x.view(torch.int64), lambda s: [normal(4, 3, seed=s, axis=1)])


def test_len_and_size():
    def forward(module, x):
        assert (len(x), x.dim(), x.numel(), torch.numel(x)) == (4, 2, 12, 12)
        assert x.size() == (4, 3)
        assert x.size(-1) == 3
        assert torch.is_floating_point(x)
        assert not torch.is_complex(x)
        return x + x.shape[0]

    check(forward, lambda s: [normal(4, 3, seed=s, axis=1)])
