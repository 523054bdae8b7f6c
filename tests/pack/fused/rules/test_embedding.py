from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.pack.fused.twin import check, group_of, integers, normal, refused
from tests.pairs import pairwise
from thrifty.pack.fused._fusable import UnfusableError


pytestmark = pytest.mark.usefixtures("device")


@pairwise(shape=[(), (4,), (4, 5), (2, 3, 4)], shared=[False, True], padding_idx=[None, 0, 3, -1])
def test_an_embedding_is_fused(shape, shared, padding_idx):
    check(
        lambda m, x: m(x),
        lambda s: [integers(7, *shape, seed=s, shared=shared)],
        make=lambda: nn.Embedding(7, 5, padding_idx=padding_idx),
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_wherever_the_trials_are_counted(axis):
    check(
        lambda m, x: m(x),
        lambda s: [integers(7, 4, 6, seed=s, axis=axis)],
        make=lambda: nn.Embedding(7, 5),
    )


def test_a_table_that_all_share():
    table = torch.randn(7, 5, dtype=torch.float64, device=here())
    check(lambda m, x: F.embedding(x, table, 2), lambda s: [integers(7, 4, seed=s, axis=1)])


@pytest.mark.parametrize("shared", [False, True])
def test_a_mask_after_it_is_drawn_as_alone(shared):
    """The result has its solo memory layout, because masks are filled in memory order."""
    check(
        lambda m, x: F.dropout(m(x.t()), 0.5),
        lambda s: [integers(7, 4, 6, seed=s, shared=shared)],
        make=lambda: nn.Embedding(7, 5),
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_norm": 1.0}, "max_norm"),
        ({"sparse": True}, "sparse"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
    ],
)
def test_what_is_refused(options, reason):
    refused(reason, lambda m, x: m(x), integers(7, 4), make=lambda: nn.Embedding(7, 5, **options))


def test_bags_are_refused():
    refused(
        "EmbeddingBag", lambda m, x: m(x), integers(7, 4, 2), make=lambda: nn.EmbeddingBag(7, 5)
    )


def test_a_table_that_lies_across():
    check(
        lambda m, x, t: F.embedding(x, t.t()),
        lambda s: [integers(7, 4, seed=s), normal(5, 7, seed=s)],
    )


def test_nothing_is_copied_on_the_way_in():
    """The table stays a view of the flat state; copying it would cost more than the step."""
    group = group_of(2)
    flat = torch.zeros(2, 1000 * 4 + 16)
    table = flat[:, :4000].view(2, 1000, 4)
    with torch.profiler.profile(profile_memory=True) as profile:
        F.embedding(group.pack(torch.zeros(2, 3, dtype=torch.long)), group.pack(table))
    assert max(e.cpu_memory_usage for e in profile.key_averages()) < 4000


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("own_places", [False, True])
@pytest.mark.parametrize("dim", [0, -3, 1])
def test_rows_are_added_at_each_trials_own_places(own_rows, own_places, dim):
    def forward(module, x, places, rows):
        return torch.index_add(x, dim, places, rows, alpha=0.5), x.index_add(dim, places, rows)

    shape = (6, 4, 3) if dim != 1 else (4, 6, 3)
    added = (9, 4, 3) if dim != 1 else (4, 9, 3)
    check(
        forward,
        lambda s: [
            normal(*shape, seed=s, axis=1),
            integers(6, 9, seed=s, shared=not own_places),
            normal(*added, seed=s + 1, shared=not own_rows),
        ],
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU ends the process, as it does alone")
@pytest.mark.parametrize("wrong", [-1, 6, 11])
@pytest.mark.parametrize("function", [F.embedding, torch.index_add])
def test_no_trial_takes_rows_of_another(function, wrong):
    group = group_of(3)
    places = torch.zeros(3, 4, dtype=torch.long)
    places[0, 2] = wrong
    index, rows = group.pack(places), group.pack(torch.randn(3, 6, 2))
    added = group.pack(torch.ones(3, 4, 2))
    args = (index, rows) if function is F.embedding else (rows, 0, index, added)
    with pytest.raises(UnfusableError, match=r"out of (range|bounds)"):
        function(*args)
