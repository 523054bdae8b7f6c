"""Conformance checks for dropout layers, also for those of third parties.

::

    @pytest.mark.parametrize("check", DROPOUT_CHECKS)
    def test_mine(check):
        check(lambda units: MyDropout(0.5, num_features=units))
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thrifty.pack


MakeDropout = Callable[[int], nn.Module]
"""Function from a number of units to a layer that drops some, drawing from torch's stream."""

_UNITS = 8


def check_dropout(make_layer: MakeDropout) -> None:
    """Run all checks one after the other.

    Args:
        make_layer: Function from a number of units to a layer.

    Raises:
        AssertionError: The layer fails one of them.

    >>> check_dropout(lambda units: nn.Dropout(0.5))
    """
    for check in DROPOUT_CHECKS:
        check(make_layer)


def check_evaluation(make_layer: MakeDropout) -> None:
    """Check that evaluation is the identity."""
    layer = _seeded(make_layer).eval()
    for shape in ((5, _UNITS), (2, 3, _UNITS), (2, _UNITS, 3, 3)):
        x = _x(*shape)
        assert torch.equal(layer(x), x)


def check_batches(make_layer: MakeDropout) -> None:
    """Check that kept units are scaled by one number and the rest is zero.

    This must hold for batches of any size, sequences and images.
    """
    layer = _seeded(make_layer)
    shapes = [(num, _UNITS) for num in (1, 2, 3, 7, 16, 33)]
    for shape in (*shapes, (0, _UNITS), (5, 3, _UNITS), (5, _UNITS, 2, 3)):
        x = _x(*shape).abs() + 1
        out = layer(x)
        assert out.shape == x.shape
        scales = (out / x)[out != 0]
        assert not len(scales) or torch.allclose(scales, scales[0])
        assert out.isfinite().all()


def check_gradients(make_layer: MakeDropout) -> None:
    """Check the gradient in training against finite differences."""
    layer = _seeded(make_layer).double()

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        out: Tensor = layer(x)
        return out

    x = _x(5, _UNITS).double().requires_grad_()
    assert torch.autograd.gradcheck(call, (x,))


def check_checkpointed(make_layer: MakeDropout) -> None:
    """Check that activation checkpointing, which runs the layer twice a step, changes nothing."""
    gradients: list[Tensor] = []
    run: Callable[[nn.Module, Tensor], Tensor]
    for run in (
        lambda layer, x: layer(x),
        lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    ):
        layer, x = _seeded(make_layer), _x(5, _UNITS).requires_grad_()
        torch.manual_seed(0)
        run(layer, x).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def check_state(make_layer: MakeDropout) -> None:
    """Check that a layer that loads another's ``state_dict`` continues as that one does."""
    first, second = _seeded(make_layer), _seeded(make_layer, seed=1)
    second.load_state_dict(first.state_dict())
    x = _x(6, _UNITS)
    outs = []
    for layer in (first, second):
        torch.manual_seed(0)
        outs.append(layer(x))
    assert torch.equal(*outs)


def check_moved(make_layer: MakeDropout) -> None:
    """Check that ``.to`` moves the whole layer, and that results have the dtype of the input."""
    layer = _seeded(make_layer)
    for dtype in (torch.float64, torch.bfloat16):
        assert layer.to(dtype)(_x(4, _UNITS).to(dtype)).dtype == dtype
    moved = copy.deepcopy(layer).to("meta")
    assert all(t.is_meta for t in (*moved.parameters(), *moved.buffers()))
    assert moved(_x(4, _UNITS).to("meta")).is_meta


def check_same_seed(make_layer: MakeDropout) -> None:
    """Check that the same seed gives the same bits."""
    outs = []
    for _ in range(2):
        layer = _seeded(make_layer)
        torch.manual_seed(2)
        outs.append(layer(_x(6, _UNITS)))
    assert torch.equal(*outs)


def check_expectation(make_layer: MakeDropout) -> None:
    """Check that the mean over many layers of many seeds is the input."""
    x = torch.ones(8, _UNITS)
    outs = torch.stack([_seeded(make_layer, seed=seed)(x) for seed in range(400)])
    # Samples of one layer may share a subnetwork, so only layers are independent.
    means = outs.mean(1)
    error = means.std(0) / len(means) ** 0.5
    assert ((means.mean(0) - 1).abs() <= 5 * error + 1e-6).all()


def check_compiled(make_layer: MakeDropout) -> None:
    """Check that ``torch.compile`` makes one graph of the layer."""
    layer = _seeded(make_layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    outs = []
    for each in (layer, compiled):
        torch.manual_seed(0)
        outs.append(each(_x(6, _UNITS)))
    torch.compiler.reset()
    assert torch.equal(*outs)


def check_packed(make_layer: MakeDropout) -> None:
    """Check that models trained in one pack become what each becomes in its own pack."""

    def models() -> list[nn.Module]:
        made: list[nn.Module] = []
        for seed in range(3):
            torch.manual_seed(seed)
            made.append(
                nn.Sequential(
                    nn.Linear(4, _UNITS), make_layer(_UNITS), nn.Linear(_UNITS, 2)
                ).double()
            )
        return made

    def trained(some: list[nn.Module], seeds: list[int]) -> list[nn.Module]:
        packed = thrifty.pack.pack(
            some, loss=_loss, optimizer=thrifty.pack.SGD(lr=0.1), seeds=seeds
        )
        for step in range(6):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
            packed.step((x, x[:, :2]))
        assert packed.fused, "it was not fused"
        return packed.models

    together = trained(models(), [0, 1, 2])
    for number, model in enumerate(models()):
        (alone,) = trained([model], [number])
        for a, b in zip(
            alone.state_dict().values(), together[number].state_dict().values(), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


DROPOUT_CHECKS: tuple[Callable[[MakeDropout], None], ...] = (
    check_evaluation,
    check_batches,
    check_gradients,
    check_checkpointed,
    check_state,
    check_moved,
    check_same_seed,
    check_expectation,
    check_compiled,
    check_packed,
)
"""Checks that take a function from a number of units to a layer."""


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _seeded(make_layer: MakeDropout, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make_layer(_UNITS)


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
