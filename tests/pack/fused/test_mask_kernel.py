"""The kernel for all trials' masks draws what PyTorch's calls draw.

On CUDA it runs as compiled, beside the calls. On a CPU it runs where Triton interprets it, in a
process of its own, beside a generator written in NumPy.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.devices import here
from thrifty.pack.fused import _mask_kernel, _randomness
from thrifty.pack.fused._mask_kernel import Mask, Place, after, fits, write
from thrifty.pack.fused._randomness import DropoutMask, fill


HAS_TRITON = importlib.util.find_spec("triton") is not None


# -- a slow twin -----------------------------------------------------------------------------


def philox(seed, counter, sequence):
    """Return four numbers; Philox 4x32-10 as published (Salmon et al., SC 2011)."""
    c = [counter & 0xFFFFFFFF, counter >> 32, sequence & 0xFFFFFFFF, sequence >> 32]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0], second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1], first & 0xFFFFFFFF,
        ]  # fmt: skip
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_twin_has_the_numbers_of_the_publication():
    """Known answers of Random123, the authors' library (tests/kat_vectors)."""
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**64 - 1
    assert philox(ones, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def twin(mask, law, threads):
    """Return a mask one number at a time."""
    out = np.empty(mask.numel, dtype=np.float32)
    keep = np.float32(1 - mask.rate)
    for group in range(-(-mask.numel // 4)):
        begin = mask.place.offset // 4
        if law == "attention":
            numbers = philox(mask.place.seed, begin + group, 0)
        else:
            numbers = philox(mask.place.seed, begin + group // threads, group % threads)
        for lane, number in enumerate(numbers):
            uniform = np.float32(number) * np.float32(2**-32) + np.float32(2**-33)
            kept = uniform > np.float32(mask.rate) if law == "attention" else uniform < keep
            if 4 * group + lane < mask.numel:
                out[4 * group + lane] = np.float32(1) / keep if kept else 0.0
    return out


# -- interpreted, on a CPU; compiled, on CUDA ------------------------------------------------


@pytest.fixture(autouse=True)
def _runs(request):
    if "device" not in request.fixturenames:
        return
    if not HAS_TRITON or not (here().type == "cuda" or _mask_kernel.INTERPRETED):
        pytest.skip("on a CPU the kernel runs only with TRITON_INTERPRET=1; another test does that")


@pytest.mark.parametrize("law", ["dropout", "attention"])
def test_masks_are_those_of_the_twin(device, law):
    """Also where threads come to several rounds, for large seeds, and in rows of any order."""
    noise = torch.full((4, 2, 2200), -1.0, device=device)
    masks = [
        Mask(row=2, place=Place(2**63 + 5, 8), rate=0.3, numel=4400),
        Mask(row=0, place=Place(17, 2**34), rate=0.75, numel=2200),
        Mask(row=3, place=Place(17, 0), rate=0.0, numel=2200),
    ]
    write(noise, masks, law)
    for mask in masks[:2]:
        threads = _mask_kernel._threads_of(device)(mask.numel)
        found = noise[mask.row].cpu().flatten()[: mask.numel].numpy()
        np.testing.assert_array_equal(found, twin(mask, law, threads))
    assert noise[0, 1].eq(-1).all(), "the rows that a trial's batch lacks keep their values"
    assert noise[3, 0].eq(1).all(), "nothing is dropped"
    assert noise[1].eq(-1).all(), "another trial's row"


def test_a_rate_of_one_drops_everything_and_draws_nothing(device):
    noise = torch.ones(1, 64, device=device)
    mask = Mask(row=0, place=Place(1, 4), rate=1.0, numel=64)
    for law in ("dropout", "attention"):
        write(noise.fill_(1.0), [mask], law)
        assert noise.eq(0).all()
        assert after(mask.place, mask, law, device=device) == mask.place


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(_mask_kernel.INTERPRETED, reason="this is the process with the interpreter")
def test_the_kernel_as_interpreted():
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cpu",
            "-n", "0", "-o", "filterwarnings=default", __file__,
        ],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout


# -- beside PyTorch's calls, on CUDA ---------------------------------------------------------


def by_calls(monkeypatch, draw, **options):
    with monkeypatch.context() as patch:
        patch.setattr(_mask_kernel, "AVAILABLE", False)
        fill(draw, **options)


KINDS = [
    ("dropout", (16, 32, 128), None, torch.float32),
    ("dropout", (3, 4), None, torch.float32),
    ("dropout", (64, 64, 700), None, torch.float32),
    ("dropout", (8, 16, 12), None, torch.bfloat16),
    ("dropout", (8, 6, 10, 2), (0, 2, 3, 1), torch.float32),
    ("dropout", (7, 3), None, torch.float32),
    ("dropout", (8, 12), None, torch.float64),
    ("attention", (4, 4, 32, 32), None, torch.float32),
]


@pytest.mark.parametrize(("law", "shape", "order", "dtype"), KINDS)
@pytest.mark.parametrize("ragged", [False, True])
def test_masks_have_the_bits_of_the_calls(device, monkeypatch, law, shape, order, dtype, ragged):
    if device.type != "cuda":
        pytest.skip("PyTorch draws these masks by other means on a CPU")
    caplog_warnings = []
    monkeypatch.setattr(_randomness.logger, "warning", lambda *a: caplog_warnings.append(a))
    rates = [{}, {"d": 0.5}, {"d": 0.0}, {"d": 0.9}]
    num_rows = [shape[0], shape[0] - 1, shape[0], shape[0] - 2] if ragged else None
    found = []
    for run in (lambda *a, **k: by_calls(monkeypatch, *a, **k), fill):
        order_of = range(len(shape)) if order is None else order
        stored = torch.zeros(5, *[shape[d] for d in order_of], dtype=dtype, device=device)
        noise = stored.permute(0, *[1 + list(order_of).index(d) for d in range(len(shape))])
        draw = DropoutMask(noise=noise, path="d", p=0.25, drawn_by=law)
        generators = [torch.Generator(device).manual_seed(2**40 + k) for k in range(4)]
        for _ in range(3):  # the second mask begins where the first one ends
            run(draw, rows=[4, 0, 1, 2], generators=generators, rates=rates, num_rows=num_rows)
        found.append((noise.clone(), [(g.initial_seed(), g.get_offset()) for g in generators]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert not caplog_warnings, "the kernel and the calls agree"


def test_a_kernel_that_draws_something_else_is_not_used(device, monkeypatch):
    if device.type != "cuda":
        pytest.skip("PyTorch draws these masks by other means on a CPU")
    warnings = []
    monkeypatch.setattr(_randomness, "_checked", {})
    monkeypatch.setattr(_randomness.logger, "warning", lambda *a: warnings.append(a))
    monkeypatch.setattr(_mask_kernel, "_threads_of", lambda _: lambda _: 64)
    noise = torch.zeros(2, 16, 64, device=device)
    draw = DropoutMask(noise=noise, path=None, p=0.5, drawn_by="dropout")
    generators = [torch.Generator(device).manual_seed(k) for k in range(2)]
    fill(draw, generators=generators, rates=[{}, {}])
    for k in range(2):
        torch.manual_seed(k)
        alone = torch.native_dropout(torch.ones_like(noise[k]), 0.5, train=True)[0]
        assert torch.equal(noise[k], alone)
    assert len(warnings) == 1


# -- the way to the kernel, on a CPU ---------------------------------------------------------


class Stream:
    """A GPU's generator: a seed and an offset."""

    def __init__(self, device=None, seed=0):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def set_offset(self, offset):
        self.offset = offset


class Launcher:
    """A kernel that computes what ``twin`` computes, from the table that it is given."""

    def __init__(self, error=None, wrong=False):
        self.error, self.wrong, self.launched = error, wrong, 0

    def __getitem__(self, grid):
        return self

    def __call__(self, out, table, factors, stride, *, ATTENTION, BLOCK):
        if self.error is not None:
            raise self.error
        self.launched += 1
        memory = torch.as_strided(out, (out.untyped_storage().nbytes() // 4,), (1,))
        for (seed, counter, row, num, threads, _), floats in zip(
            table.tolist(), factors.view(-1, 12).tolist(), strict=True
        ):
            values = []
            for group in range(num):
                place = counter + (group if ATTENTION else group // threads)
                for number in philox(seed % 2**64, place, 0 if ATTENTION else group % threads):
                    uniform = np.float32(number) * np.float32(2**-32) + np.float32(2**-33)
                    kept = uniform > floats[10] if ATTENTION else uniform < floats[10]
                    values.append(floats[11] if kept != self.wrong else 0.0)
            memory[row * stride : row * stride + 4 * num] = torch.tensor(values)


def call(mask, p, *, generator, drawn_by):
    """Draw one mask as PyTorch draws it on a GPU."""
    place = Place(generator.initial_seed(), generator.get_offset())
    own = Mask(row=0, place=place, rate=p, numel=mask.numel())
    threads = _mask_kernel._threads_of(mask.device)(mask.numel())
    drawn = torch.from_numpy(twin(own, drawn_by, threads))
    torch.as_strided(mask, (mask.numel(),), (1,)).copy_(drawn)
    generator.set_offset(after(place, own, drawn_by, device=mask.device).offset)


@pytest.fixture
def launcher(monkeypatch):
    found = Launcher()
    monkeypatch.setattr(_mask_kernel, "AVAILABLE", True)
    monkeypatch.setattr(_mask_kernel, "INTERPRETED", True)
    monkeypatch.setattr(_mask_kernel, "_masks", found)
    monkeypatch.setattr(_randomness, "_draw", call)
    monkeypatch.setattr(_randomness, "_checked", {})
    monkeypatch.setattr(torch, "Generator", Stream)
    return found


def drawn(law, *, shape=(4, 6, 8), num_rows=None, times=2, order=(0, 1, 2)):
    """Return masks of three trials, one of which drops nothing, and where their streams end."""
    stored = torch.full((4, *[shape[d] for d in order]), 7.0)
    noise = stored.permute(0, *[1 + order.index(d) for d in range(len(shape))])
    draw = DropoutMask(noise=noise, path="d", p=0.25, drawn_by=law)
    streams = [Stream(seed=2**63 + 5), Stream(seed=3), Stream(seed=4)]
    options = {"rates": [{}, {"d": 0.0}, {"d": 0.5}], "num_rows": num_rows, "rows": [3, 0, 1]}
    for _ in range(times):
        fill(draw, generators=streams, **options)
    return noise, [(stream.seed, stream.offset) for stream in streams]


@pytest.mark.parametrize("law", ["dropout", "attention"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_rows": [4, 3, 2]},
        {"shape": (30, 8, 20)},
        {"order": (1, 2, 0)},
        {"shape": (1, 1, 3)},
    ],
    ids=str,
)
def test_one_launch_draws_what_calls_draw(launcher, monkeypatch, law, options):
    found, places = drawn(law, **options)
    with monkeypatch.context() as patch:
        patch.setattr(_mask_kernel, "AVAILABLE", False)
        wanted, behind = drawn(law, **options)
    assert torch.equal(found, wanted)
    assert places == behind
    by_calls = "order" in options and law == "attention"
    assert launcher.launched == (
        0
        if by_calls or options.get("shape") == (1, 1, 3)
        else 2 + (3 if options.get("num_rows") else 1)
    )


@pytest.mark.parametrize(
    ("defect", "message"),
    [({"wrong": True}, "other masks"), ({"error": OSError("no C compiler")}, "cannot be compiled")],
)
def test_a_kernel_that_is_wrong_or_missing_is_not_used(
    launcher, monkeypatch, caplog, defect, message
):
    vars(launcher).update(defect)
    found, places = drawn("dropout")
    drawn("dropout")
    assert sum(message in record.message for record in caplog.records) == 1
    with monkeypatch.context() as patch:
        patch.setattr(_mask_kernel, "AVAILABLE", False)
        wanted, behind = drawn("dropout")
    assert torch.equal(found, wanted)
    assert places == behind


# -- what it is not made for -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "law"),
    [
        (torch.zeros(2, 8), "dropout"),  # on a CPU
        (torch.zeros(2, 8, dtype=torch.float64), "dropout"),
        (torch.zeros(2, 7), "dropout"),
        (torch.zeros(2, 8, dtype=torch.float16), "attention"),
        (torch.zeros(2, 16)[:, ::2], "dropout"),
        (torch.zeros(2, 4, 0), "dropout"),
    ],
)
def test_other_masks_are_drawn_by_calls(monkeypatch, noise, law):
    if noise.dtype != torch.float32 or noise.numel() != 16:
        monkeypatch.setattr(_mask_kernel, "AVAILABLE", True)
        monkeypatch.setattr(_mask_kernel, "INTERPRETED", True)
    assert not fits(noise, law)


def test_the_order_of_the_dimensions_in_memory_does_not_matter(monkeypatch):
    monkeypatch.setattr(_mask_kernel, "AVAILABLE", True)
    monkeypatch.setattr(_mask_kernel, "INTERPRETED", True)
    noise = torch.zeros(2, 3, 8).transpose(1, 2)
    assert fits(noise, "dropout")
    assert not fits(noise, "attention")
    assert not fits(noise, "dropout", numel=[12, 24]), "a part of it is not at the beginning"
    assert fits(noise.transpose(1, 2), "dropout", numel=[16, 24])
    assert not fits(noise.transpose(1, 2), "dropout", numel=[15, 24])


@pytest.mark.parametrize(
    ("law", "numel", "offset"), [("dropout", 4, 4), ("dropout", 4097, 8), ("attention", 10, 12)]
)
def test_a_stream_goes_on_behind_a_mask(law, numel, offset):
    mask = Mask(row=0, place=Place(1, 0), rate=0.5, numel=numel)
    assert after(mask.place, mask, law, device=torch.device("cpu")) == Place(1, offset)
