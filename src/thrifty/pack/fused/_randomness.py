"""Random numbers and masks of trials in a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core import plain_logger
from thrifty.pack._state import cuda_generator

from . import _mask_kernel
from ._mask_kernel import PHILOX, Mask, MaskKind, Place
from ._member import FusedTrial


logger = plain_logger(__name__)


def draw_masks(
    draws: Sequence[DropoutMask], trials: Sequence[FusedTrial], *, num_rows: Sequence[int] | None
) -> None:
    """Fill each trial's dropout masks.

    Trials at the same position of the same random stream get the same masks, drawn only once.

    Args:
        draws: The random numbers that the program needs.
        trials: The trials in the first rows.
        num_rows: Number of real rows of each trial's batch where these differ, else None.
    """
    first: dict[Any, int] = {}
    same = [
        first.setdefault((t.draw_key, num_rows and num_rows[k]), k) for k, t in enumerate(trials)
    ]
    drawing = [k for k in range(len(same)) if same[k] == k]
    for k in drawing:
        trials[k].seed_step()
    for draw in draws:
        fill(
            draw,
            rows=drawing,
            generators=[trials[k].generator for k in drawing],
            rates=[trials[k].rates for k in drawing],
            num_rows=None if num_rows is None else [num_rows[k] for k in drawing],
        )
        for k, source in enumerate(same):
            if source != k:
                draw.noise[k].copy_(draw.noise[source])


class TrialValue(float):
    """A number that may differ from trial to trial, such as a dropout rate.

    A rule that gets it uses each trial's own number. Code that computes with it gets this trial's
    number, which a recording would keep for all trials, so its path is added to ``built_in``.

    Attributes:
        path: Path of the layer that it belongs to.
        built_in: Paths of the numbers that code has computed with.
    """

    path: str
    built_in: set[str]

    def __new__(cls, value: float, path: str, built_in: set[str] | None = None) -> TrialValue:
        out = super().__new__(cls, value)
        out.path = path
        out.built_in = set() if built_in is None else built_in
        return out

    def __getnewargs__(self) -> tuple[float, str, set[str]]:  # type: ignore[override]  # for copies
        return (plain(self), self.path, self.built_in)

    def __hash__(self) -> int:
        return float.__hash__(self)


def plain(value: float) -> float:
    """Return the number as a plain float, without noting that code computes with it."""
    return float.__add__(value, 0.0) if isinstance(value, TrialValue) else value


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def call(self: TrialValue, *args: Any) -> Any:
        self.built_in.add(self.path)
        return method(self, *args)

    call.__name__ = name
    return call


for _name in (
    "abs", "add", "bool", "ceil", "divmod", "eq", "float", "floor", "floordiv", "ge", "gt", "int",
    "le", "lt", "mod", "mul", "ne", "neg", "pos", "pow", "radd", "rdivmod", "rfloordiv", "rmod",
    "rmul", "round", "rpow", "rsub", "rtruediv", "sub", "truediv", "trunc", "format",
):  # fmt: skip
    setattr(TrialValue, f"__{_name}__", _noting(f"__{_name}__"))


DrawnBy = Literal["bernoulli", "dropout", "attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutMask:
    """A dropout mask of one step.

    Attributes:
        noise: The mask, ``[K, batch, ...]``, which holds 0 or 1/(1-p).
        path: Path of the dropout layer if its rate may differ from trial to trial, else None.
        p: The dropout rate of trials without their own rate for ``path``.
        drawn_by: What draws the mask alone on a GPU: ``bernoulli_``, the kernel for dropout where
            each number of a new tensor is dropped by itself, or the memory-efficient kernel for
            attention. On the CPU it is always ``bernoulli_``.
    """

    noise: torch.Tensor
    path: str | None
    p: float
    drawn_by: DrawnBy = "bernoulli"


class Randomness:
    """The random inputs of a step, kept so that they can be drawn again for each step."""

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        *,
        rates: Sequence[Mapping[str, float]] | None = None,
    ) -> None:
        self.generators = generators
        self.draws: list[DropoutMask] = []
        self._rates = [{}] * len(generators) if rates is None else rates

    def rates_of(self, p: float) -> list[float]:
        """Return each trial's own value of a rate."""
        path = getattr(p, "path", None)
        p = plain(p)
        return [p if path is None else rates.get(path, p) for rates in self._rates]

    def dropout(
        self,
        shape: Sequence[int],
        p: float,
        *,
        like: torch.Tensor,
        order: Sequence[int],
        drawn_by: DrawnBy,
    ) -> torch.Tensor:
        """Draw the noise that dropout multiplies by, ``[K, *shape]``, for a tensor ``like`` one.

        ``order`` are the dimensions of ``shape`` in the memory order of one trial alone, outermost
        first, since a mask depends on it; ``drawn_by`` as for ``DropoutMask``.
        """
        size = len(self.generators)
        with _disable_current_modes():  # the draw must not be recorded
            stored = [shape[d] for d in order]
            noise = torch.empty((size, *stored), dtype=like.dtype, device=like.device)
            noise = noise.permute(0, *[1 + list(order).index(d) for d in range(len(order))])
            path = getattr(p, "path", None)
            draw = DropoutMask(noise=noise, path=path, p=plain(p), drawn_by=drawn_by)
            fill(draw, generators=self.generators, rates=self._rates)
        self.draws.append(draw)
        return noise


def fill(
    draw: DropoutMask,
    *,
    generators: Sequence[torch.Generator],
    rates: Sequence[Mapping[str, float]],
    rows: Sequence[int] | None = None,
    num_rows: Sequence[int] | None = None,
) -> None:
    """Draw a mask for each trial, exactly as ``torch.nn.functional.dropout`` draws it alone.

    Args:
        draw: The mask to fill.
        generators: The generator of each trial.
        rates: Each trial's own rates by path.
        rows: The row of each trial (default: the first rows).
        num_rows: Number of real rows of each trial's batch (default: all). The other rows keep
            their values, which must be finite: their results are multiplied by zero, and zero times
            NaN is NaN.
    """
    own = [draw.p if draw.path is None else each.get(draw.path, draw.p) for each in rates]
    rows = range(len(generators)) if rows is None else rows
    with torch.no_grad():
        if _fill_at_once(draw, own, rows=rows, generators=generators, num_rows=num_rows):
            return
        for number, (row, generator, p) in enumerate(zip(rows, generators, own, strict=True)):
            mask = draw.noise[row]
            if num_rows is not None:
                mask = mask[: num_rows[number]]
            _fill_one(mask, p, generator=generator, drawn_by=draw.drawn_by)


def _fill_one(
    mask: torch.Tensor, p: float, *, generator: torch.Generator, drawn_by: DrawnBy
) -> None:
    if p == 0.0:
        mask.fill_(1.0)
    elif p == 1.0:
        mask.fill_(0.0)
    else:
        _draw(mask, p, generator=generator, drawn_by=drawn_by)


def _fill_at_once(
    draw: DropoutMask,
    rates: Sequence[float],
    *,
    rows: Sequence[int],
    generators: Sequence[torch.Generator],
    num_rows: Sequence[int] | None,
) -> bool:
    """Fill the masks of all trials by one kernel, on a GPU; return whether that was possible."""
    noise, kind = draw.noise, draw.drawn_by
    if kind == "bernoulli" or not _mask_kernel.AVAILABLE:
        return False
    if num_rows is None:
        sizes = [noise[0].numel()] * len(rows)
    else:
        sizes = [num * noise[0, 0].numel() for num in num_rows]
    if not _mask_kernel.fits(noise, kind, numel=None if num_rows is None else sizes):
        return False
    if not all(_kernel_draws(noise, kind, numel=numel) for numel in set(sizes)):
        return False
    masks = [
        Mask(row=row, place=_place(generator), rate=rate, numel=numel)
        for row, generator, rate, numel in zip(rows, generators, rates, sizes, strict=True)
    ]
    _mask_kernel.write(noise, masks, kind)
    for generator, mask in zip(generators, masks, strict=True):
        there = _mask_kernel.after(mask.place, mask, kind, device=noise.device)
        if there != mask.place:
            generator.set_offset(there.offset)
    return True


_checked: dict[tuple[Any, ...], bool] = {}
"""Whether the kernel draws what calls draw, by kind of mask."""
_CHECKED_RATES = (0.1, 0.5, 0.9)


def _kernel_draws(noise: torch.Tensor, kind: MaskKind, *, numel: int) -> bool:
    """Return whether the kernel's masks are those of the calls, bit by bit.

    They are compared when a kind of mask is drawn for the first time.
    """
    own = noise[0] if numel == noise[0].numel() else noise[0][: numel // noise[0, 0].numel()]
    key = (noise.device, noise.dtype, kind, own.shape, own.stride())
    known = _checked.get(key)
    if known is None:
        known = _checked[key] = _compared(noise, own, kind)
        if not known:
            logger.warning(
                "the kernel for all trials' masks draws other masks than PyTorch %s by %s; "
                "each trial's masks are drawn by calls, which is slower",
                torch.__version__, kind,
            )  # fmt: skip
    return known


def _compared(noise: torch.Tensor, own: torch.Tensor, kind: MaskKind) -> bool:
    generator = torch.Generator(device=noise.device)
    many = torch.empty_strided(
        (len(_CHECKED_RATES), *noise.shape[1:]),
        noise.stride(),
        dtype=noise.dtype,
        device=noise.device,
    )
    masks, wanted, behind = [], [], []
    for row, rate in enumerate(_CHECKED_RATES):
        generator.manual_seed(2**62 + row)
        generator.set_offset(PHILOX * row)
        masks.append(Mask(row=row, place=_place(generator), rate=rate, numel=own.numel()))
        wanted.append(torch.empty_like(own))
        _draw(wanted[-1], rate, generator=generator, drawn_by=kind)
        behind.append(_place(generator))
    try:
        _mask_kernel.write(many, masks, kind)
    except _mask_kernel.FAILURES as error:
        logger.warning("the kernel for all trials' masks cannot be compiled: %s", error)
        return False
    found = [many[mask.row][: len(own)] for mask in masks]
    return all(map(torch.equal, found, wanted)) and behind == [
        _mask_kernel.after(mask.place, mask, kind, device=noise.device) for mask in masks
    ]


def _draw(mask: torch.Tensor, p: float, *, generator: torch.Generator, drawn_by: DrawnBy) -> None:
    if not mask.is_cuda or drawn_by == "bernoulli":
        mask.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
        return
    # On a GPU, torch draws these masks by kernels of its own, which take no generator.
    own = cuda_generator(mask.device)
    before = _place(own)
    _go_to(own, _place(generator))
    try:
        if drawn_by == "dropout":
            mask.copy_(torch.native_dropout(torch.ones_like(mask), p, train=True)[0])
        else:
            mask.copy_(_attention_mask(mask.shape, p, generator=own, device=mask.device))
        _go_to(generator, _place(own))
    finally:
        _go_to(own, before)


def _place(generator: torch.Generator) -> Place:
    """Return where a GPU's generator is in its stream.

    A step with dropout asks that for each layer and trial, and ``get_state`` makes a tensor.
    """
    return Place(generator.initial_seed(), generator.get_offset())


def _go_to(generator: torch.Generator, place: Place) -> None:
    generator.manual_seed(place.seed)
    generator.set_offset(place.offset)


def _attention_mask(
    shape: Sequence[int], p: float, *, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Return the mask that memory-efficient attention draws within its kernel, and move on.

    Args:
        shape: Batch, heads, queries and keys.
        p: The dropout rate.
        generator: The GPU's own generator.
        device: The GPU.
    """
    offset = generator.get_offset()
    uniform = torch.empty(shape, device=device)
    torch.ops.aten._fill_mem_eff_dropout_mask_(uniform, p, generator.initial_seed(), offset)
    generator.set_offset(offset + -(-uniform.numel() // PHILOX) * PHILOX)
    return (uniform > p).to(uniform.dtype) / (1.0 - p)
