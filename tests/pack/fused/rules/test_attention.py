from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.devices import here
from tests.pack.fused.twin import Each, Shared, check, normal, refused
from tests.pairs import pairwise


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


def mask_of(*shape, seed, shared=False, boolean=True):
    x = normal(*shape, seed=seed + 50, shared=shared)
    value = x.value > -1 if boolean else x.value
    if boolean:
        value[..., 0] = True  # every query can attend to something
    return Shared(value) if shared else Each(value)


# -- scaled_dot_product_attention ------------------------------------------------------------


@pairwise(
    p=[0.0, 0.3],
    leading=[(2,), (2, 3), (2, 2, 3)],
    options=[{}, {"is_causal": True}, {"scale": 0.7}],
    where=[(0, 0, 0), (1, 0, 2), ("shared", 0, 0), (0, "shared", "shared")],
)
def test_scaled_dot_product_attention(p, leading, options, where):
    def inputs(seed):
        shapes = ((*leading, 5, 4), (*leading, 6, 4), (*leading, 6, 4))
        return [
            normal(
                *shape, seed=seed + 10 * i, **({"shared": True} if w == "shared" else {"axis": w})
            )
            for i, (shape, w) in enumerate(zip(shapes, where, strict=True))
        ]

    check(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=p, **options), inputs
    )


@pairwise(
    p=[0.0, 0.3],
    shape=[(5, 6), (1, 6), (1, 1, 5, 6), (2, 1, 5, 6), (2, 3, 5, 6), (3, 5, 6), (2, 1, 1, 6)],
    shared=[False, True],
    boolean=[False, True],
)
def test_attention_with_a_mask_is_fused(p, shape, shared, boolean):
    def inputs(seed):
        return [
            *[normal(2, 3, n, 4, seed=seed + i) for i, n in ((0, 5), (10, 6), (20, 6))],
            mask_of(*shape, seed=seed, shared=shared, boolean=boolean),
        ]

    check(lambda m, q, k, v, a: F.scaled_dot_product_attention(q, k, v, a, p), inputs)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_row_that_sees_nothing(p):
    def inputs(seed):
        mask = torch.ones(5, 6, dtype=torch.bool, device=here())
        mask[2] = False
        return [
            *[normal(2, 3, n, 4, seed=seed + i) for i, n in ((0, 5), (10, 6), (20, 6))],
            Shared(mask),
        ]

    check(lambda m, q, k, v, a: F.scaled_dot_product_attention(q, k, v, a, p), inputs)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_grouped_queries(p):
    def inputs(seed):
        return [normal(2, h, 5, 4, seed=seed + i) for i, h in ((0, 6), (10, 2), (20, 2))]

    check(
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True),
        inputs,
    )


@pytest.mark.parametrize("shapes", [[(2, 3, 5, 4), (1, 3, 5, 4)], [(5, 4), (5, 4)]])
def test_what_broadcasts(shapes):
    def forward(module, q, k):
        return F.scaled_dot_product_attention(q, k, k)

    check(forward, lambda s: [normal(*shape, seed=s + i) for i, shape in enumerate(shapes)])
    refused(
        "attention with dropout over batches that broadcast",
        lambda m, q, k: F.scaled_dot_product_attention(q, k, k, dropout_p=0.5),
        *[normal(*shape) for shape in shapes],
    )


def test_a_mask_that_is_causal_as_well_is_refused():
    refused(
        "both attn_mask and is_causal",
        lambda m, x, a: F.scaled_dot_product_attention(x, x, x, a, 0.5, True),
        normal(2, 5, 4),
        mask_of(5, 5, seed=0),
    )


# -- nn.MultiheadAttention -------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, *, batch_first=True, p=0.0, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=p, batch_first=batch_first, **options)
        self.drop = nn.Dropout(0.5 if p else 0.0)

    def forward(self, q, k=None, v=None, **options):
        k = q if k is None else k
        out, weights = self.inner(q, k, k if v is None else v, **options)
        # Dropout masks depend on the memory layout of the output.
        return self.drop(out), weights


@pairwise(
    p=[0.0, 0.3],
    batch_first=[False, True],
    options=[{"need_weights": False}, {}, {"average_attn_weights": False}],
    where=[0, 1, 2, "shared"],
)
def test_self_attention(p, batch_first, options, where):
    place = {"shared": True} if where == "shared" else {"axis": where}
    check(
        lambda m, x: m(x, **options),
        lambda s: [normal(4, 5, 6, seed=s, **place)],
        make=lambda: Attention(batch_first=batch_first, p=p),
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_attention(p, need_weights, shared, bias):
    check(
        lambda m, x, y: m(x, y, need_weights=need_weights),
        lambda s: [normal(4, 5, 6, seed=s), normal(4, 3, 6, seed=s + 5, shared=shared)],
        make=lambda: Attention(p=p, bias=bias),
    )


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kinds", [{}, {"kdim": 3, "vdim": 2}])
def test_keys_and_values_that_differ(need_weights, kinds):
    k, v = (kinds["kdim"], kinds["vdim"]) if kinds else (6, 6)
    check(
        lambda m, x, y, z: m(x, y, z, need_weights=need_weights),
        lambda s: [
            normal(4, 5, 6, seed=s),
            normal(4, 3, k, seed=s + 5),
            normal(4, 3, v, seed=s + 9),
        ],
        make=lambda: Attention(p=0.3, **kinds),
    )


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_without_a_batch(need_weights, p):
    check(
        lambda m, x: m(x, need_weights=need_weights),
        lambda s: [normal(5, 6, seed=s)],
        make=lambda: Attention(p=p),
    )


@pairwise(
    unless=lambda attention, padding, **_: attention is None and not padding,
    p=[0.0, 0.3],
    need_weights=[False, True],
    attention=[None, (5, 5), (8, 5, 5)],
    padding=[False, True],
    shared=[False, True],
    boolean=[False, True],
)
def test_masks_of_layers(p, need_weights, attention, padding, shared, boolean):

    def inputs(seed):
        out = [normal(4, 5, 6, seed=seed)]
        for shape, mixed in ((attention, shared), ((4, 5) if padding else None, False)):
            if shape is not None:
                mask = mask_of(*shape, seed=seed + len(out), shared=mixed, boolean=boolean)
                out.append(type(mask)(~mask.value) if boolean else mask)
        return out

    def forward(module, x, *masks):
        names = [
            n for n, wanted in (("attn_mask", attention), ("key_padding_mask", padding)) if wanted
        ]
        return module(x, need_weights=need_weights, **dict(zip(names, masks, strict=True)))

    check(forward, inputs, make=lambda: Attention(p=p))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_causal_hint(need_weights, p):
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64, device=here())
    check(
        lambda m, x: m(x, attn_mask=mask, is_causal=True, need_weights=need_weights),
        lambda s: [normal(4, 5, 6, seed=s)],
        make=lambda: Attention(p=p),
    )


def test_what_is_refused():
    x = normal(4, 5, 6)
    for option in ("add_bias_kv", "add_zero_attn"):
        refused(option, lambda m, x: m(x)[0], x, make=lambda o=option: Attention(**{o: True}))
    refused("hint about attn_mask", lambda m, x: m(x, is_causal=True)[0], x, make=Attention)
    refused(
        "dropout over other rows than the batch's",
        lambda m, x: m(x)[0],
        normal(5, 6),
        make=lambda: Attention(p=0.3),
        num_rows=(4, 2, 3),
        batch=4,
    )


# -- whole layers ----------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_encoder_layers(training, norm_first, batch_first, shared):
    check(
        lambda m, x: m(x),
        lambda s: [normal(4, 5, 6, seed=s, shared=shared)],
        make=lambda: nn.TransformerEncoderLayer(
            6, 2, 7, 0.2, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        ),
        training=training,
    )


def encoder(**options):
    layer = nn.TransformerEncoderLayer(6, 2, 7, 0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(6), **options)


@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_with_padding(training):
    def inputs(seed):
        return [normal(4, 5, 6, seed=seed), Each(~mask_of(4, 5, seed=seed).value)]

    check(
        lambda m, x, mask: m(x, src_key_padding_mask=mask), inputs, make=encoder, training=training
    )


def test_an_encoder_with_padding_in_evaluation():
    """Solo evaluation zeroes padded outputs unless ``enable_nested_tensor=False`` is passed."""
    mask = torch.zeros(4, 5, dtype=torch.bool, device=here())
    mask[:, 3:] = True
    inputs = [normal(4, 5, 6), Each(torch.stack([mask] * 3))]
    with torch.no_grad():
        refused(
            "pass enable_nested_tensor=False",
            lambda m, x, mask: m(x, src_key_padding_mask=mask),
            *inputs,
            make=lambda: encoder().eval(),
        )
        check(
            lambda m, x, mask: m(x, src_key_padding_mask=mask),
            lambda s: inputs,
            make=lambda: encoder(enable_nested_tensor=False),
            training=False,
        )


def test_evaluation_without_gradients():
    """Packed tensors must not enter torch's fused path for evaluation without gradients."""
    with torch.no_grad():
        check(
            lambda m, x: m(x),
            lambda s: [normal(4, 5, 6, seed=s)],
            make=lambda: nn.TransformerEncoderLayer(6, 2, 7, 0.2, batch_first=True),
            training=False,
        )


@pytest.mark.parametrize("training", [False, True])
def test_a_decoder_layer_is_fused(training):
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64, device=here())
    check(
        lambda m, x, y: m(x, y, tgt_mask=mask, tgt_is_causal=True),
        lambda s: [normal(4, 5, 6, seed=s), normal(4, 3, 6, seed=s + 5)],
        make=lambda: nn.TransformerDecoderLayer(6, 2, 7, 0.2, batch_first=True),
        training=training,
    )


def test_batches_that_differ_in_size():
    check(
        lambda m, x: m(x).pow(2).mean(),
        lambda s: [normal(5, 4, 6, seed=s)],
        make=lambda: nn.TransformerEncoderLayer(6, 2, 7, 0.2, batch_first=True),
        num_rows=(5, 2, 4),
        eager=False,
    )
