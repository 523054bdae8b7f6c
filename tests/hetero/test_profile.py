"""Profiling the parts of a step has no side effects."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import Dataset

from thrifty.core import HeteroError
from thrifty.hetero.balance import _profile
from thrifty.hetero.balance._profile import profile_step
from thrifty.hetero.balance._rehearsal import Stopwatch
from thrifty.hetero.training._flat import gradient_buckets
from thrifty.pack._backend import device_name
from thrifty.testing import VirtualClock

from .jobs import FEATURES, data, loss, model, sgd
from .test_measure import OPTIMIZERS, Restless, everything, same


pytestmark = pytest.mark.slow


MIB = 2**20


def made(num):
    return data()[:num]


class Timed:
    """A chain of layers whose backward passes take time, as do the loss and the optimizer."""

    def __init__(self, width=2, layers=1, each=0.25, room=None, slow=()):
        self.clock, self.each, self.room, self.slow = VirtualClock(), each, room, slow
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        for at, layer in enumerate(self.net, start=1):
            layer.register_forward_hook(self.hooked(at))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.optimizer.register_step_post_hook(lambda *_: self.clock.advance(0.125))
        self.width, self.seen = width, []

    def hooked(self, at):
        """Return a hook that takes ``at * each`` seconds for layer number ``at``."""

        def hook(layer, _, output):
            if output.requires_grad:
                output.register_hook(lambda _: self.clock.advance(at * self.each))

        return hook

    def loss(self, net, batch):
        num = len(batch)
        if self.room is not None and num > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.seen.append(num)
        late = 10.0 if self.seen.count(num) in self.slow else 0.0
        self.clock.advance(num * 0.5 + late)
        return net(batch).sum()

    def make(self, num):
        self.clock.advance(0.01 * num)
        return torch.zeros(num, self.width)

    def profiled(self, **options):
        options = {"batches": (1, 2, 4), "budget_s": 1e6, **options}
        return profile_step(
            self.net, self.optimizer, self.make, loss=self.loss, clock=self.clock, **options
        )


def test_phases_are_told_apart():
    profile = Timed(layers=2).profiled()
    assert profile.batches == (1, 2, 4)
    assert profile.forward_s == pytest.approx((0.5, 1.0, 2.0))
    assert profile.backward_s == pytest.approx((0.75,) * 3)
    assert profile.optimizer_s == pytest.approx(0.125)
    assert profile.sample_input_s == pytest.approx(0.01)


def test_buckets_are_ready_when_their_last_gradient_is():
    # A layer has 1 MiB and its bias: the last one fills the first bucket, the others share the
    # second.
    timed = Timed(width=512, layers=3)
    profile = timed.profiled(batches=(1,))
    layer = MIB + 2048
    assert profile.bucket_bytes == (layer, 2 * layer)
    assert profile.bucket_ready == pytest.approx((0.5, 1.0))


def test_a_bucket_waits_for_those_before_it():
    """A bucket waits for earlier ones, even if layers are registered in another order than used."""
    timed = Timed(width=512, layers=2)

    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = timed.net[1], timed.net[0]

        def forward(self, x):
            return self.second(self.first(x))

    net = Reversed()
    profile = profile_step(
        net,
        timed.optimizer,
        timed.make,
        loss=timed.loss,
        batches=(1,),
        budget_s=1.0,
        clock=timed.clock,
    )
    # The first layer's gradient comes last but is in the first bucket.
    assert profile.bucket_ready == pytest.approx((1.0, 1.0))


def test_slow_single_steps_do_not_count():
    # Steps of each size: 2 to warm up, 3 with hooks, then the timed ones.
    profile = Timed(slow=(1, 2, 7)).profiled()
    assert profile.forward_s == pytest.approx((0.5, 1.0, 2.0))


class Busy(Timed):
    """A step during which something else runs, in some of the timed rounds."""

    def __init__(self, busy, **options):
        super().__init__(**options)
        self.busy = busy

    def loss(self, net, batch):
        out = super().loss(net, batch)
        if self.busy(len(batch), self.seen.count(len(batch)) - 6):
            self.clock.advance(5.0)
        return out


def test_sizes_are_timed_in_rounds():
    timed = Timed()
    timed.profiled(budget_s=200.0)
    # The first step of each size is timed when its memory is measured.
    rounds = timed.seen[18:]
    assert rounds[: 3 * 4] == [1, 2, 4] * 4


def test_a_busy_machine_is_noticed_and_its_profile_not_kept(tmp_path, caplog):
    def profiled(busy):
        return Busy(busy).profiled(cache=tmp_path)

    quiet = Timed().profiled()
    with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
        found = profiled(lambda _, number: number % 3 > 0)
    assert "while a step was timed, the machine was busy" in caplog.text
    assert found.is_noisy
    assert found.forward_s == pytest.approx(quiet.forward_s)
    assert found.backward_s == pytest.approx(quiet.backward_s)
    assert not list(tmp_path.iterdir())
    assert not quiet.is_noisy
    assert not profiled(lambda _, number: number % 5 == 1).is_noisy
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("device", "waits_ns", "noisy"),
    [("cpu", 10**12, True), ("cpu", 0, False), ("meta", 10**12, False)],
)
def test_a_machine_that_is_busy_at_every_step_is_noticed_where_steps_run_on_its_processors(
    device, waits_ns, noisy, tmp_path, monkeypatch
):
    told = tmp_path / "7" / "schedstat"
    told.parent.mkdir()
    told.write_text("5 100 1")
    (tmp_path / "8").mkdir()  # a thread that has just ended
    monkeypatch.setattr(_profile, "_THREADS", tmp_path)

    def waiting(net, batch):
        told.write_text(f"5 {100 + waits_ns} 1")
        return net(batch).sum()

    net = nn.Linear(4, 2, device=device)
    profile = profile_step(
        net, sgd(net), lambda num: torch.zeros(num, 4), loss=waiting, batches=(2, 4), budget_s=0.05
    )
    # Real steps may be noisy by themselves, so only waiting that is told makes sure that they are.
    assert profile.noise > 1000 if noisy else profile.noise < 1000


@pytest.mark.parametrize(
    ("device", "text", "others"),
    [
        ("cpu", "cpu  {work} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1", 0.75),
        ("cpu", "cpu  0 {work} 0 {idle} 0 0 0 0", 0.75),
        ("cpu", "cpu  0 0 0 {idle} 0 0 0 {work}", 0.75),  # the host's, in a virtual machine
        ("cpu", "cpu  0 0 0 0 {idle} 0 0 0", 0.0),
        ("meta", "cpu  {work} 0 0 {idle} 0 0 0 0", 0.0),
        ("cpu", "cpu  0 0 0 0 0 0 0 0", 0.0),
        ("cpu", "cpu  1 2", 0.0),
        ("cpu", "", 0.0),
        ("cpu", None, 0.0),
    ],
)
def test_other_programs_are_noticed_where_steps_run_on_the_same_processors(
    device, text, others, tmp_path, monkeypatch, caplog
):
    told = tmp_path / "stat"
    monkeypatch.setattr(_profile, "_STAT", told)
    monkeypatch.setattr(_profile, "_THREADS", tmp_path / "none")
    if text is not None:
        told.write_text(text.format(work=0, idle=0))

    def beside_others(net, batch):
        if text is not None:
            told.write_text(text.format(work=3 * 10**9, idle=10**9))
        return net(batch).sum()

    net = nn.Linear(4, 2, device=device)
    make = lambda num: torch.zeros(num, 4)  # noqa: E731
    with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
        profile = profile_step(net, sgd(net), make, loss=beside_others, batches=(2,), budget_s=0.05)
    assert profile.others == pytest.approx(others, abs=1e-3)
    if others and profile.noise < 0.15:
        assert "other programs used 75 % of the machine's processors" in caplog.text
    assert replace(profile, noise=0.0).is_noisy == bool(others)


def test_larger_batches_that_seem_faster_are_timed_again():
    # As long as the budget lasts, something else runs during each step of the smallest size.
    timed = Busy(lambda num, _: num == 1 and timed.clock.monotonic() < 300.0)
    profile = timed.profiled(budget_s=300.0)
    assert profile.forward_s == pytest.approx((0.5, 1.0, 2.0))


def test_hooks_do_not_cost_the_times_anything():
    timed = Timed()
    weight = timed.net[0].weight
    plain = weight.register_post_accumulate_grad_hook

    def costly(hook):
        def slow(parameter):
            hook(parameter)
            timed.clock.advance(100.0)

        return plain(slow)

    weight.register_post_accumulate_grad_hook = costly
    assert timed.profiled().backward_s == pytest.approx((0.25,) * 3)


@given(st.integers(2, 40), st.integers(1, 10))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_pytorch_cuts_the_same_buckets(count, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for _ in range(count):
        size = int(2 ** (22.5 * torch.rand((), generator=generator)))
        kind = torch.float32 if torch.rand((), generator=generator) < 0.7 else torch.float64
        tensors.append(nn.Parameter(torch.empty(size, dtype=kind)))
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [MIB, 25 * MIB])
    ours = gradient_buckets(tensors, {at: (at + 1) / count for at in range(count)})
    expected = sorted(
        (float(sum(tensors[at].nbytes for at in bucket)), (max(bucket) + 1) / count)
        for bucket in theirs
    )
    assert sorted(num for num, _ in ours) == [num for num, _ in expected]
    ready = [share for _, share in ours]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0
    if len({tensor.dtype for tensor in tensors}) == 1:
        assert sorted(ours) == expected


def test_a_bucket_is_full_at_its_cap():
    sizes = [MIB // 4, 1, 25 * MIB // 4 - 1, 1]
    parameters = [nn.Parameter(torch.empty(size)) for size in sizes]
    buckets = gradient_buckets(parameters, dict.fromkeys(range(4), 1.0))
    assert [num_bytes for num_bytes, _ in buckets] == [MIB, 25 * MIB, 4]


def test_only_parameters_with_a_gradient_are_summed_and_each_once():
    net = nn.ModuleDict({
        "used": nn.Linear(2, 2, bias=False),
        "tied": nn.Linear(2, 2, bias=False),
        "frozen": nn.Linear(2, 2).requires_grad_(requires_grad=False),
        "idle": nn.Linear(2, 2),
    })
    net["tied"].weight = net["used"].weight

    def used(net, batch):
        return net["frozen"](net["tied"](net["used"](batch))).sum()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    profile = profile_step(
        net, optimizer, lambda num: torch.ones(num, 2), loss=used, batches=(1,), budget_s=0.0
    )
    assert profile.bucket_bytes == (16.0,)


def test_memory_is_estimated_on_a_cpu():
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    profile = profile_step(
        net,
        optimizer,
        lambda num: torch.zeros(num, 4),
        loss=lambda net, x: net(x).sum(),
        batches=(3, 7),
        clock=VirtualClock(),
    )
    # Parameters, gradients and momentum; the batch and the output of tanh.
    weights = 3 * (4 * 8 + 8 * 2)
    assert profile.peak_bytes == tuple(4.0 * (weights + num * (4 + 8)) for num in (3, 7))
    # What is only estimated may be off by more than what is measured.
    assert profile.peak_error == 0.5


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(None, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")],
)
def test_the_precision_is_that_of_the_layers_results(dtype, precision):
    def under_autocast(net, x):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return net(x).float().sum()

    net = nn.Linear(4, 2)
    profile = profile_step(
        net,
        torch.optim.SGD(net.parameters()),
        lambda num: torch.zeros(num, 4),
        loss=under_autocast,
        batches=(3,),
        clock=VirtualClock(),
    )
    assert profile.precision == precision


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_everything_is_left_as_it_was(make, trained):
    net = Restless()
    optimizer = make(net)
    if trained:
        loss(net, made(16)).backward()
        optimizer.step()
    gradients = [None if p.grad is None else (p.grad, p.grad.clone()) for p in net.parameters()]
    before = everything(net, optimizer)
    profile_step(net, optimizer, data(), loss=loss, batches=(4, 8), clock=VirtualClock())
    assert all(map(same, before, everything(net, optimizer)))
    for parameter, kept in zip(net.parameters(), gradients, strict=True):
        if kept is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is kept[0]
            assert torch.equal(*kept)


def test_gradients_that_the_optimizer_does_not_own_are_left_alone():
    net = model()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    loss(net, made(16)).backward()
    gradient = net[-1].weight.grad
    before = gradient.clone()
    profile_step(net, optimizer, data(), loss=loss, batches=(4,), clock=VirtualClock())
    assert net[-1].weight.grad is gradient
    assert torch.equal(gradient, before)


def test_it_is_left_as_it_was_after_an_error_too():
    net, calls = Restless(), []
    optimizer = sgd(net)

    def failing(net, batch):
        calls.append(1)
        if len(calls) == 7:
            raise RuntimeError("shapes do not fit")
        return loss(net, batch)

    before = everything(net, optimizer)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        profile_step(net, optimizer, data(), loss=failing, batches=(4, 8))
    assert all(map(same, before, everything(net, optimizer)))


def test_sizes_end_where_memory_ends():
    assert Timed(room=3).profiled().batches == (1, 2)


def test_the_smallest_size_has_to_fit():
    with pytest.raises(
        HeteroError, match=r"a step with 1 sample\(s\) does not fit into the memory of cpu"
    ):
        Timed(room=0).profiled()


def test_sizes_end_where_the_budget_does():
    timed = Timed()
    profile = timed.profiled(batches=(1, 2, 4, 8, 16, 32), budget_s=60.0)
    assert 1 < len(profile.batches) < 6
    assert timed.clock.monotonic() <= 60.0


def test_one_size_is_measured_whatever_it_costs():
    timed = Timed()
    assert timed.profiled(budget_s=0.0).batches == (1,)
    # Warm-up steps, repeats, and one for the precision.
    assert len(timed.seen) == 9


def test_more_budget_buys_more_repeats():
    few, many = Timed(), Timed()
    few.profiled(budget_s=60.0)
    many.profiled(budget_s=120.0)
    assert len(many.seen) > len(few.seen)
    many.profiled(budget_s=1e9)
    assert max(many.seen.count(num) for num in (1, 2, 4)) < 300


def test_a_data_set_gives_the_batches_that_it_can_fill():
    net = model()
    profile = profile_step(
        net, sgd(net), data(), loss=loss, batches=(20, 60, 61), budget_s=100.0, clock=VirtualClock()
    )
    assert profile.batches == (20, 60)


class Few(Dataset):
    """A data set whose samples take a second each to read."""

    def __init__(self, clock):
        self.clock = clock

    def __len__(self):
        return 5

    def __getitem__(self, at):
        self.clock.advance(1.0)
        return torch.zeros(FEATURES, dtype=torch.float64), 0


def test_reading_a_sample_takes_its_time():
    net, clock = model(), VirtualClock()
    profile = profile_step(
        net, sgd(net), Few(clock), loss=loss, batches=(2, 5), budget_s=100.0, clock=clock
    )
    assert profile.sample_input_s == pytest.approx(1.0)
    assert profile.forward_s == pytest.approx((0.0, 0.0), abs=1e-6)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ((), r"`batches` must ascend from 1 or more, got \[\]"),
        ((0, 1), "must ascend"),
        ((2, 2), "must ascend"),
        ((61,), "the data set has 60 samples, and the smallest batch 61"),
    ],
)
def test_sizes_that_make_no_sense(batches, message):
    net = model()
    with pytest.raises(HeteroError, match=message):
        profile_step(net, sgd(net), data(), loss=loss, batches=batches)


def test_there_has_to_be_something_to_train():
    net = model()
    optimizer = sgd(net)
    with pytest.raises(HeteroError, match="no parameter got a gradient"):
        profile_step(
            net,
            optimizer,
            data(),
            loss=lambda *_: torch.zeros((), requires_grad=True),
            batches=(1,),
            budget_s=0.0,
        )
    net.requires_grad_(requires_grad=False)
    with pytest.raises(HeteroError, match="no parameter of the model needs a gradient"):
        profile_step(net, optimizer, data(), loss=loss)
    with pytest.raises(HeteroError, match="the model has no parameters"):
        profile_step(nn.Tanh(), optimizer, data(), loss=loss)


class Another(nn.Linear):
    """Another type of layer with the same shape."""


class TestCache:
    def run(self, folder, **changes):
        """Return the steps trained for a profile, and the profile."""
        steps = []

        def counted(net, batch):
            steps.append(1)
            return net(batch).sum()

        width = changes.get("width", 3)
        net = changes.get("net", nn.Linear(3, 2))
        profile = profile_step(
            net,
            changes.get("optimizer", torch.optim.SGD)(net.parameters(), lr=0.1),
            lambda num: torch.zeros(num, changes.get("more", 1), width),
            loss=counted,
            batches=changes.get("batches", (2, 4)),
            budget_s=0.0,
            clock=VirtualClock(),
            cache=folder,
        )
        return len(steps), profile

    def test_a_known_step_is_not_measured_again(self, tmp_path):
        steps, profile = self.run(tmp_path / "new" / "folder")
        assert steps > 0
        assert self.run(tmp_path / "new" / "folder") == (0, profile)
        assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]

    @pytest.mark.parametrize(
        "changes",
        [
            {"net": nn.Sequential(nn.Linear(3, 2))},
            {"net": nn.Linear(3, 2).eval()},
            {"net": nn.Linear(3, 5)},
            {"net": Another(3, 2)},
            {"optimizer": torch.optim.Adam},
            {"more": 2},
            {"batches": (2, 4, 8)},
        ],
    )
    def test_another_one_is(self, tmp_path, changes):
        self.run(tmp_path)
        assert self.run(tmp_path, **changes)[0] > 0

    @pytest.mark.parametrize("garbage", [b"", b"[]", b"{}", b"\xff", b'{"device": "x"}'])
    def test_a_damaged_file_is_measured_again_and_mended(self, tmp_path, garbage, caplog):
        _, profile = self.run(tmp_path)
        (path,) = tmp_path.iterdir()
        path.write_bytes(garbage)
        with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
            assert self.run(tmp_path)[0] > 0
        assert "holds no profile" in caplog.text
        assert json.loads(path.read_text())["bucket_bytes"] == list(profile.bucket_bytes)

    def test_a_profile_that_cannot_be_kept_is_a_profile(self, tmp_path, caplog):
        (tmp_path / "file").touch()
        with caplog.at_level(logging.WARNING, logger="thrifty.hetero"):
            steps, profile = self.run(tmp_path / "file")
        assert steps > 0
        assert profile.batches == (2,)
        assert "a profile cannot be kept" in caplog.text


def test_events_measure_where_the_host_runs_ahead(monkeypatch):
    """Timing uses CUDA events; this test runs without a CUDA device."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            calls.append(("record", stream))

        def elapsed_time(self, end):
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    watch = Stopwatch(torch.device("cuda:1"), VirtualClock())
    begin, end = watch.mark(), watch.mark()
    watch.wait()
    assert watch.seconds(begin, end) == 0.25
    assert calls == [("record", "stream of cuda:1")] * 2 + ["wait"]


def test_the_name_of_a_gpu_is_what_torch_calls_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"A GPU {device.index}")
    assert device_name(torch.device("cuda", 1)) == "A GPU 1"


def test_the_usual_time_counts_on_a_gpu_and_the_least_on_a_processor():
    """A small step on a GPU is launches by Python, whose least time is no step's time."""
    phases = [(1.0, 2.0, 0.5), (1.5, 2.5, 0.6), (9.0, 3.0, 0.7)]
    on_processor, on_gpu = (
        _profile._Measured(phases=phases),
        _profile._Measured(phases=phases, on_gpu=True),
    )
    assert [on_processor.phase(at) for at in range(3)] == [1.0, 2.0, 0.5]
    assert [on_gpu.phase(at) for at in range(3)] == [1.5, 2.5, 0.6]
    assert (on_processor.step_s, on_gpu.step_s) == (3.5, 4.6)
    assert on_processor.noise == pytest.approx(1.1 / 3.5)
    assert on_gpu.noise == 0
