"""Kernels that read kept groups in place compute what ``F.linear`` computes with masks.

On CUDA the kernels run as compiled. On a CPU they run where Triton interprets them, in a process of
its own, because Triton decides that when it is imported.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from tests.depth import draws
from tests.devices import here
from thrifty.nn import (
    GyroMLP,
    GyroSchedule,
    KeptGroups,
    _block_kernels,
    _sequential,
    _sliced,
    gyro_linear,
)
from thrifty.nn._masks import put, take
from thrifty.perf import SlicingCosts, SlicingKernelCosts


pytestmark = pytest.mark.slow

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(autouse=True)
def _runs(request):
    """Skip tests of kernels where they cannot run."""
    if "device" not in request.fixturenames:
        return
    if not _block_kernels.works(here()):
        pytest.skip(
            "Triton is not installed or does not work on this GPU"
            if here().type == "cuda"
            else "kernels run on a CPU only with TRITON_INTERPRET=1; another test starts that"
        )


def drawn_groups(num_parts, num_groups, group_size, share, seed):
    generator = torch.Generator().manual_seed(seed)
    num_kept = max(1, round(share * num_groups))
    groups = [
        torch.randperm(num_groups, generator=generator)[:num_kept].sort().values
        for _ in range(num_parts)
    ]
    return KeptGroups(torch.stack(groups).to(here()), group_size, num_groups)


@st.composite
def products(draw):
    """Draw inputs and outputs of a product, each whole or in part, and their sizes."""
    num_parts = draw(st.integers(1, 5))
    sides, sizes = [], []
    for seed in range(2):
        if draw(st.booleans()):
            sides.append(None)
            sizes.append(draw(st.integers(1, 150)))
            continue
        group_size, num_groups = (
            draw(st.sampled_from([16, 32, 48, 64, 128])),
            draw(st.integers(1, 4)),
        )
        share = draw(st.floats(0, 1))
        sides.append(drawn_groups(num_parts, num_groups, group_size, share, seed))
        sizes.append(group_size * num_groups)
    return num_parts, draw(st.integers(1, 40)), *sides, *sizes


def on_device(kept):
    return kept and kept._replace(groups=kept.groups.to(here()))


def masked(x, weight, bias, inputs, outputs):
    """Return what a dense product with zeros computes."""
    whole = x if inputs is None else put(x, inputs, dim=x.dim() - 1)
    out = F.linear(whole, weight, bias)
    return out if outputs is None else take(out, outputs, dim=x.dim() - 1)


def compare(product, *, dtype, with_bias, tolerance):
    """Compare outputs and gradients with those of double precision."""
    num_parts, rows, inputs, outputs, num_in, num_out = product
    inputs, outputs = on_device(inputs), on_device(outputs)
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape):
        # Sizes around 1 for sums of any length.
        return torch.randn(*shape, generator=generator).to(here(), dtype)

    x = normal(num_parts, rows, num_in if inputs is None else inputs.num_units)
    weight, bias = normal(num_out, num_in), normal(num_out) if with_bias else None
    leaves = [x, weight, *([] if bias is None else [bias])]
    found = []
    assert _sliced.runs_in_place(x, weight, bias, inputs=inputs, outputs=outputs)
    for call, kind in ((gyro_linear, dtype), (masked, torch.float64)):
        own = [leaf.detach().to(kind).requires_grad_() for leaf in leaves]
        some = (*own, None)[:3]
        if call is gyro_linear:
            out = call(*some, inputs=inputs, outputs=outputs)
            towards = torch.randn(out.shape, generator=generator).to(here(), dtype)
        else:
            out = call(*some, inputs, outputs)
        grads = torch.autograd.grad(out, own, towards.to(out.dtype))
        found.append([out.detach(), *grads])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        gap = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1)
        assert gap < tolerance


# -- against a masked product ---------------------------------------------------------------


@settings(max_examples=draws(15, 60))
@given(product=products(), with_bias=st.booleans())
def test_outputs_and_gradients_are_those_of_a_masked_product(device, product, with_bias):
    compare(product, dtype=torch.float32, with_bias=with_bias, tolerance=1e-5)


@settings(max_examples=draws(5, 20))
@given(product=products())
def test_half_precision(device, product):
    compare(product, dtype=torch.float16, with_bias=True, tolerance=5e-3)
    if device.type == "cuda":  # Triton's interpreter multiplies the bits of bfloat16
        compare(product, dtype=torch.bfloat16, with_bias=True, tolerance=3e-2)


def test_large_parts(device, monkeypatch):
    kept = [drawn_groups(2, 3, 32, 0.5, seed) for seed in range(2)]
    product = (2, _block_kernels.GATHERED_ROWS + 1, *kept, 96, 96)
    assert _block_kernels.gathers(torch.ones(1, _block_kernels.GATHERED_ROWS, 1))
    compare(product, dtype=torch.float32, with_bias=True, tolerance=1e-5)
    monkeypatch.setattr(_block_kernels, "GATHERED_ROWS", 10_000)
    compare(product, dtype=torch.float32, with_bias=True, tolerance=1e-5)


def test_products_without_tensor_cores(device, monkeypatch):
    monkeypatch.setattr(_block_kernels, "FLOAT32_TILES", _block_kernels.Tiles(precision="ieee"))
    kept = [drawn_groups(3, 4, 64, 0.5, seed) for seed in range(2)]
    compare((3, 33, *kept, 256, 256), dtype=torch.float32, with_bias=True, tolerance=1e-5)


@pytest.mark.parametrize("tiles", [(32, 32, 16), (128, 64, 64), (16, 64, 64)])
def test_any_tiles_give_the_same(device, tiles):
    inputs, outputs = (drawn_groups(2, 2, 64, 0.5, seed) for seed in range(2))
    x = torch.randn(2, 20, 64, device=device)
    weight = torch.randn(128, 128, device=device)
    ours, theirs = [], []
    for found, own in ((ours, _block_kernels.Tiles(*tiles)), (theirs, _block_kernels.Tiles())):
        out = _block_kernels.product(
            x, weight, None,
            contracted=inputs, kept=outputs, size=64, transposed=False, tiles=own,
        )  # fmt: skip
        of_weight, of_bias = _block_kernels.weight_gradient(
            out, x, weight, inputs=inputs, outputs=outputs, tiles=own
        )
        found += [out, of_weight, of_bias]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-2)


def test_blocks_that_no_part_keeps_have_a_gradient_of_zero(device):
    kept = KeptGroups(torch.tensor([[1]], device=device), 16, 3)
    weight = torch.randn(48, 48, device=device, requires_grad=True)
    bias = torch.randn(48, device=device, requires_grad=True)
    x = torch.randn(1, 4, 16, device=device)
    gyro_linear(x, weight, bias, inputs=kept, outputs=kept).sum().backward()
    kept_block = torch.zeros(48, dtype=torch.bool, device=device)
    kept_block[16:32] = True
    assert torch.equal(weight.grad != 0, kept_block[:, None] & kept_block[None, :])
    assert torch.equal(bias.grad != 0, kept_block)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "weight and bias"])
def test_only_gradients_that_are_needed(device, frozen):
    kept = drawn_groups(2, 4, 16, 0.5, 0)
    leaves = {
        "x": torch.randn(2, 5, 32, device=device),
        "weight": torch.randn(64, 64, device=device),
        "bias": torch.randn(64, device=device),
    }
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    x, weight, bias = leaves.values()
    masked(x, weight, bias, kept, kept).square().sum().backward()
    wanted = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    gyro_linear(x, weight, bias, inputs=kept, outputs=kept).square().sum().backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name in frozen)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, wanted[name], rtol=1e-4, atol=1e-3)


def test_sequences_and_inputs_that_are_not_contiguous(device):
    kept = drawn_groups(2, 4, 16, 0.5, 0)
    x = torch.randn(2, 32, 3, 5, device=device).permute(0, 2, 3, 1)
    weight = torch.randn(64, 64, device=device).t()
    out = gyro_linear(x, weight, inputs=kept, outputs=kept)
    assert out.shape == (2, 3, 5, 32)
    torch.testing.assert_close(out, masked(x, weight, None, kept, kept), rtol=1e-4, atol=1e-4)


def test_autocast_multiplies_in_half_precision(device):
    kept = drawn_groups(2, 4, 16, 0.5, 0)
    x, weight = torch.randn(2, 5, 32, device=device), torch.randn(64, 64, device=device)
    weight.requires_grad_()
    with torch.autocast(device.type, dtype=torch.float16):
        assert _sliced.runs_in_place(x, weight, inputs=kept, outputs=kept)
        out = gyro_linear(x, weight, inputs=kept, outputs=kept)
        assert not _sliced.runs_in_place(x.double(), weight, inputs=kept, outputs=kept)
    assert out.dtype == torch.float16
    wanted = masked(x, weight, None, kept, kept)
    torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=5e-2)
    out.sum().backward()
    assert weight.grad.dtype == torch.float32


# -- what they do not compute ---------------------------------------------------------------


def test_what_is_left_to_torch(device):
    kept = drawn_groups(2, 4, 16, 0.5, 0)
    x, weight = torch.randn(2, 5, 32, device=device), torch.randn(64, 64, device=device)

    def fits(x=x, weight=weight, bias=None, inputs=kept, outputs=kept):
        return _sliced.runs_in_place(x, weight, bias, inputs=inputs, outputs=outputs)

    assert fits()
    assert not fits(x.double(), weight.double())
    assert not fits(x.half())
    assert not fits(bias=torch.ones(64, device=device).double())
    assert not fits(x[:, :0])
    assert not fits(inputs=drawn_groups(2, 8, 8, 0.5, 0))
    assert not fits(outputs=drawn_groups(2, 4, 20, 0.5, 0))
    assert not fits(torch.ones(_block_kernels.LARGEST_PARTS + 1, 1, 32, device=device))
    double = gyro_linear(x.double(), weight.double(), inputs=kept, outputs=kept)
    torch.testing.assert_close(double, masked(x.double(), weight.double(), None, kept, kept))


def test_a_gpu_whose_kernels_cannot_be_compiled_gathers(monkeypatch, caplog):
    def fails(*args, **options):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(*shape))
    monkeypatch.setattr(_block_kernels, "product", fails)
    _block_kernels._works.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert not _block_kernels._works(7)
    _block_kernels._works.cache_clear()
    assert "kept groups are gathered, which is slower: Failed to find C compiler" in caplog.text


def test_without_a_new_enough_gpu_there_are_none(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    _block_kernels._works.cache_clear()
    assert not _block_kernels._works(7)
    _block_kernels._works.cache_clear()


def test_precision_follows_torch(monkeypatch):
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        assert _block_kernels.precision() == "tf32"
        matmul.allow_tf32 = False
        assert _block_kernels.precision() == "ieee"
    finally:
        matmul.allow_tf32 = before


# -- whole networks --------------------------------------------------------------------------


def network(execution, device, concurrent=4):
    torch.manual_seed(0)
    schedule = GyroSchedule(subnetworks=8, concurrent=concurrent, total_steps=20)
    return GyroMLP(
        20, [96, 64], 3, schedule=schedule, group_size=16, execution=execution
    ).to(device)  # fmt: skip


@pytest.mark.parametrize("batch", [12, 13, 3])
def test_a_network_trains_as_masked(device, batch, caplog):
    x = torch.randn(batch, 20, generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for execution in ("sliced", "masked"):
        model = network(execution, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[2].schedule.follow(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        found.append([*model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert "run as they are" not in caplog.text


def test_small_networks_are_masked_by_the_costs_of_kernels(device, monkeypatch):
    model = network("auto", device)
    seen = []
    product = _sequential.gyro_linear

    def watched(x, *args, **options):
        seen.append(tuple(x.shape))
        return product(x, *args, **options)

    monkeypatch.setattr(_sequential, "gyro_linear", watched)
    x = torch.randn(12, 20, device=device)
    model(x)
    assert not seen
    for name in ("_KERNEL_COSTS", "_CAPTURED_COSTS"):
        monkeypatch.setattr(_sequential, name, SlicingKernelCosts(margin=0.0))
    model = network("auto", device)
    model(x)  # the first batch is computed both ways
    seen.clear()
    model(x)
    assert seen == [(4, 3, 20), (4, 3, 48), (4, 3, 32)]
    model.costs = SlicingCosts(margin=1e9)
    seen.clear()
    model(x)
    assert not seen


def test_a_captured_step_computes_what_a_plain_one_does(device):
    if device.type != "cuda":
        pytest.skip("only a GPU captures steps")
    model = network("sliced", device)
    x = torch.randn(16, 20, device=device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    schedule = model[2].schedule
    for _ in range(3):
        schedule.position.add_(6)  # another phase: the graph reads it on the GPU
        graph.replay()
        captured = [p.grad.clone() for p in model.parameters()]
        plain = network("masked", device)
        plain.load_state_dict(model.state_dict())
        plain(x).square().mean().backward()
        for ours, other in zip(captured, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, other.grad, rtol=1e-4, atol=1e-5)


# -- on a CPU --------------------------------------------------------------------------------


PROBE = """
import torch
from thrifty.nn import KeptGroups, gyro_linear
kept = KeptGroups(torch.tensor([[0]]), 16, 1)
gyro_linear(torch.ones(1, 2, 16), torch.ones(16, 16), inputs=kept)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(_block_kernels.INTERPRETED, reason="this is the process with the interpreter")
def test_kernels_as_interpreted():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    probe = subprocess.run(
        [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=False
    )
    if "only 0-dimensional arrays" in probe.stderr:
        pytest.skip("this version of Triton cannot interpret kernels with this version of NumPy")
    assert probe.returncode == 0, probe.stderr
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cpu",
            "-n", "0", "-o", "filterwarnings=default", __file__,
        ],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
