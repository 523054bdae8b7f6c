"""What is proved of a function of a batch is true of it, and what is true is proved."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from thrifty.pack.fused._record import record
from thrifty.pack.fused._samplewise import PerSample, Shared, kinds_of, num_operations


pytestmark = pytest.mark.slow


NUM = 3
SHAPE = (NUM, 4, 6)

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first": lambda x: x,
    "second": lambda x: x.transpose(0, 1),
    "last": lambda x: x.permute(1, 2, 0),
    "merged": lambda x: x.reshape(-1, x.shape[-1]),
}
"""Where the samples are; in ``merged``, each has several rows that follow one another."""


@cache
def normal(*shape, seed=0):
    """Return numbers that are the same each time, and drawn before a function is recorded."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def pooled(x, pool):
    return pool(x[:, None])[:, 0]


def attended(x, *, mask=None, own_mask=False):
    q = x[:, None]
    if own_mask:
        mask = (q[..., :1] > 0).expand(*q.shape[:3], q.shape[2]) | True
    return F.scaled_dot_product_attention(q, q * 2, q + 1, attn_mask=mask)


def normed(x, *, training):
    size = x.shape[1]
    return F.batch_norm(x, normal(size), normal(size).exp(), training=training)


def places(x):
    """Return places in the last dimension that depend on values."""
    return (x > 0).long()


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": torch.relu,
    "long": lambda x: (x * 10).long(),
    "clone": torch.clone,
    "maximum": lambda x: torch.maximum(x, -x),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "masked_fill by a mask for all": lambda x: x.masked_fill(normal(*x.shape) > 0, 1.0),
    "add a row": lambda x: x + normal(x.shape[-1]),
    "add a column": lambda x: x + normal(x.shape[-2], 1),
    "add a number each": lambda x: x + normal(x.shape[0], *[1] * (x.dim() - 1)),
    "add ones": lambda x: x + torch.ones(x.shape, dtype=x.dtype),
    "add expanded": lambda x: x + normal(1, x.shape[-1]).expand(x.shape[-2:]),
    "add unsqueezed": lambda x: x + torch.ones(x.shape[-1], dtype=x.dtype).unsqueeze(0),
    "add a part": lambda x: x + torch.full((2 * x.shape[-1],), 2.0)[: x.shape[-1]],
    "add what is made of uniform": lambda x: x + torch.ones(x.shape[-1]).neg().to(x.dtype),
    "add itself turned": lambda x: x + x.flip(0),
    "outer": lambda x: x.unsqueeze(-1) * x.unsqueeze(-2),
    "outer across": lambda x: x.unsqueeze(0) * x.unsqueeze(1),
    "copy": lambda x: torch.zeros_like(x).copy_(x),
    "zeros": torch.zeros_like,
    "less the mean of all": lambda x: x - x.mean(),
    "mse": lambda x: F.mse_loss(x, x * 2),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "all of it": torch.sum,
    "view as one": lambda x: x.contiguous().view(-1),
    "view in two": lambda x: (
        x.contiguous().view(*x.shape[:-1], x.shape[-1] // 2, 2)
        if x.shape[-1] % 2 == 0
        else x.contiguous().view(2, -1)
    ),
    "flatten the first": lambda x: x.flatten(0, 1),
    "flatten the last": lambda x: x.flatten(-2),
    "t": lambda x: x.flatten(1).t(),
    "permute": lambda x: x.permute(*reversed(range(x.dim()))),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "squeeze the first": lambda x: x.unsqueeze(0).squeeze(0),
    "squeeze the last": lambda x: x[..., :1].squeeze(-1),
    "squeeze what is long": lambda x: x.squeeze(1),
    "squeeze all": lambda x: x.unsqueeze(1).squeeze(),
    "every other one": lambda x: x[..., ::2],
    "all but one": lambda x: x[1:],
    "split": lambda x: x.split(2, -1),
    "split by sizes": lambda x: x.split([1, x.shape[1] - 1], 1),
    "unbind": lambda x: x.unbind(1),
    "roll over all": lambda x: x.roll(1),
    "glu": lambda x: F.glu(torch.cat([x, x], -1), -1),
    "join with zeros": lambda x: torch.cat([x, torch.zeros_like(x)], -1),
    "join with others": lambda x: torch.cat([x, normal(*x.shape)], -1),
    "join with the empty": lambda x: torch.cat([torch.zeros(0, dtype=x.dtype), x], -1),
    "join across": lambda x: torch.cat([x, x.flip(0)], -1),
    "linear": lambda x: F.linear(x, normal(5, x.shape[-1]), normal(5)),
    "linear of rows": lambda x: F.linear(x.flatten(0, -2), normal(5, x.shape[-1]), normal(5)),
    "mm from the left": lambda x: normal(5, len(x)) @ x.flatten(1),
    "addmm": lambda x: torch.addmm(normal(5), x.flatten(1), normal(x.flatten(1).shape[1], 5)),
    "addmm of each": lambda x: torch.addmm(
        normal(len(x), 5), x.flatten(1), normal(x.flatten(1).shape[1], 5)
    ),
    "addmm of its own": lambda x: torch.addmm(
        x.flatten(1)[:, :5], x.flatten(1), normal(x.flatten(1).shape[1], 5)
    ),
    "gram": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "bmm": lambda x: x @ x.transpose(-1, -2),
    "bmm with each": lambda x: torch.bmm(x, normal(len(x), x.shape[-1], 2)),
    "bmm with all": lambda x: torch.bmm(x, normal(1, x.shape[-1], 2).expand(len(x), -1, -1)),
    "bmm from the left": lambda x: torch.bmm(normal(len(x), 2, x.shape[1]), x),
    "baddbmm": lambda x: torch.baddbmm(normal(1, 1, x.shape[1]), x, x.transpose(1, 2)),
    "conv1d": lambda x: F.conv1d(x, normal(2, x.shape[1], 3), normal(2)),
    "conv2d": lambda x: F.conv2d(x[:, None], normal(2, 1, 2, 2)),
    "conv by its own weights": lambda x: F.conv1d(x, x[:, :, :2]),
    "max_pool2d": lambda x: pooled(x, lambda y: F.max_pool2d(y, 2)),
    "avg_pool2d": lambda x: pooled(x, lambda y: F.avg_pool2d(y, 2)),
    "interpolate": lambda x: pooled(x, lambda y: F.interpolate(y, scale_factor=2.0)),
    "reflect": lambda x: pooled(x, lambda y: F.pad(y, (1, 1, 1, 1), mode="reflect")),
    "pad the last": lambda x: F.pad(x, (1, 1)),
    "pad two": lambda x: F.pad(x, (0, 0, 1, 1)),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], normal(x.shape[-1])),
    "layer_norm of two": lambda x: F.layer_norm(x, x.shape[-2:]),
    "layer_norm by itself": lambda x: F.layer_norm(x, x.shape[-1:], x.flatten(0, -2)[0]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], normal(x.shape[-1])),
    "group_norm": lambda x: F.group_norm(x, 2 if x.shape[1] % 2 == 0 else 1),
    "batch_norm": lambda x: normed(x, training=False),
    "batch_norm in training": lambda x: normed(x, training=True),
    "embedding": lambda x: F.embedding(places(x), normal(2, 5)),
    "embedding of its own": lambda x: F.embedding(places(x), x.flatten(0, -2)),
    "a table": lambda x: normal(2, 5)[places(x)],
    "columns of a table": lambda x: normal(5, 2)[:, places(x)],
    "two indices": lambda x: x[torch.tensor([0, 1]), torch.tensor([1, 0])],
    "some of the first": lambda x: x[torch.tensor([2, 0])],
    "some of the last": lambda x: x[..., torch.tensor([2, 0])],
    "some in a square": lambda x: x[:, torch.tensor([[1, 0], [0, 1]])],
    "its own by its own": lambda x: x.flatten()[places(x)],
    "gather": lambda x: x.gather(-1, places(x)),
    "gather from the first": lambda x: x.gather(0, places(x)),
    "index_select": lambda x: x.index_select(-1, torch.tensor([1, 0])),
    "index_select of the first": lambda x: x.index_select(0, torch.tensor([1, 0])),
    "attention": attended,
    "attention with a mask": lambda x: attended(x, mask=torch.ones(x.shape[1], x.shape[1]).bool()),
    "attention with a mask each": lambda x: attended(
        x, mask=torch.ones(len(x), 1, x.shape[1], x.shape[1]).bool().tril()
    ),
    "attention with a mask of its own": lambda x: attended(x, own_mask=True),
}


def along(name, dim):
    """Return a function along one dimension."""
    more = {"select": (dim, 0), "topk": (2, dim), "flip": ([dim],), "norm": (2, dim)}
    arguments = more.get(name, (dim,))
    return lambda x: getattr(torch, name)(x, *arguments)


for _dim in (0, 1, -1):
    for _name in [
        *["sum", "mean", "amax", "amin", "var", "std", "logsumexp", "argmax", "argmin", "prod"],
        *["softmax", "log_softmax", "cumsum", "sort", "norm", "select", "unsqueeze", "max", "min"],
        *["topk", "flip"],
    ]:
        FUNCTIONS[f"{_name} {_dim}"] = along(_name, _dim)
    FUNCTIONS[f"any {_dim}"] = partial(lambda d, x: (x > 1.5).any(d), _dim)
    FUNCTIONS[f"sum and keep {_dim}"] = partial(lambda d, x: x.sum(d, keepdim=True), _dim)
    FUNCTIONS[f"cat {_dim}"] = partial(lambda d, x: torch.cat([x, x * 2], d), _dim)
    FUNCTIONS[f"stack {_dim}"] = partial(lambda d, x: torch.stack([x, x * 2], d), _dim)
    FUNCTIONS[f"stack with others {_dim}"] = partial(
        lambda d, x: torch.stack([x, normal(*x.shape)], d), _dim
    )

UNPROVED = {
    *[(name, layout) for name in ("squeeze all", "join with the empty") for layout in LAYOUTS],
    *[("interpolate", layout) for layout in ("second", "last", "merged")],  # images of one row
    ("attention", "merged"),
    ("attention with a mask each", "first"),  # the masks of all samples are the same
    ("batch_norm in training", "second"),  # each sample is a channel
    ("glu", "last"),  # it undoes the join across samples before it
    ("pad two", "last"),
    ("two indices", "last"),
}
"""True, and not proved; what is computed once more is not wrong."""


def outputs_of(function, x):
    found = function(x)
    return list(found) if isinstance(found, tuple | list) else [found]


def judged(compute, x):
    """Return each result of a computation with its kind, and the program."""
    with torch.no_grad():
        program, results = record(lambda: compute(x), [x])
    kinds: dict[int, Any] = {0: PerSample(dim=0)}
    kinds.update(dict.fromkeys(program.constants, Shared()))
    for call in program.calls:
        proof = None
        if all(kinds[ref] is not None for ref in call.refs):
            proof = kinds_of(call, program, kinds, num_rows=NUM)
        kinds.update(zip(call.outputs, proof or [None] * len(call.outputs), strict=True))
    return [(result, kinds[n]) for result, n in zip(results, program.outputs, strict=True)], program


def is_close(one, other):
    """Return whether tensors are equal up to rounding, which depends on the place in the batch."""
    return torch.allclose(one.double(), other.double(), rtol=1e-12, atol=1e-12)


def is_true(kind, result, others):
    """Return whether a result is of a kind.

    The k-th of ``others`` is the result for a batch that has sample k, in place k + 1, and else
    other samples.
    """
    if isinstance(kind, Shared):
        same = all(torch.equal(result, other) for other in others)
        return same and all(
            torch.equal(result.select(d, 0).unsqueeze(d).expand_as(result), result)
            for d in kind.uniform
        )
    dim, inner = kind.dim, kind.inner
    return result.shape[dim] == inner * NUM and all(
        is_close(
            result.narrow(dim, k * inner, inner), other.narrow(dim, (k + 1) % NUM * inner, inner)
        )
        for k, other in enumerate(others)
    )


def candidates(result):
    yield Shared()
    for dim, size in enumerate(result.shape):
        if size and size % NUM == 0:
            yield PerSample(dim=dim, inner=size // NUM)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_proved_is_what_is_true(name, layout):
    def compute(x):
        return outputs_of(FUNCTIONS[name], LAYOUTS[layout](x))

    x = normal(*SHAPE, seed=1)
    try:
        compute(x)
    except (RuntimeError, IndexError, ValueError):
        assert layout != "first", "each function is one of tensors of some shape"
        return
    found, _ = judged(compute, x)
    changed = []
    for k in range(NUM):
        other = normal(*SHAPE, seed=2 + k) * 3
        other[(k + 1) % NUM] = x[k]
        changed.append(compute(other))
    for place, (result, kind) in enumerate(found):
        others = [each[place] for each in changed]
        if kind is None:
            true = [c for c in candidates(result) if is_true(c, result, others)]
            assert not true or (name, layout) in UNPROVED, f"not proved: {true}"
        else:
            assert is_true(kind, result, others), f"{kind} is not true"
            assert (name, layout) not in UNPROVED


@pytest.mark.parametrize(
    ("function", "num"),
    [
        (lambda x: x[0] @ normal(6, 5), 2 * 4 * 5 * 6),
        (lambda x: torch.addmm(normal(5), x[0], normal(6, 5)), 2 * 4 * 5 * 6),
        (lambda x: torch.bmm(x, normal(NUM, 6, 5)), 2 * 3 * 4 * 5 * 6),
        (lambda x: F.conv1d(x, normal(2, 4, 3)), 2 * (3 * 2 * 4) * (4 * 3)),
        (attended, 4 * math.prod(SHAPE) * 4),
        (torch.relu, 0),
    ],
)
def test_operations_are_counted(function, num):
    function(normal(*SHAPE))
    _, program = judged(lambda x: outputs_of(function, x), normal(*SHAPE))
    assert sum(num_operations(call, program) for call in program.calls) == num
