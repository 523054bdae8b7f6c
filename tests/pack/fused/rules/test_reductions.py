from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.pack.fused.twin import check, normal, refused
from thrifty.pack.fused.rules._tensor_operations import OTHERS


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


ROWS = (5, 2, 4)


@pytest.mark.sample(20)
@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.sum(),
        lambda x: x.mean(),
        lambda x: torch.sum(x),
        lambda x: torch.mean(x, 1),
        lambda x: x.sum((0, 2)),
        lambda x: x.mean((0, -1), keepdim=True),
        lambda x: x.mean(dim=0),
        lambda x: x.sum(dim=-1, keepdim=True),
        lambda x: x.sum(axis=1),
        lambda x: x.mean(axis=(1, 2)),
        lambda x: x.round().sum(dtype=torch.float32),
        lambda x: x.sum().sum() + x.mean().mean(),
        lambda x: torch.max(x, x.flip(0)),
        lambda x: torch.linalg.vector_norm(x, dim=1),
    ],
)
def test_sums_and_means(axis, reduce):
    check(lambda m, x: reduce(x), lambda s: [normal(4, 3, 5, seed=s, axis=axis)])


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.mean(),
        lambda x: x.sum(),
        lambda x: torch.sum(x, 0),
        lambda x: x.sum((0, 1)),
        lambda x: x.mean(0),
        lambda x: x.mean(dim=(0, 1), keepdim=True),
        lambda x: x.mean(axis=-2),
        lambda x: x.sum(1).mean(),
        lambda x: x.mean(1).sum(),
        lambda x: x.amax(1).mean(),
        lambda x: x.logsumexp(-1).mean(),
        lambda x: F.softmax(x, 1).pow(2).mean(),
        lambda x: x.max(1).values.mean(),
        lambda x: x.sort().values.cumsum(1).mean(),
        lambda x: torch.max(x, -x).mean(),
        lambda x: x.norm(2, 1).mean(),
        lambda x: x.topk(2).values.mean(),
    ],
)
def test_batches_that_differ_in_size(reduce):
    check(lambda m, x: reduce(torch.exp(x)), lambda s: [normal(5, 3, seed=s)], num_rows=ROWS)


@pytest.mark.parametrize(
    "call",
    [
        *[
            lambda x, n=n: getattr(x, n)()
            for n in ("amax", "amin", "all", "any", "max", "median", "prod", "std", "var")
        ],
        *[
            lambda x, n=n: getattr(x, n)(0)
            for n in ("argmax", "cumsum", "cumprod", "logsumexp", "sort", "softmax")
        ],
        lambda x: x.max(dim=0),
        lambda x: x.topk(2, 0),
        lambda x: x.norm(),
        lambda x: x.std(unbiased=False),
        lambda x: x.std(False),
        lambda x: torch.var_mean(x, dim=(0, 1)),
        lambda x: F.softmax(x, dim=0),
        lambda x: torch.linalg.vector_norm(x),
    ],
)  # fmt: skip
def test_what_mixes_padding_with_rows_is_refused(call):
    refused(
        "over the rows of batches that differ in size",
        lambda m, x: call(x),
        normal(5, 3),
        num_rows=ROWS,
        batch=5,
    )


@pytest.mark.parametrize("call", [lambda x: x.view(-1).sum(), lambda x: x.flatten().mean()])
def test_rows_that_were_merged_are_refused(call):
    refused(
        "a sum over 15 rows, a multiple", lambda m, x: call(x), normal(5, 3), num_rows=ROWS, batch=5
    )


def test_every_name_is_a_function():
    for name in OTHERS:
        assert any(hasattr(home, name) for home in (torch, torch.linalg, F)), name
