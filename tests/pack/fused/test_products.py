"""Large products that oneDNN computes: which they are, and that they are right."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import nn

from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.pack import BlockOptions, FusedBackend
from thrifty.pack._frozen import address, is_shared
from thrifty.pack.fused import _lanes, _products
from thrifty.pack.fused._products import MEASURED_TIMES, is_quicker, quick_product
from thrifty.pack.fused._record import record
from thrifty.pack.fused._tape import bind


pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch was built without oneDNN"
)

SINGLE = 1e-5


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quicker(monkeypatch):
    """Let oneDNN be faster, whatever the processor."""
    monkeypatch.setattr(_products, "is_quicker", lambda: True)


@pytest.fixture
def computed(monkeypatch):
    """Return the shapes of the products that oneDNN computes."""
    shapes = []
    product = _products._product

    def noting(x, y, *rest):
        shapes.append((*x.shape, y.shape[-1]))
        product(x, y, *rest)

    monkeypatch.setattr(_products, "_product", noting)
    return shapes


def matrix(*shape, transposed=False, seed=0, dtype=torch.float32):
    """Return random numbers, and leave some memory before and after each row."""
    generator = torch.Generator().manual_seed(seed)
    size, rows, columns = shape
    if transposed:
        rows, columns = columns, rows
    out = torch.randn(size, rows + 2, columns + 3, generator=generator, dtype=dtype)
    out = out[:, 1 : rows + 1, 2 : columns + 2]
    return out.transpose(1, 2) if transposed else out


def recorded(function, *inputs, **options):
    program, _ = record(lambda: [function(*inputs, **options)], list(inputs))
    return program


def chosen(function, *inputs, device_type="cpu", **options):
    program = recorded(function, *inputs, **options)
    return quick_product(program.calls[-1], program, device_type=device_type)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [None, 3])
def test_products_are_right_in_all_layouts(computed, left, right, has_bias, size):
    x = matrix(size or 1, 120, 200, transposed=left, seed=1)
    y = matrix(size or 1, 200, 180, transposed=right, seed=2)
    bias = matrix(size or 1, 1, 180, seed=3)
    if size is None:
        x, y, bias = x[0], y[0], bias[0, 0]
    inputs = [bias, x, y] if has_bias else [x, y]
    function = {
        (False, None): torch.mm,
        (True, None): torch.addmm,
        (False, 3): torch.bmm,
        (True, 3): torch.baddbmm,
    }[has_bias, size]
    tape = bind(recorded(function, *inputs), inputs)
    for _ in range(2):
        tape()
        wanted = function(*[t.double() for t in inputs])
        assert float((tape.outputs[0] - wanted).abs().max()) < SINGLE * math.sqrt(200) * 5
        inputs[-1].mul_(-0.5)  # the next step has other numbers at the same places
    assert computed == [(120, 200, 180)] * 2 * (size or 1)


def test_a_bias_may_be_the_same_for_all_matrices(computed):
    inputs = [torch.randn(1, 1, 180), matrix(2, 120, 200), matrix(2, 200, 180)]
    tape = bind(recorded(torch.baddbmm, *inputs), inputs)
    tape()
    assert torch.allclose(tape.outputs[0], torch.baddbmm(*inputs), atol=1e-3)
    assert computed


X, Y = torch.randn(200, 200), torch.randn(200, 200)


@pytest.mark.parametrize(
    ("function", "inputs", "options"),
    [
        (torch.mm, [X.double(), Y.double()], {}),
        (torch.mm, [X.half(), Y.half()], {}),
        (torch.mm, [X[:100, :100], Y[:100]], {}),
        (torch.mm, [torch.randn(2000, 2000), torch.randn(2000, 3)], {}),
        (torch.mm, [torch.randn(2000, 3), torch.randn(3, 2000)], {}),
        (torch.mm, [torch.randn(200, 400)[:, ::2], Y], {}),
        (torch.mm, [X[:1].expand(200, 200), Y], {}),
        (torch.addmm, [X, X, Y], {}),
        (torch.addmm, [X[:1], X, Y], {}),
        (torch.addmm, [X[0, :1], X, Y], {}),
        (torch.addmm, [X[0], X, Y], {"alpha": 2}),
        (torch.baddbmm, [X[None], X[None], Y[None]], {}),
        (torch.baddbmm, [X[0], X[None], Y[None]], {}),
        (torch.baddbmm, [X[None, :1], X[None], Y[None]], {"beta": 0.5}),
        (torch.add, [X, Y], {}),
    ],
    ids=[
        "double", "half", "small", "a few columns", "a few terms", "every second number",
        "one row for all", "a bias for each element", "a bias of two dimensions",
        "one bias for all", "a factor", "batched, for each element", "batched, one dimension",
        "batched, a factor", "no product",
    ],
)  # fmt: skip
def test_other_products_are_left_to_pytorch(function, inputs, options):
    assert chosen(function, *inputs, **options) is None


def test_on_a_gpu_products_are_left_to_pytorch():
    assert chosen(torch.mm, X, Y) is not None
    assert chosen(torch.mm, X, Y, device_type="cuda") is None


def test_a_product_has_to_be_large_enough_for_all_threads():
    torch.set_num_threads(2)
    assert chosen(torch.mm, X, Y[:, :150]) is None
    torch.set_num_threads(1)
    assert chosen(torch.mm, X, Y[:, :150]) is not None


@pytest.mark.parametrize(("of_onednn", "is_chosen"), [(0.5, True), (0.9, False), (2.0, False)])
def test_onednn_is_chosen_where_it_is_much_faster(monkeypatch, of_onednn, is_chosen):
    monkeypatch.setattr(_products, "_measured", lambda: [1.0, of_onednn])
    assert is_quicker.__wrapped__() is is_chosen


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_pytorch_without_onednn_multiplies_by_itself(monkeypatch, error):
    def fails():
        raise error

    monkeypatch.setattr(_products, "_measured", fails)
    assert not is_quicker.__wrapped__()


def test_whoever_switches_onednn_off_does_not_get_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert chosen(torch.mm, X, Y) is None


def test_both_ways_are_measured_on_this_machine(computed):
    of_pytorch, of_onednn = _products._measured()
    assert 0 < of_pytorch < 1
    assert 0 < of_onednn < 1
    assert len(computed) == MEASURED_TIMES


# -- weights that models share -------------------------------------------------------------


def test_shared_weights_stay_shared_though_threads_read_them_at_once():
    weight = torch.randn(200, 200)
    lent = [torch._lazy_clone(weight) for _ in range(2)]
    x, bias = torch.randn(200, 200), torch._lazy_clone(torch.randn(200))
    places = [address(t) for t in lent]
    tapes = [
        bind(recorded(lambda b, x, w: torch.addmm(b, x, w.t()), bias, x, w), [bias, x, w])
        for w in lent
    ]

    def run(tape):
        for _ in range(20):
            tape()

    threads = [threading.Thread(target=run, args=[tape]) for tape in tapes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(is_shared, [*lent, bias]))
    assert [address(t) for t in lent] == places
    wanted = torch.addmm(bias, x, weight.t())
    assert all(torch.allclose(tape.outputs[0], wanted, atol=1e-3) for tape in tapes)


def test_a_shared_weight_that_is_changed_is_read_where_it_is_then(computed):
    weight = torch.randn(200, 200)
    lent = torch._lazy_clone(weight)
    tape = bind(recorded(torch.mm, X, lent), [X, lent])
    tape()
    lent.mul_(2)  # it gets memory of its own
    weight.zero_()
    tape()
    assert torch.allclose(tape.outputs[0], X @ lent, atol=1e-3)
    assert float(tape.outputs[0].abs().max()) > 1
    assert len(computed) == 2


class Wide(Toy):
    """A frozen layer of 256 below a trained one."""

    def network(self, hp):
        frozen = nn.Linear(256, 256)
        with torch.no_grad():
            for n, parameter in enumerate(frozen.parameters()):
                parameter.copy_(0.05 * normal(*parameter.shape, seed=n))
        return nn.Sequential(
            nn.Linear(6, 256), nn.Tanh(), frozen.requires_grad_(False), nn.Tanh(), nn.Linear(256, 1)
        )


@pytest.mark.parametrize("threads", [1, 2])
def test_trials_of_a_pack_have_the_results_of_trials_alone(monkeypatch, computed, threads):
    monkeypatch.setattr(_products, "MIN_MULTIPLICATIONS", 10_000)
    monkeypatch.setattr(_lanes, "CALL_S", 1e-15)
    torch.set_num_threads(threads)
    task, trials = Wide(), [Trial(config={"lr": 0.01 * (k + 1)}) for k in range(4)]
    backend = FusedBackend(task, device="cpu", block=BlockOptions(size=4))
    found = together(backend, trials)
    assert computed
    assert all(result.error is None for result in found)
    computed.clear()
    assert_same(found, alone(task, trials), tolerance=SINGLE)
    assert not computed, "a trial alone is plain PyTorch"
