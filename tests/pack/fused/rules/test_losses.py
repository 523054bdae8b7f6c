from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.devices import here
from tests.pack.fused.twin import Each, Shared, check, integers, normal, refused
from tests.pairs import pairwise


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


ROWS = (5, 2, 4)


def weights():
    return WEIGHTS.to(here())


def placed(options):
    """Return options with their tensors on the device of the test."""
    return {k: v.to(here()) if isinstance(v, torch.Tensor) else v for k, v in options.items()}


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)


def ignored(x, *, where):
    value = x.value.clone()
    value[..., 0] = where
    return type(x)(value)


@pairwise(
    unless=lambda num_rows, reduction, where, **_: (
        num_rows is not None and (reduction == "none" or where == "shared")
    ),
    function=[
        F.cross_entropy,
        lambda x, y, **o: F.nll_loss(
            F.log_softmax(x, 1), y, **{k: v for k, v in o.items() if k != "label_smoothing"}
        ),
    ],
    extra=[(), (3,), (2, 2)],
    reduction=["mean", "sum", "none"],
    options=[
        {},
        {"weight": WEIGHTS},
        {"ignore_index": 1},
        {"label_smoothing": 0.1},
        {"weight": WEIGHTS, "label_smoothing": 0.1, "ignore_index": 2},
    ],
    num_rows=[None, ROWS],
    where=[0, 1, "shared"],
)
def test_losses_of_classes_are_fused(function, extra, reduction, options, num_rows, where):
    place = {"shared": True} if where == "shared" else {"axis": where if num_rows is None else 0}
    check(
        lambda m, x, y: function(x, y, reduction=reduction, **placed(options)),
        lambda s: [normal(5, 4, *extra, seed=s), integers(4, 5, *extra, seed=s, **place)],
        num_rows=num_rows,
    )


@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("num_rows", [None, ROWS])
@pytest.mark.parametrize("extra", [(), (3,)])
def test_classes_that_torch_ignores_by_itself(function, num_rows, extra):
    def inputs(seed):
        return [
            normal(5, 4, *extra, seed=seed),
            ignored(integers(4, 5, *extra, seed=seed), where=-100),
        ]

    check(lambda m, x, y: function(x, y), inputs, num_rows=num_rows)
    check(lambda m, x, y: function(x, y, weight=weights()), inputs, num_rows=num_rows)


@pytest.mark.parametrize("num_rows", [None, ROWS])
@pytest.mark.parametrize(
    "options", [{}, {"weight": WEIGHTS}, {"label_smoothing": 0.2}, {"reduction": "sum"}]
)
def test_cross_entropy_of_probabilities_is_fused(num_rows, options):
    check(
        lambda m, x, y: F.cross_entropy(x, F.softmax(y, 1), **placed(options)),
        lambda s: [normal(5, 4, seed=s), normal(5, 4, seed=s + 5)],
        num_rows=num_rows,
    )


def test_a_single_row():
    check(lambda m, x, y: F.cross_entropy(x, y), lambda s: [normal(4, seed=s), integers(4, seed=s)])


def test_each_trials_own_class_weights():
    check(
        lambda m, x, y, w: F.cross_entropy(x, y, w.abs().detach()),
        lambda s: [normal(5, 4, seed=s), integers(4, 5, seed=s), normal(4, seed=s + 3)],
    )
    refused(
        "cross_entropy while batches differ",
        lambda m, x, y, w: F.cross_entropy(x, y, w),
        normal(5, 4),
        integers(4, 5),
        normal(4),
        num_rows=ROWS, batch=5,
    )  # fmt: skip


PAIRS = [
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss,
    lambda x, y, **o: F.soft_margin_loss(x, y.sign().detach(), **o),
    lambda x, y, **o: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y), **o),
    lambda x, y, **o: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y), **o),
    lambda x, y, **o: F.binary_cross_entropy_with_logits(
        x, torch.sigmoid(y), weight=weights(), pos_weight=weights(), **o
    ),
    lambda x, y, **o: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), **o),
    lambda x, y, **o: F.kl_div(F.log_softmax(x, 1), F.log_softmax(y, 1), log_target=True, **o),
    lambda x, y, **o: F.gaussian_nll_loss(x, y, y.abs() + 0.1, **o),
    lambda x, y, **o: F.gaussian_nll_loss(x, y, y.abs(), eps=0.5, full=True, **o),
    lambda x, y, **o: F.gaussian_nll_loss(x, y, y[:, 0].abs(), **o),
    lambda x, y, **o: F.gaussian_nll_loss(x, y, 0.3, **o),
    lambda x, y, **o: F.hinge_embedding_loss(x, y.sign(), **o),
    lambda x, y, **o: F.multilabel_soft_margin_loss(x, torch.sigmoid(y), **o),
    lambda x, y, **o: F.triplet_margin_loss(x, y, x + 2 * y, **o),
    lambda x, y, **o: F.margin_ranking_loss(x[:, 0], y[:, 0], y[:, 1].sign(), **o),
    lambda x, y, **o: F.cosine_embedding_loss(x, y, y[:, 1].sign(), **o),
    lambda x, y, **o: F.multi_margin_loss(x, y.argmax(1), **o),
    lambda x, y, **o: F.multi_margin_loss(x, y.argmax(1), weight=weights(), **o),
]  # fmt: skip


@pytest.mark.sample(25)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides", "ignore:.*performance drop")
@pairwise(
    unless=lambda num_rows, reduction, shared, **_: (
        num_rows is not None and (reduction == "none" or shared)
    ),
    loss=PAIRS,
    reduction=["mean", "sum", "none"],
    num_rows=[None, ROWS],
    shared=[False, True],
)
def test_losses_of_elements(loss, reduction, num_rows, shared):
    check(
        lambda m, x, y: loss(x, y, reduction=reduction),
        lambda s: [normal(5, 4, seed=s), normal(5, 4, seed=s + 5, shared=shared)],
        num_rows=num_rows,
    )


@pytest.mark.parametrize("extra", [(), (3,)])
@pytest.mark.parametrize("num_rows", [None, ROWS])
def test_divergence_by_batch(num_rows, extra):
    check(
        lambda m, x, y: F.kl_div(F.log_softmax(x, 1), F.softmax(y, 1), reduction="batchmean"),
        lambda s: [normal(5, 4, *extra, seed=s), normal(5, 4, *extra, seed=s + 5)],
        num_rows=num_rows,
    )


def test_several_dimensions():
    check(
        lambda m, x, y: F.mse_loss(x, y) + F.mse_loss(x, y, reduction="none").mean(),
        lambda s: [normal(5, 4, 2, 3, seed=s), normal(5, 4, 2, 3, seed=s + 5)],
        num_rows=ROWS,
    )


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda x, y: F.cross_entropy(x.view(-1, 2), y.view(-1).long().clamp(0, 1)[:10]),
            "other rows than the batch's",
        ),
        (lambda x, y: F.mse_loss(x.view(-1), y.view(-1)), "other rows than the batch's"),
        (
            lambda x, y: F.mse_loss(x.view(-1), y.view(-1), reduction="sum"),
            "other rows than the batch's",
        ),
        (lambda x, y: F.mse_loss(x.sum(), y.sum()), "other rows than the batch's"),
        (
            lambda x, y: F.mse_loss(x, y, weight=y.abs()),  # type: ignore[call-arg]
            "these options of mse_loss",
        ),
        (lambda x, y: F.cross_entropy(x[0], y[0].argmax()), "cross_entropy while batches differ"),
        (
            lambda x, y: F.ctc_loss(F.log_softmax(x[:, None], 2), y[:1].long().abs(), (5,), (2,)),
            "ctc_loss while batches differ",
        ),
    ],
)
def test_what_is_refused_while_batches_differ_in_size(loss, reason):
    refused(
        reason,
        lambda m, x, y: loss(x, y),
        normal(5, 4),
        normal(5, 4, seed=3),
        num_rows=ROWS,
        batch=5,
    )


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("function", [F.cross_entropy, F.mse_loss])
def test_arguments_of_the_past(function):
    def inputs(seed):
        target = (
            integers(4, 5, seed=seed)
            if function is F.cross_entropy
            else normal(5, 4, seed=seed + 3)
        )
        return [normal(5, 4, seed=seed), target]

    check(lambda m, x, y: function(x, y, size_average=False), inputs)
    refused(
        "while batches differ in size",
        lambda m, x, y: function(x, y, size_average=False),
        *inputs(0),
        num_rows=ROWS,
        batch=5,
    )


def test_what_all_share_is_no_loss_of_theirs():
    x = Shared(torch.ones(5, 4, dtype=torch.float64, device=here()))
    check(
        lambda m, x, y: F.mse_loss(x, y),
        lambda s: [x, Each(torch.rand(3, 5, 4, dtype=torch.float64, device=here()))],
    )
