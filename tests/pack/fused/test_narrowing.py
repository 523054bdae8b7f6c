"""Programs without unread rows compute what whole programs compute, with fewer operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

from tests.devices import here
from tests.pack._drive import Trial, alone, assert_same, together
from tests.pack._toys import Toy, normal
from thrifty.core import DivergedError
from thrifty.pack import ArrayData, AutoBackend, FusedBackend, UnverifiedError
from thrifty.pack.fused import _narrowing, _row_rules
from thrifty.pack.fused._fusable import UnfusableError
from thrifty.pack.fused._narrowing import narrowed
from thrifty.pack.fused._record import record
from thrifty.pack.fused._row_rules import Rows
from thrifty.pack.fused._samplewise import num_operations
from thrifty.pack.fused._tape import bind


pytestmark = pytest.mark.slow

BATCH, TIME, WIDTH = 4, 6, 8


def numbers(*shape, seed=0):
    return normal(*shape, seed=seed).double()


class Attention(nn.Module):
    def __init__(self, *, causal=False, mask=None, project=True):
        super().__init__()
        self.parts = nn.Linear(WIDTH, 3 * WIDTH if project else WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal, self.mask, self.project = causal, mask, project

    def forward(self, x):
        y = self.parts(x)
        parts = y.chunk(3, -1) if self.project else (y, y, y)
        heads = [p.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for p in parts]
        y = F.scaled_dot_product_attention(*heads, attn_mask=self.mask, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Perceptron(nn.Module):
    def __init__(self, act=F.gelu):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = act

    def forward(self, x):
        return x + self.outer(self.act(self.inner(self.norm(x))))


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


PLACES = numbers(TIME, WIDTH, seed=9)


def masked(x):
    return x * (torch.arange(x.numel()).view(x.shape) % 3 != 0) * 1.5


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "plain norm": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "norm over time": lambda: nn.LayerNorm((TIME, WIDTH)),
    "gelu": lambda: Perceptron(),
    "silu": lambda: Perceptron(F.silu),
    "relu": lambda: Perceptron(F.relu),
    "tanh": lambda: Perceptron(torch.tanh),
    "attention": lambda: Attention(),
    "causal": lambda: Attention(causal=True),
    "mask": lambda: Attention(mask=torch.ones(TIME, TIME, dtype=torch.bool).tril(2)),
    "not projected": lambda: Attention(project=False),
    "softmax": lambda: Function(lambda x: x.softmax(-1)),
    "softmax over time": lambda: Function(lambda x: x.softmax(1)),
    "log softmax": lambda: Function(lambda x: x.log_softmax(-1)),
    "dropout": lambda: Function(masked),
    "sum over time": lambda: Function(lambda x: x + x.cumsum(1)),
    "mean over time": lambda: Function(lambda x: x - x.mean(1, keepdim=True)),
    "mean of width": lambda: Function(lambda x: x - x.mean(-1, keepdim=True)),
    "sum of width": lambda: Function(lambda x: x / (1 + x.square().sum(-1, keepdim=True))),
    "shifted": lambda: Function(lambda x: x + x.roll(1, 1)),
    "places": lambda: Function(lambda x: x + PLACES),
    "transposed": lambda: Function(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "permuted": lambda: Function(lambda x: x.permute(2, 0, 1).cos().permute(1, 2, 0)),
    "flat": lambda: Function(lambda x: x.reshape(-1, WIDTH).sin().view(x.shape)),
    "product with itself": lambda: Function(lambda x: x + (x @ x.mT).cos() @ x),
    "in place": lambda: Function(lambda x: (x * 2).clamp_(min=-1).add_(x)),
    "some written": lambda: Function(lambda x: (x * 2).index_fill(1, torch.tensor([TIME - 1]), 0)),
    "gradient stopped": lambda: Function(lambda x: x.detach() + x.square()),
}
PICKS = {
    "last": lambda x: x[:, -1],
    "first": lambda x: x[:, 0],
    "third": lambda x: x[:, 2],
    "narrow": lambda x: x.narrow(1, 2, 1).flatten(1),
    "every third": lambda x: x[:, ::3].sum(1),
    "two": lambda x: x[:, 1:3].sum(1),
    "two rows": lambda x: x[:, 0] + x[:, 3],
    "most": lambda x: x[:, :-1].sum(1),
    "one sample": lambda x: x[1],
    "half of the width": lambda x: x[:, -1, : WIDTH // 2],
    "all": lambda x: x.mean(1),
    "one number": lambda x: x[:, -1, 0],
}


class Picking(nn.Module):
    def __init__(self, layers, pick):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers)).double()
        self.pick = PICKS[pick]

    def forward(self, x):
        return self.pick(self.layers(x))


def recorded(model, *, evaluates=False):
    """Record a training step, or metrics; return the program and its inputs."""
    x = numbers(BATCH, TIME, WIDTH)
    parameters = list(model.parameters())

    def compute():
        with torch.set_grad_enabled(not evaluates):
            x.requires_grad_(not evaluates)
            loss = model(x).square().sum()
            if evaluates:
                return [loss]
            return [loss.detach(), *torch.autograd.grad(loss, [x, *parameters], allow_unused=True)]

    inputs = [x, *parameters]
    return record(compute, inputs)[0], [each.detach() for each in inputs]


def results(program, inputs):
    tape = bind(program, inputs)
    with torch.no_grad():
        tape()
        first = [None if each is None else each.clone() for each in tape.outputs]
        tape()
    for one, again in zip(first, tape.outputs, strict=True):
        assert one is None or torch.equal(one, again), "a second run differs"
    return first


def assert_narrowed_is_whole(model, *, tolerance=1e-11, **options):
    """Assert that both programs give the same, and return the share of operations that is left."""
    program, inputs = recorded(model, **options)
    found = narrowed(program, device=here())
    for one, other in zip(results(found, inputs), results(program, inputs), strict=True):
        assert (one is None) == (other is None)
        scale = 1.0 if one is None or not one.numel() else max(1.0, float(other.abs().max()))
        assert one is None or float((one - other).abs().max()) <= tolerance * scale
    num = [sum(num_operations(call, p) for call in p.calls) for p in (found, program)]
    return num[0] / max(num[1], 1)


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_before_a_selection(layer, pick, monkeypatch):
    monkeypatch.setattr(_narrowing, "MIN_SAVED", -10.0)
    assert_narrowed_is_whole(Picking(["linear", layer, "linear"], pick))
    assert_narrowed_is_whole(Picking(["linear", layer, "gelu"], pick), evaluates=True)


@given(
    layers=st.lists(st.sampled_from(list(LAYERS)), max_size=6), pick=st.sampled_from(list(PICKS))
)
@settings(max_examples=80, deadline=None)
def test_networks_before_a_selection(layers, pick):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_narrowing, "MIN_SAVED", -10.0)
        # deep networks amplify rounding; what is wrong is wrong by far more
        assert_narrowed_is_whole(Picking(layers, pick), tolerance=1e-6)


@pytest.mark.parametrize(
    ("layers", "pick", "share"),
    [
        (["causal", "gelu"], "last", 0.45),
        (["attention", "silu"], "first", 0.45),
        (["causal", "relu", "linear", "dropout"], "last", 0.42),
        (["gelu", "gelu", "gelu"], "third", 0.2),
        (["permuted", "flat", "gelu"], "narrow", 0.2),
        (["gelu"], "one sample", 0.3),
    ],
)
def test_what_nothing_reads_is_not_computed(layers, pick, share):
    assert assert_narrowed_is_whole(Picking(layers, pick)) <= share
    assert assert_narrowed_is_whole(Picking(layers, pick), evaluates=True) <= share + 0.1


@pytest.mark.parametrize(
    ("layers", "pick"),
    [
        (["gelu", "gelu"], "all"),
        (["gelu", "gelu"], "most"),
        (["gelu", "gelu"], "two rows"),
        (["gelu", "softmax over time"], "last"),
        (["gelu", "sum over time"], "last"),
        (["gelu", "shifted"], "last"),
        (["gelu", "norm over time"], "last"),
        (["gelu", "not projected"], "last"),
    ],
)
def test_what_something_reads_is_computed(layers, pick):
    program, _ = recorded(Picking(layers, pick))
    found = narrowed(program, device=here())
    wide = [c for c in found.calls if num_operations(c, found) >= BATCH * TIME * 2 * WIDTH**2]
    assert sum("mm" in str(call.function) for call in wide) >= 6  # both layers, both ways


def test_causal_attention_is_whole_before_a_row_that_is_not_the_last():
    program, _ = recorded(Picking(["causal", "gelu"], "third"))
    found = narrowed(program, device=here())
    (call,) = [c for c in found.calls if "flash_attention_for_cpu.default" in str(c.function)]
    assert call.args[4] is True
    assert found.meta[call.outputs[0]][0][2] == TIME


def test_a_program_that_saves_little_stays_as_it_is():
    program, _ = recorded(Picking(["gelu"] * 12 + ["sum over time", "linear"], "last"))
    assert narrowed(program, device=here()) is program


def test_layouts_that_cannot_be_had_leave_the_program_whole(monkeypatch):
    program, _ = recorded(Picking(["gelu"], "last"))

    def fail(self, call):
        raise RuntimeError("view size is not compatible with input tensor's size and stride")

    monkeypatch.setattr(_narrowing._Writer, "_tried", fail)
    assert narrowed(program, device=here()) is program


def test_rows_that_are_not_computed_are_never_handed_out():
    program, _ = recorded(Picking(["gelu"], "last"))
    plan = _narrowing._Plan(program)
    writer = _narrowing._Writer(plan, here())
    number = next(iter(plan.stored.keys() - plan.zeros.keys()))
    writer._stored[number] = plan.stored[number]
    with pytest.raises(ValueError, match="lacks rows"):
        writer._get(number, None)


@pytest.mark.parametrize(
    ("rows", "old", "new", "wanted"),
    [
        (Rows(dim=1, start=5), (4, 6, 8), (24, 8), Rows(dim=0, start=5, step=6, num=4)),
        (Rows(dim=0, start=5, step=6, num=4), (24, 8), (4, 6, 8), Rows(dim=1, start=5)),
        (Rows(dim=0, start=5, step=6, num=4), (24, 8), (24, 2, 4), None),
        (Rows(dim=0, start=1), (4, 6, 8), (24, 8), Rows(dim=0, start=6, num=6)),
        (Rows(dim=0, start=6, num=6), (24, 8), (4, 6, 8), Rows(dim=0, start=1)),
        (Rows(dim=0, start=3, num=6), (24, 8), (4, 6, 8), None),
        (Rows(dim=1, start=1, num=2), (4, 6, 8), (24, 8), None),
        (Rows(dim=1, start=1, step=2, num=3), (4, 6, 8), (4, 6, 2, 4), None),
        (Rows(dim=2, start=4, num=4), (4, 6, 8), (4, 6, 2, 4), Rows(dim=2, start=1)),
        (Rows(dim=2, start=0, num=2), (4, 6, 8), (4, 48), None),
        (Rows(dim=1, start=0), (4, 1, 8), (4, 8), None),
    ],
)
def test_rows_in_another_shape(rows, old, new, wanted):
    found = _row_rules._reshaped(rows, old, new)
    if wanted is None and found is not None:
        wanted = found  # more than asked for, but right
    assert found == wanted
    if found is not None:
        whole = torch.arange(torch.Size(old).numel()).view(old)
        part, other = (
            each.movedim(r.dim, 0)[r.start : r.slice_args()[2] : r.step].sort().values.flatten()
            for each, r in ((whole, rows), (whole.view(new), found))
        )
        assert torch.equal(part.sort().values, other.sort().values)


# -- trials ----------------------------------------------------------------------------------


class Reader(Toy):
    """Reads the last of six tokens behind a block."""

    dtype = torch.float64
    layers = ("causal", "gelu")
    pick = "last"

    def inputs(self, num, seed):
        return normal(num, TIME, WIDTH, seed=seed)

    def targets(self, x):
        return x.sum((1, 2))[:, None]

    def network(self, hp):
        return nn.Sequential(Picking(self.layers, self.pick), nn.Linear(WIDTH, 1))


class Dropping(Reader):
    def network(self, hp):
        block = nn.Sequential(Perceptron(), nn.Dropout(0.3), Perceptron())
        return nn.Sequential(block, Function(PICKS["last"]), nn.Linear(WIDTH, 1))


class Hiding(Reader):
    """Rows that nothing reads are NaN, which plain PyTorch spreads to all weights."""

    def network(self, hp):
        def broken(x):
            return torch.cat([x[:, :-1] / x[:, :-1].detach().sub(x[:, :-1]), x[:, -1:]], 1)

        layers = [nn.Linear(WIDTH, WIDTH), Function(broken), Perceptron(), Function(PICKS["last"])]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


TRIALS = tuple(Trial(config={"lr": lr}) for lr in (0.001, 0.002, 0.003))


@pytest.mark.parametrize("task", [Reader, Dropping])
@pytest.mark.usefixtures("device")
def test_packed_trials_equal_trials_alone(task, monkeypatch):
    shares = []
    narrow = _narrowing._narrow

    def noted(program, device):
        shares.append(narrow(program, device))
        return shares[-1]

    monkeypatch.setattr(_narrowing, "_narrow", noted)
    found = together(FusedBackend(task(), device=here()), TRIALS)
    assert_same(found, alone(task(), TRIALS), tolerance=1e-10)
    assert any(shares)


class Rare(Reader):
    """One sample of many has a row of NaN, which nothing reads."""

    batch_size = 4

    def data(self, hp):
        x, valid = self.inputs(160, 1).double(), self.inputs(8, 2).double()
        y = self.targets(x)
        x[100, 0] = float("nan")
        return ArrayData(train=(x, y), valid=(valid, self.targets(valid)))

    def network(self, hp):
        layers = [nn.Linear(WIDTH, WIDTH), Perceptron(), Function(PICKS["last"])]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


class Padded(Rare):
    """One sample of many is padded on the left: its first query sees no key."""

    def data(self, hp):
        source = super().data(hp)
        x, y = source.train
        x[100] = 1.0
        x[100, :2] = 0
        return ArrayData(train=(x, y), valid=source.valid)

    def network(self, hp):
        return nn.Sequential(Masked(), Perceptron(), Function(PICKS["last"]), nn.Linear(WIDTH, 1))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.parts(x).chunk(3, -1)
        sees = torch.ones(TIME, TIME, dtype=torch.bool).tril() & (x[:, None, :, 0] != 0)
        return x + (q @ k.mT).masked_fill(~sees, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("task", [Rare, Padded])
@pytest.mark.parametrize("backend", [FusedBackend, AutoBackend])
def test_a_row_of_nan_spoils_a_trial_in_a_pack_as_it_does_alone(task, backend):
    found = together(backend(task(), device=here()), TRIALS)
    wanted = alone(task(), TRIALS)
    assert {type(one.error) for one in wanted} == {DivergedError}
    # a worker trains a trial that is not verified again, alone
    assert all(isinstance(one.error, UnverifiedError | DivergedError) for one in found)


def test_metrics_do_not_depend_on_rows_that_nothing_reads():
    model = Picking(["gelu", "gelu"], "last")
    program, (x, *rest) = recorded(model, evaluates=True)
    whole = results(narrowed(program, device=here()), [x, *rest])
    x = x.clone()
    x[:, 0] = float("nan")
    assert torch.equal(whole[0], results(narrowed(program, device=here()), [x, *rest])[0])


def test_half_precision_of_ten_bits_stays_whole():
    """Rows overflow easily there."""
    model = Picking(["gelu", "gelu"], "last").half()
    x = numbers(BATCH, TIME, WIDTH).half()
    program, _ = record(lambda: [model(x).sum()], [x, *model.parameters()])
    assert narrowed(program, device=here()) is program


@pytest.mark.usefixtures("device")
def test_gradients_that_unread_rows_spoil_are_found():
    with pytest.raises(UnfusableError, match="differs"):
        together(FusedBackend(Hiding(), device=here()), TRIALS)
    found = together(AutoBackend(Hiding(), device=here()), TRIALS)
    for one, other in zip(found, alone(Hiding(), TRIALS), strict=True):
        assert str(one.metrics) == str(other.metrics)
        assert type(one.error) is type(other.error)
