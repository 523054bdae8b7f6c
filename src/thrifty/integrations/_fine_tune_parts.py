"""Parts of fine-tuning: adapters, layers that are trained whole, losses, rows of tokens, folders.

Losses say which labels count, in which precision, and what evaluation averages.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from thrifty.core import TaskError, require


if TYPE_CHECKING:
    import peft
import torch.nn.functional as F

from thrifty.pack import ArrayData
from thrifty.pack._quantized import quantized_layers


Kind = Literal["causal", "classification"]

ALL_LINEAR = "all-linear"
"""What peft calls all linear layers but the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Low-rank adapters: ``W x + (alpha / r) B A dropout(x)`` in the target layers.

    Each field is a value, or the name of a hyper-parameter: ``LoRA(r="rank")``.

    Attributes:
        r: Rank of the adapters.
        alpha: Numerator of their factor.
        targets: Names of the layers that get one, such as ``("q_proj", "v_proj")``, or
            ``"all-linear"`` for all; a head that is trained whole gets none. Any other text is
            the name of a hyper-parameter; a pattern is not taken.
        dropout: Probability with which an input of an adapter is dropped.
        layers: Numbers of the blocks that get adapters; None for all. Blocks below the first one
            are computed once for all trials of a pack.
        rslora: Whether the factor is ``alpha / sqrt(r)`` (``True`` or ``False``).
        all_targets: All layers that any trial of the study adapts. Given these, trials with other
            ``targets`` may train in one pack, if one of them has the layers of the others: a trial
            holds adapters of rank 0 where it has none, which add nothing. ``load_model`` and
            exports leave them out.
        all_layers: The same for ``layers``.

    >>> LoRA(r=8, alpha="alpha", targets=("q_proj", "v_proj")).values({"alpha": 32})["alpha"]
    32

    Raises:
        TaskError: ``r`` is neither a whole number of at least 1 nor a name; ``layers`` are no
            numbers of blocks.

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
        Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
    """

    r: int | str = 8
    alpha: float | str = 16
    targets: Sequence[str] | str = (ALL_LINEAR,)
    dropout: float | str = 0.0
    layers: Sequence[int] | str | None = None
    rslora: bool | str = False
    all_targets: Sequence[str] = ()
    all_layers: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Put ``"all-linear"``, which is no hyper-parameter, into a tuple."""
        for name in ("targets", "all_targets"):
            if getattr(self, name) == ALL_LINEAR:
                object.__setattr__(self, name, (ALL_LINEAR,))
        if not isinstance(self.r, str):
            _check_rank(self.r)
        if not isinstance(self.layers, str):
            _check_layers(self.layers)
        if self.all_layers:
            _check_layers(self.all_layers, name="all_layers")

    def values(self, hp: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, with hyper-parameters in place of their names.

        Raises:
            TaskError: There is no such hyper-parameter.
        """
        out = asdict(self)
        for name, value in out.items():
            if not isinstance(value, str):
                continue
            if value not in hp:
                mend = "add it to the space"
                if name == "targets":
                    mend += f', or give a tuple of names of layers, such as ("{value}",)'
                elif name == "rslora":
                    mend += ", or give True or False"
                else:
                    mend += ", or give a value"
                known = ", ".join(hp) or "none"
                raise TaskError(
                    f"LoRA: {name}={value!r} is taken for the name of a hyper-parameter, and there "
                    f"is none of this name (there are: {known}); {mend}"
                )
            out[name] = hp[value]
        return out

    @property
    def may_idle(self) -> bool:
        """Whether trials hold adapters of rank 0 where others have one."""
        return bool(self.all_targets or self.all_layers)

    def everywhere(self) -> LoRA:
        """Return adapters in all layers that any trial adapts.

        Raises:
            TaskError: ``all_targets`` or ``all_layers`` is missing.
        """
        for own, every in (("targets", "all_targets"), ("layers", "all_layers")):
            if isinstance(getattr(self, own), str) and not getattr(self, every):
                raise TaskError(
                    f"LoRA: {own} is the hyper-parameter {getattr(self, own)!r}, so give {every}, "
                    "too: what any trial of the study adapts"
                )
        return replace(
            self,
            r=1,
            alpha=1.0,
            dropout=0.0,
            targets=tuple(self.all_targets) or self.targets,
            layers=tuple(self.all_layers) or self.layers,
            all_targets=(),
            all_layers=(),
        )

    def config(self, hp: Mapping[str, Any], *, kind: Kind, **options: Any) -> peft.LoraConfig:
        """Return the adapters as peft's configuration.

        Args:
            hp: The hyper-parameters.
            kind: As ``FineTune(kind=)``.
            **options: Other options of the configuration.

        Raises:
            TaskError: A value is invalid.
        """
        found = self.values(hp)
        rank, targets, layers = found["r"], found["targets"], found["layers"]
        _check_rank(rank)
        _check_layers(layers)
        if not 0.0 <= found["dropout"] < 1.0:
            raise TaskError(f"LoRA: dropout must be in [0, 1), got {found['dropout']!r}")
        if not isinstance(found["rslora"], bool):
            raise TaskError(f"LoRA: rslora must be True or False, got {found['rslora']!r}")
        names = [targets] if isinstance(targets, str) else list(targets)
        if not names:
            raise TaskError('LoRA: targets is empty; name layers, such as ("q_proj", "v_proj")')
        if ALL_LINEAR in names and (len(names) > 1 or layers is not None):
            beside = f"layers={tuple(layers)}" if len(names) == 1 else "other targets"
            raise TaskError(
                f'LoRA: "all-linear" is for all layers of all blocks, and cannot stand beside '
                f'{beside}; name the layers, such as targets=("q_proj", "v_proj", "up_proj")'
            )
        made: peft.LoraConfig = peft_library().LoraConfig(
            r=rank,
            lora_alpha=found["alpha"],
            target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
            lora_dropout=float(found["dropout"]),
            layers_to_transform=None if layers is None else list(layers),
            use_rslora=found["rslora"],
            task_type="CAUSAL_LM" if kind == "causal" else "SEQ_CLS",
            **options,
        )
        return made


def _check_rank(rank: object) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TaskError(f"LoRA: r must be a whole number of at least 1, got {rank!r}")


def _check_layers(layers: object, *, name: str = "layers") -> None:
    if layers is None:
        return
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise TaskError(
            f"LoRA: {name} must be the numbers of some blocks, such as (4, 5), or None for all; "
            f"got {layers!r}"
        )
    for number in layers:
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise TaskError(f"LoRA: {name} must be numbers of blocks from 0, got {number!r}")


def check_blocks(layers: Sequence[int] | int | None, base: Any) -> None:
    """Check that a model has the blocks that get adapters, if its configuration says how many.

    Raises:
        TaskError: It has fewer.
    """
    num = getattr(getattr(base, "config", None), "num_hidden_layers", None)
    last = layers if isinstance(layers, int) else max(layers or [0])
    if isinstance(num, int) and last >= num > 0:
        raise TaskError(
            f"LoRA: layers names block {last}, and {type(base).__name__} has {num} blocks; "
            f"give numbers from 0 to {num - 1}"
        )


_NAME = "default"
"""The name that peft gives an adapter."""


def described(adapter: LoRA) -> LoRA | dict[str, Any]:
    """Return the fields of adapters, or those of the user's own class whole, with its code.

    Databases of before do not know the fields for idle ones.
    """
    if type(adapter) is not LoRA:
        return adapter
    fields = asdict(adapter)
    return {name: v for name, v in fields.items() if v or not name.startswith("all_")}


def adapted(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the paths and layers of a model that have an adapter."""
    for path, module in model.named_modules():
        if _NAME in getattr(module, "lora_A", ()):
            yield path, module


def without_idle(model: torch.nn.Module) -> torch.nn.Module:
    """Take the adapters of rank 0 out of a model, and return it."""
    for path, layer in list(adapted(model)):
        if not layer.lora_A[_NAME].weight.numel():
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.base_layer)
    return model


def skeleton_of(base: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model without values."""
    empty: dict[int, Any] = {}
    for layer in quantized_layers(base).values():
        layer.note_copies(empty, empty=True)
    for tensor in (*base.parameters(), *base.buffers()):
        if id(tensor) in empty:
            continue
        empty[id(tensor)] = made = tensor.to("meta")
        if isinstance(tensor, torch.nn.Parameter):
            empty[id(tensor)] = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return deepcopy(base, empty)


def add_idle(model: torch.nn.Module, everywhere: torch.nn.Module) -> None:
    """Add adapters of rank 0 to the layers of a model that have none, but have one ``everywhere``.

    Raises:
        TaskError: A layer has an adapter that is not ``everywhere``.
    """
    own, others = dict(adapted(model)), dict(adapted(everywhere))
    if unknown := own.keys() - others.keys():
        raise TaskError(
            f"LoRA: {sorted(unknown)[0]} gets an adapter, but all_targets and all_layers do not "
            "name it; add it to them"
        )
    if not own:
        return
    example = next(iter(own.values()))
    drops = isinstance(example.lora_dropout[_NAME], torch.nn.Dropout)
    for path, layer in others.items():
        if path in own:
            continue
        base = model.get_submodule(path)
        like = example.lora_A[_NAME].weight  # a base may be in a lower precision, or in 4 bits
        for factors, dim in ((layer.lora_A, 0), (layer.lora_B, 1)):
            shape = list(factors[_NAME].weight.shape)
            shape[dim] = 0
            factors[_NAME].weight = torch.nn.Parameter(like.new_empty(shape))
        if drops:  # of the same kind, though it drops nothing
            layer.lora_dropout[_NAME] = torch.nn.Dropout(0.0)
        parent, _, name = path.rpartition(".")
        layer.base_layer = base
        setattr(model.get_submodule(parent), name, layer)


def peft_library() -> Any:
    """Return peft, or say how to install it."""
    return require("peft", extra="huggingface")


# -- heads, and what else is new ------------------------------------------------------------------


_BY_PEFT = ("classifier", "score")
"""The ends of the names of heads that peft trains by itself in classification."""

_HEADS = ("classification_head", "logits_proj", "sequence_summary")
"""The other names of heads in transformers, as of BART, T5 and XLNet."""


def trained_whole(
    base: torch.nn.Module, *, classifies: bool, missing: Collection[str] = ()
) -> list[str]:
    """Return the modules that are new in a model, beside those that peft trains by itself.

    Frozen, they would stay random, and who loads the adapter onto the base would get other ones.

    Args:
        base: A model without adapters.
        classifies: Whether it has a head for classification.
        missing: Names of parameters that its folder lacks.
    """
    by_peft = _BY_PEFT if classifies else ()
    heads = {name for name, _ in base.named_children() if classifies and name in _HEADS}
    found, parameters = set(heads), {name for name, _ in base.named_parameters()}
    for name in sorted(parameters.intersection(missing)):
        path = name.rpartition(".")[0]
        if any(part in heads or part.endswith(by_peft) for part in _above(path)):
            continue
        if not path or next(base.get_submodule(path).children(), None) is not None:
            warnings.warn(
                "FineTune: give a folder that has all parameters of the base; this one stays "
                f"random and is not exported with the adapter, because the folder lacks it: {name}",
                stacklevel=2,
            )
            continue
        found.add(path)
    return sorted(found)


def not_adapted(base: torch.nn.Module, *, classifies: bool, whole: Collection[str]) -> list[str]:
    """Return the modules that peft would both adapt and train whole, which it refuses.

    It knows its own heads by their whole names, but trains modules whose names end like theirs.
    """
    ends = (*whole, *(_BY_PEFT if classifies else ()))
    return [
        path
        for path, module in base.named_modules()
        if path.endswith(ends) and path.rpartition(".")[2] not in ends and path not in whole
        if next(module.children(), None) is None
    ]


def _above(path: str) -> Iterator[str]:
    """Yield a path and those of the modules that hold it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


# -- losses -------------------------------------------------------------------------------

IGNORED = -100
"""The label of tokens that do not count, as everywhere in transformers."""

_OWN_LOSS = "subclass thrifty.FineTune and write loss and metrics"


def in_single(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of half precision in single precision, and others as they are.

    Half precision keeps three digits of a loss, and fp16 counts no more than 65,504 tokens.
    """
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def loss_of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the tokens that count."""
    wanted = labels[:, 1:].reshape(-1).long()
    return F.cross_entropy(
        in_single(logits)[:, :-1].reshape(-1, logits.shape[-1]), wanted, ignore_index=IGNORED
    )


def loss_of_sequences(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of one label for each sequence.

    Raises:
        TaskError: Labels are no numbers of classes, or there are fewer than two classes.
    """
    if labels.dim() != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        shape, dtype = tuple(labels.shape), str(labels.dtype).removeprefix("torch.")
        raise TaskError(
            'FineTune(kind="classification"): labels must be one whole number for each sequence, '
            f"the number of its class; got {dtype} of shape {shape}. For several labels or for "
            f"regression, {_OWN_LOSS}; otherwise give labels of shape (batch,) and dtype int64"
        )
    check_num_labels(logits.shape[-1])
    return F.cross_entropy(in_single(logits), labels)


def check_num_labels(num_labels: Any) -> None:
    """Refuse fewer than two classes, whose cross-entropy is always 0.

    Raises:
        TaskError: There are fewer.
    """
    if not isinstance(num_labels, int) or num_labels < 2:
        raise TaskError(
            'FineTune(kind="classification"): num_labels must be a whole number of at least 2, got '
            f"{num_labels!r}; for regression, {_OWN_LOSS}"
        )


def check_classes_of(data: Any, *, num_labels: int) -> None:
    """Check the labels of sequences, where all data are in memory.

    Raises:
        TaskError: A label is no class.
    """
    if isinstance(data, ArrayData):
        for part in (data.train, data.valid):
            check_classes(part[-1], num_labels=num_labels)


def check_classes(labels: torch.Tensor, *, num_labels: int) -> None:
    """Check that labels are classes, if their values can be read.

    Raises:
        TaskError: One is not.
    """
    if not can_be_read(labels) or labels.dtype != torch.int64 or labels.dim() != 1:
        return  # another check refuses what is no row of whole numbers
    wrong = (labels < 0) | (labels >= num_labels)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise TaskError(
            f'FineTune(kind="classification"): the label of row {row} is {int(labels[row])}, and '
            f"num_labels={num_labels} means 0 to {num_labels - 1}; leave such rows out, or give "
            "num_labels"
        )


def can_be_read(values: torch.Tensor) -> bool:
    """Return whether values may be read: not while a program is recorded."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return not modes and type(values) is torch.Tensor and not values.is_meta


def accuracy_of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of tokens that count whose logit is the largest."""
    found = in_single(logits)
    counts = (labels[:, 1:] != IGNORED).to(found.dtype)
    right = (found[:, :-1].argmax(-1) == labels[:, 1:]).to(found.dtype) * counts
    return right.sum() / counts.sum()


def accuracy_of_sequences(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of sequences whose label has the largest logit."""
    found = in_single(logits)
    return (found.argmax(-1) == labels).to(found.dtype).mean()


def is_even(data: Any, *, batch_size: int) -> bool:
    """Return whether means over rows and over tokens are surely equal for validation data.

    Args:
        data: The data of a task, or the function that makes them.
        batch_size: The number of rows of a validation batch.
    """
    if not isinstance(data, ArrayData):
        return False
    # all tokens of rows without labels count; one batch has no other to be weighed against
    return len(data.valid) == 1 or len(data.valid[0]) <= batch_size


# -- rows of tokens, and folders of models --------------------------------------------------------


def pack_tokens(
    sequences: Sequence[torch.Tensor | Sequence[int]],
    *,
    length: int,
    labels: Sequence[torch.Tensor | Sequence[int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put short sequences of tokens into as few rows as a simple rule needs.

    Each sequence goes into the first row that has room for it; long ones are placed first. Rows are
    in the order of their first sequence, and padding is on the right.

    Args:
        sequences: The tokens of each sequence.
        length: Length of a row.
        labels: The labels of each sequence, such as -100 for the tokens of a question (default: its
            tokens).

    Returns:
        Tokens, numbers of sequences and labels, each ``[rows, length]``, as
        ``FineTune(packed=True)`` reads them.

    Raises:
        TaskError: A sequence is empty or longer than a row, or its labels have another length.

    >>> ids, numbers, labels = pack_tokens([[5, 6, 7], [8, 9], [4, 3]], length=5)
    >>> ids.tolist()
    [[5, 6, 7, 8, 9], [4, 3, 0, 0, 0]]
    >>> numbers.tolist()
    [[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]]

    References:
        Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021.
    """
    tokens = [torch.as_tensor(each, dtype=torch.long) for each in sequences]
    wanted = tokens
    if labels is not None:
        wanted = [torch.as_tensor(each, dtype=torch.long) for each in labels]
    sizes = [len(each) for each in tokens]
    for number, size in enumerate(sizes):
        if not 0 < size <= length:
            raise TaskError(
                f"pack_tokens(length={length}): sequence {number} has {size} tokens; cut it, or "
                "leave it out"
            )
    if [len(each) for each in wanted] != sizes:
        raise TaskError("pack_tokens: labels must have the lengths of their sequences")
    rows: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        at = next((k for k, left in enumerate(room) if left >= sizes[number]), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(length)
        rows[at].append(number)
        room[at] -= sizes[number]
    rows = sorted(sorted(row) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    numbers, aims = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for k, row in enumerate(rows):
        start = 0
        for place, number in enumerate(row, start=1):
            part = slice(start, start + sizes[number])
            ids[k, part], aims[k, part] = tokens[number], wanted[number]
            numbers[k, part] = place
            start += sizes[number]
    return ids, numbers, aims


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digests of the files of a model by name."""
    files = (file for file in sorted(folder.iterdir()) if not file.name.startswith("."))
    return {file.name: _digest(file) for file in files if file.is_file()}


def _digest(file: Path) -> str:
    stat = file.stat()
    key = (str(file.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    found = _DIGESTS.get(key)
    if found is None:
        with file.open("rb") as read:
            found = hashlib.file_digest(read, "blake2b").hexdigest()
        if time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED_S:
            _DIGESTS[key] = found
    return found


_DIGESTS: dict[tuple[Any, ...], str] = {}
"""Digests of files by path, inode, size and times, so that each trial may ask for them.

Programs set the time of a file's last change as they like, but not that of its entry (ctime).
"""
_SETTLED_S = 2.0
"""A file that was written so recently may be written again without another time."""


def quantizer_of(folder: Path) -> str:
    """Return the library that has quantised the model in a folder; "" if none has."""
    config = json.loads((folder / "config.json").read_bytes())
    found = config.get("quantization_config")
    return str(found.get("quant_method", "")) if isinstance(found, dict) else ""
