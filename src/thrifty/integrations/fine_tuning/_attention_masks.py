"""Which tokens a transformers model sees: masks for ``FineTune``, and measurements that prove them.

thrifty gives attention masks of four dimensions, as the model would make them itself, because their
values need not be read: trials then train in a pack. Not every model takes them. Some cut no window
out of them any more, some need the plain mask for other layers, some fail. The structure of a model
does not say which, so a few tiny rows are computed in both ways when a model is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from thrifty.core import TaskError
from thrifty.pack._backend import out_of_memory
from thrifty.pack._quantized import quantized_layers, with_products
from thrifty.pack._state import borrowed_streams
from thrifty.pack.task._data import ArrayData
from thrifty.pack.task._data_contents import TokenFile

from ._token_losses import can_be_read


Form = Literal["left", "all", "plain"]
"""Tokens see those to the left of them, or all; or the model makes its masks from the plain one."""

HELD_AS = "_thrifty_masks"
"""Name of the attribute under which a model holds the masks that it takes."""

_WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size", "window_size")
"""What configurations call the width of windows."""
_SHORT = 12
_LONGEST = 600
"""Numbers of tokens of the rows of a measurement."""
_MAX_PRODUCTS = 1e10
"""Most multiplications of a row of a measurement; a larger model gets short ones."""
_SMALL = 20_000_000
"""Most parameters of a model that is measured with other weights."""
_TOLERANCE = 5e-5
_HALF_TOLERANCE = 0.05
"""Largest differences that rounding explains, as a share of the largest logit."""
_ULPS = 4
"""The same between results of rows of equal shapes, in steps of a float."""


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks that a model takes.

    Attributes:
        form: What its tokens see.
        longest: The longest row of which that is true; longer ones get the plain mask, or are
            refused if they are packed.
    """

    form: Form
    longest: float = math.inf


_measured: WeakKeyDictionary[type, dict[tuple[Any, ...], Masks]] = WeakKeyDictionary()
"""What has been measured in this process, by class and configuration of the model."""


def masks_of(base: torch.nn.Module, *, kind: str, is_packed: bool) -> Masks:
    """Measure which masks a model takes; once in a process for each class and configuration.

    Neither the model nor any stream of random numbers is changed.

    Args:
        base: The model, without adapters.
        kind: ``"causal"`` or ``"classification"``.
        is_packed: Whether rows have several sequences.

    Raises:
        TaskError: The model cannot be trained in this way.
    """
    config: Any = getattr(base, "config", None)
    if not hasattr(config, "get_text_config"):  # not of transformers
        return Masks("plain" if kind == "classification" else "left")
    precision = next((p.dtype for p in base.parameters()), None)
    text = config.to_json_string(use_diff=False)
    key = (text, config._attn_implementation, precision, kind, is_packed)
    known = _measured.setdefault(type(base), {})
    if key not in known:
        with borrowed_streams(), torch.no_grad():
            probe = _Probe(base)
            if kind == "classification":
                known[key] = probe.of_classifier()
            else:
                probe.check_causal()
                known[key] = probe.of_packed() if is_packed else Masks("left")
    return known[key]


def hold(model: torch.nn.Module, masks: Masks, *, kind: str, is_packed: bool) -> None:
    """Let a model hold the masks that it takes; copies of it hold them, too.

    It also stops to look for padding in tokens that come without a mask, which reads their values,
    so that trials could not be packed. Padding is checked when the data are.
    """
    setattr(model, HELD_AS, (kind, is_packed, masks))
    for module in model.modules():
        if hasattr(module, _LOOKS_FOR_PADDING):
            vars(module)[_LOOKS_FOR_PADDING] = _looks_for_nothing


def let_go(model: torch.nn.Module) -> None:
    """Take back what ``hold`` does."""
    vars(model).pop(HELD_AS, None)
    for module in model.modules():
        vars(module).pop(_LOOKS_FOR_PADDING, None)


_LOOKS_FOR_PADDING = "warn_if_padding_and_no_attention_mask"


def _looks_for_nothing(*args: Any, **options: Any) -> None:
    """Stand in for the method of transformers' models that warns of padding without a mask."""


def held(model: torch.nn.Module, *, kind: str, is_packed: bool) -> Masks:
    """Return the masks that a model takes.

    Raises:
        TaskError: The model cannot be trained in this way.
    """
    *use, found = getattr(model, HELD_AS, (None,))
    if use == [kind, is_packed]:
        assert isinstance(found, Masks)
        return found
    if any(p.is_meta for p in model.parameters()):
        # without values, nothing is measured: only memory is forecast
        return Masks("left" if says_causal(model) else "all")
    # the user's own code makes the model
    measured = masks_of(model, kind=kind, is_packed=is_packed)
    hold(model, measured, kind=kind, is_packed=is_packed)
    return measured


def mask_for(model: torch.nn.Module, mask: torch.Tensor, masks: Masks) -> torch.Tensor:
    """Return the mask of padded rows as a model takes it.

    Args:
        model: The model.
        mask: 0 at padding, ``[B, T]``.
        masks: The masks that it takes.
    """
    if masks.form == "plain" or mask.shape[1] > masks.longest:
        return mask
    return _attention(_seen_through(mask, is_causal=masks.form == "left"), model)


def packed_mask_for(
    model: torch.nn.Module, numbers: torch.Tensor, masks: Masks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of rows of several sequences, and each token's position in its own one.

    Args:
        model: The model.
        numbers: The sequence of each token, ``[B, T]``.
        masks: The masks that it takes.

    Raises:
        TaskError: The rows are too long for the model.
    """
    length = numbers.shape[1]
    if length > masks.longest:
        raise TaskError(
            f"FineTune(packed=True): rows have {length} tokens, but layers of the model attend to "
            f"windows, and get them only in rows of at most {masks.longest} tokens if the mask "
            f"keeps sequences apart; give pack_tokens(length={masks.longest}), or leave packed "
            "out and pad each sequence"
        )
    seen, positions = _seen_by(numbers)
    return _attention(seen, model), positions


def check_padding(mask: torch.Tensor, labels: torch.Tensor | None, *, ignored: int) -> None:
    """Check the padding of causal rows, if the values of a mask can be read.

    Args:
        mask: 0 at padding, ``[B, T]``.
        labels: The labels, ``[B, T]``; None if they are unknown.
        ignored: The label of tokens that do not count.

    Raises:
        TaskError: A row has padding before a token, or padding has a label that counts.
    """
    if not can_be_read(mask) or mask.dim() != 2:
        return  # the dry run has checked some rows before
    early = ((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any(1)
    counts = torch.zeros_like(early)
    if labels is not None and labels.shape == mask.shape:
        counts = ((mask == 0) & (labels != ignored))[:, 1:].any(1)  # no token predicts the first
    if not bool((early | counts).any()):
        return
    if bool(early.any()):
        row = int(early.nonzero()[0])
        raise TaskError(
            f'FineTune(kind="causal"): row {row} has padding before tokens (its mask is 0, and 1 '
            "later on), which these tokens would see; put padding on the right, as "
            'tokenizer.padding_side = "right" does'
        )
    row = int(counts.nonzero()[0])
    raise TaskError(
        f'FineTune(kind="causal"): row {row} has labels that count at its padding (where its '
        f"mask is 0); set them to {ignored}: labels[mask == 0] = {ignored}"
    )


def check_tokens(data: Any, *, ignored: int) -> None:
    """Check the rows of a causal model: padding and labels, where all data are in memory.

    Args:
        data: The data of a task.
        ignored: The label of tokens that do not count.

    Raises:
        TaskError: A row has padding before a token, or padding has a label that counts, or a mask
            is in the place of labels, or labels are shifted already.
    """
    if isinstance(data, TokenFile):
        raise TaskError(
            'FineTune(kind="causal"): the labels of a TokenFile are shifted by one token, and '
            "FineTune shifts them, too; give the tokens alone, such as "
            "th.ArrayData(train=(blocks,), valid=(blocks,))"
        )
    if not isinstance(data, ArrayData):
        return
    for part in (data.train, data.valid):
        if len(part) == 3:
            check_padding(part[1], part[2], ignored=ignored)
        if len(part) == 2:
            check_labels(*part)


def check_labels(ids: torch.Tensor, labels: torch.Tensor) -> None:
    """Check that labels of causal rows are no mask, if their values can be read.

    Raises:
        TaskError: They are 0 and 1 only, while tokens are not.
    """
    if can_be_read(labels) and _is_mask(labels) and not _is_mask(ids):
        raise TaskError(
            'FineTune(kind="causal"): the second tensor of the data is 0 and 1 only, as a mask is, '
            "and FineTune takes it for labels; give (ids, mask, labels)"
        )


def _is_mask(values: torch.Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


class _Probe:
    """Measures on tiny rows what a model sees.

    Args:
        base: The model. Its parameters are only read; all else of it is copied.
    """

    def __init__(self, base: torch.nn.Module) -> None:
        parameters = list(base.parameters())
        self._name = type(base).__name__
        config: Any = base.config
        inner = config.get_text_config()
        self._device = parameters[0].device if parameters else torch.device("cpu")
        found = [getattr(inner, name, None) for name in _WINDOWS]
        widths = [w for w in found if isinstance(w, int) and not isinstance(w, bool) and w > 0]
        self._window = min(widths, default=None)
        positions = getattr(inner, "max_position_embeddings", None)
        # some models begin to count at 2
        self._most = max(2, positions - 2) if isinstance(positions, int) else _LONGEST
        work = max(1, sum(p.numel() for p in parameters))
        self._affordable = max(_SHORT, min(_LONGEST, int(_MAX_PRODUCTS / work)))
        named = ("pad_token_id", "eos_token_id", "bos_token_id", "mask_token_id", "sep_token_id")
        special: set[Any] = set()
        for name in named:
            value = getattr(inner, name, None)
            special.update(value if isinstance(value, list) else [value])
        num_tokens = getattr(inner, "vocab_size", 2)
        self._usual = [k for k in range(1, min(num_tokens, 97)) if k not in special] or [0]
        padding, end = (getattr(inner, name, None) for name in ("pad_token_id", "eos_token_id"))
        self._padding = padding if isinstance(padding, int) and padding >= 0 else 0
        is_own = isinstance(end, int) and 0 <= end < num_tokens and end != self._padding
        self._end = end if is_own else None
        self._model = self._measurable(base)
        self._wanted: dict[int, torch.Tensor | None] = {}
        """Results with masks of transformers that show what a token sees, by length of the rows."""
        precisions = [p.dtype for p in self._model.parameters() if p.is_floating_point()]
        # a softmax is in single precision in many models, whatever the rest is in
        self._step = max(torch.finfo(dtype).eps for dtype in (torch.float32, *precisions))
        self._is_coarse = self._step > 1e-6

    def _measurable(self, base: torch.nn.Module) -> torch.nn.Module:
        """Return a copy of a model whose results depend on what it sees.

        Fresh weights may be so small that rounding hides what a token sees, and a new head may be
        zero. Small models get larger random weights, in single precision: in double precision, a
        softmax in single precision makes NaN of rows that see nothing. Large ones are mostly
        trained already, and keep their weights, in the same memory.
        """
        parameters = list(base.parameters())
        row = self._padded(self._tokens(self._short))[0][:1]
        if sum(p.numel() for p in parameters) <= _SMALL:
            model = _redrawn(base)
            found = _logits(model, input_ids=row)
            if found is not None and bool(found.isfinite().all()):
                return model
        # some models change with their first row, such as BigBird
        same: dict[int, Any] = {id(p): p for p in parameters}
        for layer in quantized_layers(base).values():
            layer.note_copies(same)
        model = deepcopy(base, same).eval()
        with_products(model, whole=False)
        return model

    def of_classifier(self) -> Masks:
        """Return the masks with which a classifier has the results that transformers gives it."""
        forms: tuple[Form, ...] = ("left", "all")
        for form in forms:
            agrees = partial(self._classifies_alike, masks=Masks(form))
            if longest := self._longest(agrees, looks_both_ways=form == "all"):
                return Masks(form, longest)
        return Masks("plain")

    def check_causal(self) -> None:
        """Check that tokens see no later ones.

        Raises:
            TaskError: They do.
        """
        ids = self._tokens(self._short)
        later = ids.clone()
        later[-1] = self._usual[0] if ids[-1] != self._usual[0] else self._usual[-1]
        found = [self._logits(input_ids=each[None], use_cache=False) for each in (ids, later)]
        if any(each is None for each in found):
            return  # training will say why
        one, other = (each[0, :-1] for each in found)  # type: ignore[index]
        before, last = slice(-1), slice(-1, None)
        if not self._is_same(one, other) and not (
            _alike(one, other, self._rounding) and self._is_blind(ids, before, to=last)
        ):
            raise TaskError(
                f'FineTune(kind="causal"): {self._name} sees later tokens, so it would see the '
                "ones that it has to predict; give a model that looks to the left only (for some, "
                'is_decoder=True in its configuration), or kind="classification"'
            )

    def of_packed(self) -> Masks:
        """Return the masks with which sequences of one row have the results of rows of their own.

        Raises:
            TaskError: There are none.
        """
        if longest := self._longest(self._packs_alike, looks_both_ways=False):
            return Masks("left", longest)
        raise TaskError(
            f"FineTune(packed=True): {self._name} has other results for a sequence in a row with "
            "another one than in a row of its own, because masks and position_ids do not keep "
            "sequences apart in all of its layers; leave packed out and pad each sequence"
        )

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return _alike(one, other, self._equal)

    def _is_blind(
        self, ids: torch.Tensor, results: slice, *, to: slice, **inputs: torch.Tensor
    ) -> bool:
        """Return whether no number that is computed from some tokens gets into results of others.

        Their gradients are exactly zero then, however results are rounded. Those of experts are
        rounded in another way if another token chooses another expert.
        """
        seen: list[torch.Tensor] = []

        def follow(_: torch.nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
            seen.append(out.detach().requires_grad_())
            return seen[-1]

        try:
            table: Any = self._model.get_input_embeddings()  # type: ignore[operator]
            with torch.enable_grad():
                handle = table.register_forward_hook(follow)
                try:
                    found = self._logits(input_ids=ids[None], use_cache=False, **inputs)
                finally:
                    handle.remove()
                if found is None or len(seen) != 1:
                    return False
                weights = torch.linspace(1, 2, found.shape[-1], device=found.device)
                total = (found[0, results].float() * weights).sum()
                (gradient,) = torch.autograd.grad(total, seen)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            return False
        return bool(gradient.any()) and not bool(gradient[0, to].any())

    @property
    def _equal(self) -> float:
        return _ULPS * self._step

    @property
    def _rounding(self) -> float:
        return _HALF_TOLERANCE if self._is_coarse else _TOLERANCE

    @property
    def _short(self) -> int:
        return min(_SHORT, self._most)

    def _longest(self, agrees: Callable[[int], bool], *, looks_both_ways: bool) -> float:
        """Return the longest row that agrees; 0 if none does.

        A window changes nothing in rows that are not longer than it, or than half of it if it lies
        around a token.
        """
        window = self._window
        if window is None:
            return math.inf if agrees(self._short) else 0
        if not agrees(min(self._short, max(3, window // 2))):
            return 0
        for longest in (math.inf, window, max(2, window // 2)):
            if longest == math.inf and self._is_coarse:
                continue  # rounding may hide what few tokens add
            length = min(self._most, window + 8 if longest == math.inf else int(longest))
            if length > self._affordable:
                if longest == math.inf or (looks_both_ways and longest == window):
                    continue
                return longest  # short rows agree, and no window is in the way of longer ones
            if agrees(length):
                return longest
        return 0

    def _classifies_alike(self, length: int, *, masks: Masks) -> bool:
        ids = self._tokens(length)
        rows, mask = self._padded(ids)
        if length not in self._wanted:
            wanted = self._logits(input_ids=rows, attention_mask=mask)
            if wanted is not None and not self._depends_on_others(rows, mask, wanted):
                wanted = None
            self._wanted[length] = wanted
        wanted = self._wanted[length]
        if wanted is None:
            return False
        found = self._logits(input_ids=rows, attention_mask=mask_for(self._model, mask, masks))
        return found is not None and _alike(found, wanted, self._equal)

    def _depends_on_others(
        self, rows: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor
    ) -> bool:
        """Return whether tokens inside of a row matter, without which masks would not, either."""
        other = rows.clone()
        if rows.shape[1] > 2:
            middle = rows.shape[1] // 2
            other[0, middle] = next((k for k in self._usual if k != rows[0, middle]), 0)
        changed = self._logits(input_ids=other, attention_mask=mask)
        return changed is not None and not _alike(changed[:1], wanted[:1], 2 * self._equal)

    def _packs_alike(self, length: int) -> bool:
        ids = self._tokens(length)
        first = max(1, min(3, length // 2))
        parts = [ids[:first], ids[first:]]
        numbers = torch.ones_like(ids)
        numbers[first:] = 2
        mask, positions = packed_mask_for(self._model, numbers[None], Masks("left"))
        apart = {"attention_mask": mask, "position_ids": positions}
        found = self._logits(input_ids=ids[None], use_cache=False, **apart)
        alone = [self._logits(input_ids=part[None], use_cache=False) for part in parts]
        if found is None or any(each is None for each in alone):
            return False
        wanted = torch.cat([each[0] for each in alone])  # type: ignore[index]
        if not _alike(found[0], wanted, self._rounding):
            return False
        # with rows of equal shapes, rounding hides less
        others = ids.clone()
        others[:first] = torch.where(ids[:first] == self._usual[0], self._usual[-1], self._usual[0])
        again = self._logits(input_ids=others[None], use_cache=False, **apart)
        if again is None:
            return False
        one, other = again[0, first:], found[0, first:]
        return self._is_same(one, other) or (
            _alike(one, other, self._rounding)
            and self._is_blind(ids, slice(first, None), to=slice(first), **apart)
        )

    def _tokens(self, length: int) -> torch.Tensor:
        order = torch.arange(length, device=self._device)
        places = (7 * order + order * order // 3) % len(self._usual)
        return torch.tensor(self._usual, device=self._device)[places]

    def _padded(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a whole row and a part of it, padded on the right and on the left, with a mask."""
        length, kept = len(ids), max(1, 2 * len(ids) // 3)
        rows = torch.full((3, length), self._padding, device=self._device)
        mask = torch.zeros_like(rows)
        for k, part in enumerate((slice(length), slice(kept), slice(length - kept, length))):
            rows[k, part], mask[k, part] = ids[: part.stop - (part.start or 0)], 1
            if self._end is not None:
                rows[k, part.stop - 1] = self._end  # encoder-decoders read a result there
        return rows, mask

    def _logits(self, **inputs: Any) -> torch.Tensor | None:
        return _logits(self._model, **inputs)


def _logits(model: torch.nn.Module, **inputs: Any) -> torch.Tensor | None:
    """Return the logits of rows; None if the model does not compute any."""
    try:
        found = model(**inputs).logits
    except Exception as error:
        if out_of_memory(error):
            raise
        return None  # models refuse masks by errors of all kinds
    return found if isinstance(found, torch.Tensor) else None


def _redrawn(base: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model with other weights, large enough that every token matters."""
    model = deepcopy(base).eval()
    with_products(model, whole=True)
    torch.nn.Module.float(model)  # models of transformers that are quantised refuse their own
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            drawn = torch.randn(parameter.shape, generator=generator)
            scale = 2 * math.sqrt(parameter.shape[0] / max(1, parameter.numel()))
            parameter.copy_(drawn * scale)
    return model


def _alike(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Return whether two results differ by rounding at most."""
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    largest = float(other.abs().max())
    return bool((one - other).abs().max() <= tolerance * largest)


def _seen_by(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens each token sees, and its position in its sequence.

    Args:
        numbers: The sequence of each token, ``[B, T]``.

    Returns:
        ``[B, T, T]`` with True where token i sees token j, and ``[B, T]``.
    """
    place = torch.arange(numbers.shape[1], device=numbers.device)
    same = numbers[:, :, None] == numbers[:, None, :]
    seen = same & (place[:, None] >= place[None, :])
    # a sequence lies in one piece, so its first token sees itself only
    return seen, seen.sum(-1) - 1


def _seen_through(mask: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Return which tokens each token sees, ``[B, T, T]``.

    Args:
        mask: 0 at padding, ``[B, T]``.
        is_causal: Whether tokens look to the left only.
    """
    length = mask.shape[1]
    seen = mask.bool()[:, None, :].expand(-1, length, -1)
    if not is_causal:
        return seen
    place = torch.arange(length, device=mask.device)
    # a token that sees nothing, as padding on the left does, would have no result at all
    return (seen & (place[:, None] >= place[None, :])) | (place[:, None] == place[None, :])


def _attention(seen: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """Return a mask as a model takes it.

    It has four dimensions, as the model would make it, so the model does not read its values.
    """
    config: Any = model.config
    if config._attn_implementation != "eager":
        return seen[:, None]
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    scores = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return scores[:, None]


def says_causal(model: torch.nn.Module) -> bool:
    """Return whether a model's attention layers say that tokens look to the left only."""
    return any(getattr(module, "is_causal", False) is True for module in model.modules())
