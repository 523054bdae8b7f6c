"""Random draws for a part of a batch equal those for the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from thrifty.hetero._gradient_comparison import EqualDraws


ROWS, UNITS = 6, 4
GENERATOR = torch.Generator()


def attended(x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)


PARTIAL = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout1d": lambda x: F.dropout1d(x[:, None], 0.4),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.4),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rand": lambda x: x * torch.rand(len(x), UNITS),
    "randn": lambda x: x * torch.randn(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(0, 5, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 5),
    "own generator": lambda x: x * torch.rand(x.shape, generator=GENERATOR),
    "randperm": lambda x: x + x[torch.randperm(len(x))],
    "normal": lambda x: torch.normal(x, 1.0) + torch.normal(0.0, x.abs()),
    "normal of a size": lambda x: x + torch.normal(0.0, 1.0, size=(len(x), UNITS)),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.7) / 0.7,
    "bernoulli_ of bool": lambda x: x * torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.7),
    "uniform_": lambda x: x * torch.empty(len(x), 1).uniform_(0.2, 0.4),
    "exponential_": lambda x: x * torch.empty(len(x), 1).exponential_(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "time first": lambda x: F.dropout(x[None].expand(3, -1, -1), 0.5).sum(0),
    "flattened": lambda x: F.dropout(x.reshape(-1), 0.5).reshape(len(x), -1),
    "attention": lambda x: attended(x[:, None]),
}  # fmt: skip


def drawn(draw, x):
    torch.manual_seed(0)
    with EqualDraws() as mode:
        return draw(x), mode


@pytest.mark.parametrize("name", PARTIAL)
def test_a_part_draws_as_the_whole(name):
    x = torch.randn(ROWS, UNITS)
    (whole, mode), (part, _) = (drawn(PARTIAL[name], each) for each in (x, x[:2]))
    torch.testing.assert_close(part, whole[:2])
    assert not mode.unequal


def test_the_layers_of_recurrent_networks_draw_so_too():
    torch.manual_seed(1)
    net = nn.LSTM(UNITS, UNITS, 2, dropout=0.5, batch_first=True)
    x = torch.randn(ROWS, 3, UNITS)
    (whole, _), (part, _) = (drawn(lambda x: net(x)[0], each) for each in (x, x[:2]))
    torch.testing.assert_close(part, whole[:2])


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("multinomial", lambda x: torch.multinomial(x.softmax(1), 1)),
        ("poisson", lambda x: torch.poisson(x.abs())),
        ("_standard_gamma", lambda x: torch._standard_gamma(x.abs())),
    ],
)
def test_draws_that_depend_on_values_are_named(name, draw):
    _, mode = drawn(draw, torch.randn(ROWS, UNITS))
    assert mode.unequal == {name}


def test_a_generator_of_the_user_s_does_not_move_on():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    drawn(lambda x: torch.rand(x.shape, generator=generator), torch.zeros(ROWS))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_coarsest_precision_is_noted(dtype):
    x = torch.ones(ROWS, dtype=torch.float64)
    _, mode = drawn(lambda x: (x.to(dtype) * 2).double(), x)
    assert mode.eps == torch.finfo(dtype).eps
