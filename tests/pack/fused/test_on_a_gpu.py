"""What only a GPU runs, on stand-ins: captured steps, updates and the precision of arithmetic."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from thrifty.pack._state import cuda_generator, seed_step, torch_streams
from thrifty.pack.backends._fused import _sent
from thrifty.pack.fused._binding import RowBinder
from thrifty.pack.fused._randomness import DropoutMask, _go_to, _place, fill
from thrifty.pack.fused._tape import Tape, captured
from thrifty.pack.fused.optimizers import Rows
from thrifty.pack.fused.optimizers._rules import SGD, Adagrad, Adam, AdamW, RMSprop
from thrifty.pack.verify import StepTaken, compare_step, rounds_to_tf32
from thrifty.pack.verify._compare import MOST_SENT, relative_tolerance
from thrifty.pack.verify._reference import _begin_adagrad


CPU = torch.device("cpu")


class Graph:
    """A stand-in for ``torch.cuda.CUDAGraph`` that replays by calling what was captured."""

    def __init__(self):
        self.is_capturing = False
        self.num_replays = 0

    def capture_begin(self, **options):
        self.is_capturing = True
        assert not gc.isenabled()

    def capture_end(self):
        self.is_capturing = False

    def replay(self):
        assert not self.is_capturing
        self.num_replays += 1


@pytest.fixture
def graphs(monkeypatch):
    made = []

    def make():
        made.append(Graph())
        return made[-1]

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr("torch.cuda.CUDAGraph", make)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    return made


def test_a_captured_tape_is_replayed_and_keeps_what_it_captured(graphs):
    calls = []

    class Work:
        def __call__(self):
            calls.append(1)

        def __del__(self):
            calls.append("freed")

    replayed = captured(Tape(Work(), ()), CPU)
    gc.collect()
    replayed()
    replayed()
    assert calls == [1]
    assert graphs[0].num_replays == 2
    del replayed
    gc.collect()
    assert calls == [1, "freed"]


def test_a_shared_tensor_that_has_moved_is_not_read_where_it_was(graphs):
    calls, base = [], torch.ones(3)
    replayed = captured(Tape(lambda: calls.append(1), ()), CPU, shared=[base])
    replayed()
    assert (len(calls), graphs[0].num_replays) == (1, 1)
    base.data = base.data.clone()  # as the first write into a shared tensor does
    replayed()
    assert (len(calls), graphs[0].num_replays) == (2, 1)


def test_a_tape_that_waits_for_the_gpu_is_not_captured(graphs):
    def waits():
        raise RuntimeError("operation not permitted when stream is capturing")

    assert captured(Tape(waits, ()), CPU) is None
    assert gc.isenabled()
    assert not graphs[0].is_capturing


def test_a_lack_of_memory_is_said(graphs):
    def large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        captured(Tape(large, ()), CPU)
    assert gc.isenabled()


def test_garbage_is_not_collected_afterwards_if_it_was_not_before(graphs):
    gc.disable()
    try:
        captured(Tape(lambda: None, ()), CPU)
        assert not gc.isenabled()
    finally:
        gc.enable()


OPTIONS = [
    (SGD, [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}]),
    (SGD, [{"lr": 0.1, "momentum": 0.9, "nesterov": True}, {"lr": 0.2}]),
    (Adam, [{"lr": 0.1}, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}]),
    (AdamW, [{"lr": 0.1}, {"lr": 0.01, "eps": 1e-3}]),
    (Adagrad, [{"lr": 0.1, "lr_decay": 0.1}, {"lr": 0.2}]),
    (RMSprop, [{"lr": 0.1, "momentum": 0.5}, {"lr": 0.01}]),
]


def rows_of(optimizer):
    generator = torch.Generator().manual_seed(0)
    return Rows(
        parameters=torch.randn(3, 5, generator=generator),
        gradients=torch.zeros(3, 5),
        moments={name: torch.zeros(3, 5) for name in optimizer.moments},
        steps=[0, 0, 0],
    )


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_captured_update_is_the_update(kind, options, is_captured, monkeypatch):
    """Learning rates and the number of trials may change from step to step."""
    monkeypatch.setattr(
        "thrifty.pack.fused.optimizers._fused_optimizer.captured",
        lambda tape, device: tape if is_captured else None,
    )
    plain, recorded = kind(), kind()
    one, other = rows_of(plain), rows_of(recorded)
    for step in range(6):
        now = [{**each, "lr": each["lr"] / (1 + step // 2)} for each in options]
        now = now[:1] if step == 3 else now
        gradients = torch.full((3, 5), 0.1 * (step + 1))
        for rows in (one, other):
            rows.gradients.copy_(gradients)
        plain.update(one, plain.table(one, now))
        recorded.update_on_gpu(other, now)
        for rows in (one, other):
            for row in range(len(now)):
                rows.steps[row] += 1
        torch.testing.assert_close(other.parameters, one.parameters, rtol=0, atol=0)


def test_a_table_is_sent_once_while_it_stays_the_same():
    optimizer, options = SGD(), [{"lr": 0.1}]
    rows = rows_of(optimizer)
    first = optimizer.table(rows, options)
    assert optimizer.table(rows, [{"lr": 0.1}]) is first
    assert optimizer.table(rows, [{"lr": 0.2}]) is not first


def weights(*shapes, is_cuda=True):
    return [SimpleNamespace(is_cuda=is_cuda, dim=shape.__len__) for shape in shapes]


@pytest.mark.parametrize(
    ("matmul", "cudnn", "tensors", "expected"),
    [
        (False, True, weights((3, 4), (3,)), False),
        (False, True, weights((3, 4, 2, 2)), True),
        (False, False, weights((3, 4, 2, 2)), False),
        (True, False, weights((3, 4)), True),
        (True, True, weights((3, 4, 2, 2), is_cuda=False), False),
        (True, True, [], False),
    ],
)
def test_where_numbers_are_rounded_to_tf32(monkeypatch, matmul, cudnn, tensors, expected):
    monkeypatch.setattr("torch.backends.cuda.matmul", SimpleNamespace(allow_tf32=matmul))
    monkeypatch.setattr("torch.backends.cudnn", SimpleNamespace(allow_tf32=cudnn))
    assert rounds_to_tf32(tensors) is expected


@pytest.mark.parametrize("num_terms", [1, 10**9])
def test_tf32_is_allowed_for_in_single_precision_only(num_terms):
    single = relative_tolerance(torch.float32, num_terms=num_terms, tf32=True)
    added = single - relative_tolerance(torch.float32, num_terms=num_terms)
    assert added == pytest.approx(16 / 1024), "however many terms there are"
    double = relative_tolerance(torch.float64, num_terms=100, tf32=True)
    assert double == relative_tolerance(torch.float64, num_terms=100)


def test_adagrad_begins_as_torch_makes_it():
    parameter = torch.nn.Parameter(torch.ones(3))
    made, cleared = (
        torch.optim.Adagrad([parameter], initial_accumulator_value=0.5) for _ in range(2)
    )
    cleared.state.clear()
    _begin_adagrad(cleared)
    assert made.state[parameter].keys() == cleared.state[parameter].keys()
    for name, value in made.state[parameter].items():
        assert torch.equal(value, cleared.state[parameter][name]), name


# -- programs, masks and streams -----------------------------------------------------------------


@pytest.mark.parametrize("can", [True, False])
def test_a_captured_program_leaves_running_statistics_as_they_were(graphs, monkeypatch, can):
    mean = torch.zeros(3)
    if not can:
        monkeypatch.setattr(
            "thrifty.pack.fused._binding.captured", lambda tape, device, shared: None
        )
    binder = SimpleNamespace(_device=CPU, num_uncaptured=0)
    tape = Tape(lambda: mean.add_(1), ())
    found = RowBinder._captured(binder, tape, [mean])
    assert mean.tolist() == [0, 0, 0]
    assert (found is tape) is not can
    assert binder.num_uncaptured == (not can)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    num_copies = 0

    @property
    def is_cuda(self):
        return True

    def cpu(self):
        OnGpu.num_copies += 1
        return self.as_subclass(torch.Tensor)


@pytest.fixture
def own_stream(monkeypatch):
    """Let the CPU's global stream be that of the GPU."""
    for name in ("_state", "fused._randomness"):
        monkeypatch.setattr(
            f"thrifty.pack.{name}.cuda_generator", lambda _: torch.default_generator
        )
    # The CPU's generators have no offset, so their place is their whole state.
    module = "thrifty.pack.fused._randomness"
    monkeypatch.setattr(f"{module}._place", lambda generator: generator.get_state())
    monkeypatch.setattr(f"{module}._go_to", lambda generator, place: generator.set_state(place))


def test_the_place_of_a_generator_is_its_seed_and_offset():
    class Generator:
        seed, offset = 7, 8

        def initial_seed(self):
            return self.seed

        def get_offset(self):
            return self.offset

        def manual_seed(self, seed):
            self.seed, self.offset = seed, 0

        def set_offset(self, offset):
            self.offset = offset

    one, other = Generator(), Generator()
    other.seed, other.offset = 1, 0
    _go_to(other, _place(one))
    assert _place(other) == _place(one) == (7, 8)


@pytest.mark.parametrize("p", [0.3, 0.8])
def test_masks_are_drawn_by_the_function_that_draws_them_alone(own_stream, p):
    x = torch.ones(2, 5, 4)
    noise = torch.zeros(2, 5, 4).as_subclass(OnGpu)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    draw = DropoutMask(noise=noise, path=None, p=p, drawn_by="dropout")
    fill(draw, generators=generators, rates=[{}, {}])
    fill(draw, generators=generators, rates=[{}, {}])
    assert torch.equal(torch.get_rng_state(), before), "the stream was only lent"
    for k, seed in enumerate((3, 4)):
        torch.manual_seed(seed)
        torch.native_dropout(x[k], p, train=True)
        assert torch.equal(noise[k].cpu(), torch.native_dropout(x[k], p, train=True)[0])


def test_masks_of_attention_are_those_of_its_kernel(own_stream, monkeypatch):
    """The kernel's stream moves on by whole groups of numbers, as after the kernel alone."""
    calls, offsets = [], [0]

    def kernel(uniform, p, seed, offset):
        calls.append((tuple(uniform.shape), p, seed, offset))
        return uniform.copy_(torch.arange(uniform.numel()).view(uniform.shape) / uniform.numel())

    class Stream:
        def __getattr__(self, name):
            return getattr(torch.default_generator, name)

        def get_offset(self):
            return offsets[-1]

        def set_offset(self, offset):
            offsets.append(offset)

    monkeypatch.setattr("thrifty.pack.fused._randomness.cuda_generator", lambda _: Stream())
    monkeypatch.setattr(torch.ops.aten, "_fill_mem_eff_dropout_mask_", kernel)
    noise = torch.zeros(1, 2, 1, 3, 3).as_subclass(OnGpu)
    draw = DropoutMask(noise=noise, path=None, p=0.5, drawn_by="attention")
    for _ in range(2):
        fill(draw, generators=[torch.Generator().manual_seed(3)], rates=[{}])
    assert calls == [((2, 1, 3, 3), 0.5, 3, 0), ((2, 1, 3, 3), 0.5, 3, 20)]
    assert noise.cpu().flatten().tolist() == [0.0] * 10 + [2.0] * 8


def test_a_pause_of_momentum_leaves_the_buffer():
    """As in torch, whose optimizer goes on from what the buffer was before the pause."""
    weight = torch.nn.Parameter(torch.ones(5))
    alone = torch.optim.SGD([weight], lr=0.1)
    optimizer = SGD()
    rows = rows_of(optimizer)
    rows.parameters.fill_(1.0)
    for step, momentum in enumerate([0.9, 0.9, 0.0, 0.0, 0.5]):
        gradient = torch.full((5,), 0.1 * (step + 1))
        rows.gradients.copy_(gradient.expand(3, -1))
        weight.grad = gradient
        alone.param_groups[0]["momentum"] = momentum
        alone.step()
        options = [{"lr": 0.1, "momentum": momentum}]
        optimizer.update(rows, optimizer.table(rows, options))
        rows.steps[0] += bool(momentum)
        torch.testing.assert_close(rows.parameters[0], weight.detach())
        kept = alone.state[weight]["momentum_buffer"]
        torch.testing.assert_close(rows.moments["momentum_buffer"][0], kept)


def test_a_step_seeds_the_streams_of_both(own_stream):
    seed_step(5, torch.device("cuda"))
    first = torch_streams(torch.device("cuda"))
    seed_step(5, CPU)
    assert len(first) == 2
    assert all(map(torch.equal, first, torch_streams(CPU) * 2))


@pytest.mark.parametrize(("name", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_a_device_without_a_number_is_the_present_one(monkeypatch, name, index):
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("torch.cuda.default_generators", ("first", "second"), raising=False)
    assert cuda_generator(torch.device(name)) == ("first", "second")[index]


def test_numbers_are_sent_without_waiting():
    calls = []

    class Order:
        def pin_memory(self):
            calls.append("pinned")
            return self

        def to(self, device, **options):
            calls.append((device.type, options))
            return self

    order = Order()
    assert _sent(order, CPU) is order
    assert not calls
    _sent(order, torch.device("cuda"))
    assert calls == ["pinned", ("cuda", {"non_blocking": True})]


def step_of(size, *, off=0.0):
    def tensor(*shape, value=1.0, dtype=torch.float32):
        return torch.full(shape, value, dtype=dtype).as_subclass(OnGpu)

    return StepTaken(
        loss=tensor(value=2.0),
        gradients={"w": tensor(size, 3, value=0.5 + off), "b": tensor(3), "idle": None},
        tensors={"w": tensor(size, 3), "b": tensor(3), "n": tensor(1, dtype=torch.long)},
    )


@pytest.mark.parametrize("size", [4, MOST_SENT])
def test_small_steps_are_compared_after_one_copy_for_each_type(size):
    OnGpu.num_copies = 0
    before = {name: t - 1 for name, t in step_of(size).tensors.items()}
    found = compare_step(step_of(size, off=0.1), step_of(size), before=before, num_terms=10)
    assert found.gradient_of == "w"
    assert found.found == pytest.approx(0.1, rel=1e-5)
    assert OnGpu.num_copies == (2 if size == 4 else 0)
    assert compare_step(step_of(size), step_of(size), before=before, num_terms=10) is None
