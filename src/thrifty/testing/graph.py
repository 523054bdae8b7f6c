"""Conformance checks for layers on blocks, also for those of third parties.

Needs the extra ``graph``.

::

    @pytest.mark.parametrize("check", GRAPH_LAYER_CHECKS)
    def test_mine(check):
        check(lambda in_features, out_features: MyLayer(in_features, out_features))
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from thrifty.core import GraphError
from thrifty.graph import Block


MakeLayer = Callable[[int, int], nn.Module]
"""Function from input and output features to a layer that is called as ``layer(x, block)``."""

_IN, _OUT = 5, 3


def check_graph_layer(make_layer: MakeLayer) -> None:
    """Run all checks one after the other.

    Args:
        make_layer: Function from input features and output features to a layer.

    Raises:
        AssertionError: The layer fails one of them.

    >>> from thrifty.graph import SAGE
    >>> check_graph_layer(SAGE)
    """
    for check in GRAPH_LAYER_CHECKS:
        check(make_layer)


def check_shapes(make_layer: MakeLayer) -> None:
    """Check that each destination gets a row.

    Blocks have many, one or no destinations, also without neighbours.
    """
    layer = _double(make_layer)
    for block in (_block(), _rows([[0, 1]], 2), _rows([], 0), _rows([], 3), _rows([[], []], 2)):
        out = layer(_x(block), block)
        assert out.shape == (block.num_dst, _OUT), out.shape
        assert out.isfinite().all()


def check_gradients(make_layer: MakeLayer) -> None:
    """Check the gradients of ``x`` and of all parameters against finite differences."""
    layer, block = _double(make_layer).eval(), _block()
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        out: Tensor = torch.func.functional_call(layer, given, (x, block))
        return out

    assert torch.autograd.gradcheck(call, (_x(block).requires_grad_(), *values))


def check_parallel_edges(make_layer: MakeLayer) -> None:
    """Check that the order of a destination's edges does not matter."""
    layer = _double(make_layer).eval()
    ahead, back = _rows([[2, 1, 1, 0], [2]], 3), _rows([[1, 0, 2, 1], [2]], 3)
    x = _x(ahead)
    torch.testing.assert_close(layer(x, ahead), layer(x, back))


def check_only_neighbors(make_layer: MakeLayer) -> None:
    """Check that a destination's result depends only on itself and its neighbours."""
    layer, block = _double(make_layer).eval(), _rows([[3], [2, 3]], 5)
    x = _x(block)
    other = x.clone()
    other[[2, 4]] += 1
    ours, theirs = layer(x, block), layer(other, block)
    assert torch.equal(ours[0], theirs[0])
    assert not torch.allclose(ours[1], theirs[1])


def check_evaluation(make_layer: MakeLayer) -> None:
    """Check that two calls in evaluation mode give the same bits and leave ``x`` as it was.

    This must hold with and without gradients.
    """
    layer, block = _double(make_layer).eval(), _block()
    x = _x(block)
    before = x.clone()
    first = layer(x, block)
    assert torch.equal(first, layer(x, block))
    with torch.no_grad():
        assert torch.equal(first, layer(x, block))
    torch.testing.assert_close(first, layer(x.clone().requires_grad_(), block))
    assert torch.equal(x, before)


def check_changed_input(make_layer: MakeLayer) -> None:
    """Check that nothing is cached of an ``x`` that was changed in place."""
    layer, plain = _double(make_layer).eval(), _block()
    block = Block(plain.indptr, plain.indices, num_src=plain.num_src, shared=True)
    x = _x(block)
    layer(x, block)
    x.mul_(2)
    torch.testing.assert_close(layer(x, block), layer(x.clone(), block), rtol=0, atol=0)


def check_state(make_layer: MakeLayer) -> None:
    """Check that a layer that loads another's ``state_dict`` does the same."""
    first, second = _double(make_layer).eval(), _double(make_layer).eval()
    second.load_state_dict(first.state_dict())
    block = _block()
    x = _x(block)
    assert torch.equal(first(x, block), second(x, block))


def check_dtypes(make_layer: MakeLayer) -> None:
    """Check that ``.to(dtype)`` moves the whole layer.

    The result must have that dtype and be close to that in float64.
    """
    layer, block = _double(make_layer).eval(), _block()
    exact = layer(_x(block), block)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        out = layer.to(dtype)(_x(block).to(dtype), block)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def check_compiled(make_layer: MakeLayer) -> None:
    """Check that ``torch.compile`` runs the layer, if not in one graph."""
    layer, block = _double(make_layer).eval(), _block()
    x = _x(block)
    compiled = torch.compile(layer, backend="eager")
    with warnings.catch_warnings(action="ignore"):
        # Dynamo warns of what it does itself between its graphs.
        out = compiled(x, block)
    torch.testing.assert_close(out, layer(x, block))


def check_errors(make_layer: MakeLayer) -> None:
    """Check that rows that do not fit the block, or another device, raise a clear error."""
    layer, block = _double(make_layer), _block()
    _refused(layer, _x(block)[:-1], block)
    _refused(layer, _x(block)[0], block)
    _refused(layer, _x(block).to("meta"), block)


GRAPH_LAYER_CHECKS: tuple[Callable[[MakeLayer], None], ...] = (
    check_shapes,
    check_gradients,
    check_parallel_edges,
    check_only_neighbors,
    check_evaluation,
    check_changed_input,
    check_state,
    check_dtypes,
    check_compiled,
    check_errors,
)
"""Checks that take a function from input and output features to a layer."""


def _refused(layer: nn.Module, x: Tensor, block: Block) -> None:
    try:
        layer(x, block)
    except GraphError:
        return
    raise AssertionError(
        f"x of shape {tuple(x.shape)} on {x.device} was taken for {block} on {block.device}"
    )


def _double(make_layer: MakeLayer) -> nn.Module:
    return make_layer(_IN, _OUT).double()


def _block() -> Block:
    return _rows([[1, 4, 4], [], [5, 0, 1, 3, 2], [3]], 6)


def _rows(rows: list[list[int]], num_src: int) -> Block:
    starts = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    indices = torch.tensor([source for row in rows for source in row], dtype=torch.int32)
    return Block(starts, indices, num_src=num_src)


def _x(block: Block) -> Tensor:
    generator = torch.Generator().manual_seed(block.num_src)
    return torch.randn(block.num_src, _IN, generator=generator, dtype=torch.float64)
