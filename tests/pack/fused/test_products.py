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
from thrifty.pack.fused._products import (
    COMPARED_ROWS,
    TRIED_NUMBERS,
    _Product,
    is_better,
    quick_product,
)
from thrifty.pack.fused._record import record
from thrifty.pack.fused._tape import bind


pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="PyTorch was built without oneDNN"
)

SINGLE = 1e-5


@pytest.fixture
def by_onednn(monkeypatch):
    """Let oneDNN be better, whatever the processor; return the shapes that it multiplies."""
    shapes = []
    multiply = _products._multiply

    def noting(x, y, *rest):
        shapes.append((*x.shape, y.shape[-1]))
        multiply(x, y, *rest)

    monkeypatch.setattr(_products, "is_better", lambda shape, *, threads: True)
    monkeypatch.setattr(_Product, "_is_same", lambda self, args, out: True)
    monkeypatch.setattr(_products, "_multiply", noting)
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
def test_products_are_right_in_all_layouts(by_onednn, left, right, has_bias, size):
    x = matrix(size or 1, 700, 400, transposed=left, seed=1)
    y = matrix(size or 1, 400, 530, transposed=right, seed=2)
    bias = matrix(size or 1, 1, 530, seed=3)
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
    for _ in range(3):
        tape()
        wanted = function(*[t.double() for t in inputs])
        assert float((tape.outputs[0] - wanted).abs().max()) < SINGLE * 5 * math.sqrt(400)
        inputs[-1].mul_(-0.5)  # the next step has other numbers at the same places
    assert by_onednn == [(700, 400, 530)] * 2 * (size or 1), "the first step is PyTorch's"


@pytest.mark.parametrize("kind", ["every other", "a column", "one number"])
@pytest.mark.parametrize("size", [0, 3])
def test_a_bias_with_gaps_is_read_where_it_is(by_onednn, kind, size):
    numbers = torch.randn(400, 2)
    bias = {
        "every other": numbers.flatten()[::2],
        "a column": numbers[:, 1],
        "one number": numbers[:1, 0].expand(400),
    }[kind]
    x, y = matrix(max(size, 1), 300, 400), matrix(max(size, 1), 400, 400)
    inputs = [bias.expand(size, 1, 400), x, y] if size else [bias, x[0], y[0]]
    function = torch.baddbmm if size else torch.addmm
    tape = bind(recorded(function, *inputs), inputs)
    tape.run()
    assert torch.allclose(tape.outputs[0], function(*inputs), atol=1e-3)
    # the operator itself, wherever the bias comes from
    out = torch.empty_like(tape.outputs[0])
    (_products._baddbmm if size else _products._addmm)(*inputs, out=out)
    assert torch.allclose(out, function(*inputs), atol=1e-3)


def test_a_bias_may_be_the_same_for_all_matrices(by_onednn):
    inputs = [torch.randn(1, 1, 230), matrix(2, 220, 200), matrix(2, 200, 230)]
    tape = bind(recorded(torch.baddbmm, *inputs), inputs)
    tape()
    tape()
    assert torch.allclose(tape.outputs[0], torch.baddbmm(*inputs), atol=1e-3)
    assert by_onednn


X, Y = torch.randn(240, 240), torch.randn(240, 240)


@pytest.mark.parametrize(
    ("function", "inputs", "options"),
    [
        (torch.mm, [X.double(), Y.double()], {}),
        (torch.mm, [X.half(), Y.half()], {}),
        (torch.mm, [X[:100, :100], Y[:100]], {}),
        (torch.mm, [torch.randn(2000, 2000), torch.randn(2000, 3)], {}),
        (torch.mm, [torch.randn(2000, 3), torch.randn(3, 2000)], {}),
        (torch.mm, [torch.randn(240, 480)[:, ::2], Y], {}),
        (torch.mm, [X[:1].expand(240, 240), Y], {}),
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
    assert chosen(torch.mm, X, Y[:, :200]) is None
    torch.set_num_threads(1)
    assert chosen(torch.mm, X, Y[:, :200]) is not None


def test_whoever_switches_onednn_off_does_not_get_it(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert chosen(torch.mm, X, Y) is None


# -- which way is better -------------------------------------------------------------------


MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
BMM, BADDBMM = torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default


def shape(rows=60, terms=400, columns=50, *, function=MM, left=False, right=False):
    return _products._Shape(
        function=function,
        rows=rows,
        terms=terms,
        columns=columns,
        is_left_transposed=left,
        is_right_transposed=right,
    )


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("function", [MM, ADDMM, BMM, BADDBMM])
def test_what_is_tried_is_what_the_program_computes(function, left, right):
    *bias, x, y = shape(function=function, left=left, right=right).arguments()
    size = (2,) if function in (BMM, BADDBMM) else ()
    assert (x.shape, y.shape) == ((*size, 60, 400), (*size, 400, 50))
    assert [t.stride(-1) != 1 for t in (x, y)] == [left, right]
    assert [t.shape for t in bias] == {MM: [], BMM: [], ADDMM: [(50,)], BADDBMM: [(2, 1, 50)]}[
        function
    ]
    assert function(*bias, x, y).any(), "numbers other than zero, also for a bias"
    assert is_better.__wrapped__(shape(function=function), threads=1) in (True, False)


@pytest.fixture
def tried(monkeypatch):
    """Return a function that says whether oneDNN is chosen with this result after these seconds."""

    def is_taken(compute, *, seconds):
        clock = iter(range(10**6))
        spent = [0.0]

        def now():
            return next(clock) * 1e-9 + spent[0]

        def by_pytorch(x, y, *, out):
            spent[0] += 1.0
            out.copy_(x @ y)

        def by_onednn(x, y, *, out):
            spent[0] += seconds
            out.copy_(compute(x, y))

        monkeypatch.setattr(_products.time, "perf_counter", now)
        monkeypatch.setitem(_products._WAYS, MM, (by_pytorch, by_onednn))
        return is_better.__wrapped__(shape(), threads=1)

    return is_taken


def test_onednn_is_better_where_it_is_faster(tried):
    assert tried(torch.matmul, seconds=0.5)
    assert not tried(torch.matmul, seconds=0.99)
    assert not tried(torch.matmul, seconds=2.0)


def test_onednn_is_not_better_where_one_bit_differs(tried):
    def moved(x, y):
        out = x @ y
        out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf))
        return out

    assert not tried(moved, seconds=0.5)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_pytorch_without_onednn_multiplies_by_itself(tried, error):
    def fails(x, y):
        raise error

    assert not tried(fails, seconds=0.5)


def test_a_layout_that_onednn_does_not_take_is_left_to_pytorch(monkeypatch):
    def fails(x, y, *, out):
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(_products, "is_better", lambda shape, *, threads: True)
    monkeypatch.setitem(_products._WAYS, MM, (torch.mm, fails))
    tape = bind(recorded(torch.mm, X, Y), [X, Y])
    for _ in range(2):
        tape()
    assert torch.equal(tape.outputs[0], X @ Y)


def test_the_first_result_of_a_program_decides_too(monkeypatch):
    monkeypatch.setattr(_products, "is_better", lambda shape, *, threads: True)
    ways = []

    def way(name, *, moved=0.0):
        def multiply(x, y, *, out):
            ways.append((name, len(x)))
            out.copy_(x @ y + moved)

        return multiply

    for moved, expected in [(0.0, "onednn"), (1e-6, "pytorch")]:
        mm = (way("pytorch"), way("onednn", moved=moved))
        monkeypatch.setitem(_products._WAYS, MM, mm)
        tape = bind(recorded(torch.mm, X, Y), [X, Y])
        tape()
        tape()
        assert ways == [("pytorch", 240), ("onednn", COMPARED_ROWS), (expected, 240)]
        ways.clear()


def test_each_number_of_threads_is_tried(monkeypatch):
    tried = []

    def is_better(shape, *, threads):
        tried.append((shape.rows, shape.terms, shape.columns, threads))
        return False

    monkeypatch.setattr(_products, "is_better", is_better)
    x, y = torch.randn(2000, 4096), torch.randn(4096, 240)
    tape = bind(recorded(torch.mm, x, y), [x, y])
    for threads in (1, 1, 2, 2, 1):
        torch.set_num_threads(threads)
        tape()
    sizes = (TRIED_NUMBERS // 4096, 4096, 240)  # all terms, but no more rows than needed
    assert tried == [(*sizes, 1), (*sizes, 2), (*sizes, 1)]


def test_results_that_are_not_numbers_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr(_products, "is_better", lambda shape, *, threads: True)
    x = torch.full((240, 240), torch.nan)
    tape = bind(recorded(torch.mm, x, Y), [x, Y])
    tape()
    x.copy_(X)
    tape()
    assert torch.equal(tape.outputs[0], X @ Y)


@pytest.mark.parametrize(("rows", "terms", "columns"), [(300, 300, 600), (700, 777, 300)])
@pytest.mark.parametrize("right", [False, True])
def test_what_is_chosen_on_this_machine_has_the_bits_of_pytorch(rows, terms, columns, right):
    x, y = torch.randn(rows, terms), matrix(1, terms, columns, transposed=right)[0]
    bias = torch.randn(columns)
    tape = bind(recorded(torch.addmm, bias, x, y), [bias, x, y])
    for _ in range(3):
        tape()
        assert torch.equal(tape.outputs[0], torch.addmm(bias, x, y))
        x.add_(1)


# -- weights that models share -------------------------------------------------------------


def test_shared_weights_stay_shared_though_threads_read_them_at_once(by_onednn):
    weight = torch.randn(240, 240)
    lent = [torch._lazy_clone(weight) for _ in range(2)]
    x, bias = torch.randn(240, 240), torch._lazy_clone(torch.randn(240))
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
    assert len(by_onednn) == 2 * 19
    assert all(map(is_shared, [*lent, bias]))
    assert [address(t) for t in lent] == places
    wanted = torch.addmm(bias, x, weight.t())
    assert all(torch.allclose(tape.outputs[0], wanted, atol=1e-3) for tape in tapes)


def test_a_shared_weight_that_is_changed_is_read_where_it_is_then(by_onednn):
    weight = torch.randn(240, 240)
    lent = torch._lazy_clone(weight)
    tape = bind(recorded(torch.mm, X, lent), [X, lent])
    tape()
    tape()
    lent.mul_(2)  # it gets memory of its own
    weight.zero_()
    tape()
    assert torch.allclose(tape.outputs[0], X @ lent, atol=1e-3)
    assert float(tape.outputs[0].abs().max()) > 1
    assert len(by_onednn) == 2


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
def test_trials_of_a_pack_have_the_results_of_trials_alone(monkeypatch, by_onednn, threads):
    monkeypatch.setattr(_products, "MIN_MULTIPLICATIONS", 10_000)
    monkeypatch.setattr(_lanes, "CALL_S", 1e-15)
    torch.set_num_threads(threads)
    task, trials = Wide(), [Trial(config={"lr": 0.01 * (k + 1)}) for k in range(4)]
    backend = FusedBackend(task, device="cpu", block=BlockOptions(size=4))
    found = together(backend, trials)
    assert by_onednn
    assert all(result.error is None for result in found)
    by_onednn.clear()
    assert_same(found, alone(task, trials), tolerance=SINGLE)
    assert not by_onednn, "a trial alone is plain PyTorch"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pack_has_the_same_bits_with_and_without_onednn(monkeypatch, threads):
    """Time does not count here, so oneDNN computes whatever it computes bit by bit."""
    monkeypatch.setattr(_products, "MIN_MULTIPLICATIONS", 10_000)
    monkeypatch.setattr(_products, "MAX_RATIO", math.inf)
    monkeypatch.setattr(_products, "is_better", is_better.__wrapped__)
    torch.set_num_threads(threads)
    trials = [Trial(config={"lr": 0.01 * (k + 1)}, seed=k) for k in range(4)]

    def train():
        return together(FusedBackend(Wide(), device="cpu", block=BlockOptions(size=4)), trials)

    with_onednn = train()
    monkeypatch.setattr(_products, "MIN_MULTIPLICATIONS", math.inf)
    assert_same(with_onednn, train())
