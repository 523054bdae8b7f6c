"""Fine-tuning of transformers models: one frozen base, and an adapter for each trial."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from thrifty.core import TaskError, require
from thrifty.pack import HyperParameters, Task
from thrifty.pack.task._data import Batch

from ._attention_masks import (
    check_padding,
    check_paddings,
    held,
    hold,
    let_go,
    mask_for,
    masks_of,
    packed_mask_for,
)


if TYPE_CHECKING:
    import peft
    import transformers


IGNORED = -100
"""The label of tokens that do not count, as everywhere in transformers."""


class FineTune(Task):
    """Fine-tunes a transformers model with adapters over a frozen base.

    All trials of a study have the same base. thrifty keeps it once in a worker, leaves it out of
    checkpoints, and in a pack computes what lies below the first adapter once for all trials. Each
    trial's adapter is what ``peft`` trains; ``study.best_trial.load_model()`` returns it as a
    ``PeftModel``, and ``thrifty export NAME --adapter DIR`` writes it for ``peft`` and vLLM.

    Args:
        model: The base: a folder with a model, a transformers configuration (random weights), or a
            function of the hyper-parameters that returns a model.
        adapter: The adapters. Their fields may name hyper-parameters.
        data: ``ArrayData`` or another kind of data, or a function of the hyper-parameters that
            returns it. Batches are ``(ids, labels)``, or ``(ids, mask, labels)`` where the mask is
            0 at padding. ``kind="causal"`` also takes ``(ids,)``.
        optimizer: As ``Task.optimizer``, such as ``th.AdamW(lr="lr")``.
        kind: ``"causal"``: predict the next token; ids and labels have the same shape, padding is
            on the right, and labels of -100 do not count. ``"classification"``: one label for each
            sequence. A causal model such as Llama judges a sequence by its last token that is not
            ``pad_token_id``, so its configuration has to name one.
        packed: Whether a row has several sequences, one after the other (``kind="causal"`` only).
            Batches then are ``(ids, numbers, labels)``: ``numbers`` says to which sequence of the
            row a token belongs (1, 2, ...; 0 at padding). ``pack_tokens`` makes them. A sequence
            gets the results that it gets in a row of its own: tokens see no other sequence, and
            positions begin again with each. The loss is the mean over all tokens of the batch.
            Models that do not keep sequences apart are refused, and rows longer than a window.
        batch_size: As ``Task.batch_size``.
        eval_batch_size: As ``Task.eval_batch_size``.
        num_labels: Number of classes, for ``kind="classification"``.
        base_seed: Seed of the base's random weights, where it is a configuration, and of a new
            classification head. All trials have the same ones.
        steps_per_epoch: As ``Task.steps_per_epoch``.
        version: As ``Task.version``.

    Raises:
        TaskError: An argument is invalid.
        MissingExtraError: transformers or peft is not installed.

    >>> from transformers import LlamaConfig
    >>> small = LlamaConfig(
    ...     vocab_size=40,
    ...     hidden_size=16,
    ...     intermediate_size=32,
    ...     num_hidden_layers=2,
    ...     num_attention_heads=2,
    ...     num_key_value_heads=2,
    ... )
    >>> task = FineTune(
    ...     small,
    ...     adapter=LoRA(r="rank", alpha=8, targets=("q_proj", "v_proj")),
    ...     data=lambda hp: ...,
    ...     optimizer=None,
    ... )
    >>> model = task.model(HyperParameters({"rank": 4}))
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
    512
    """

    _metrics_of_outputs = True
    """``metrics`` below depends on the model's outputs alone, so padded trials may share it."""

    def __init__(  # noqa: PLR0913 (one argument for each part of a task)
        self,
        model: str | Path | transformers.PretrainedConfig | Callable[[HyperParameters], Any],
        *,
        adapter: LoRA,
        data: Any,
        optimizer: Any,
        kind: Kind = "causal",
        packed: bool = False,
        batch_size: int | str = 8,
        eval_batch_size: int = 64,
        num_labels: int = 2,
        base_seed: int = 0,
        steps_per_epoch: int | None = None,
        version: str = "",
    ) -> None:
        peft_library(), _transformers()
        if kind not in ("causal", "classification"):
            raise TaskError(f'FineTune: kind must be "causal" or "classification", got {kind!r}')
        if not isinstance(adapter, LoRA):
            what = type(adapter).__name__
            raise TaskError(f"FineTune: adapter must be a thrifty.LoRA(...), got {what}")
        if isinstance(model, str | Path) and not (Path(model) / "config.json").is_file():
            raise TaskError(
                f"FineTune: there is no model in {str(model)!r} (no config.json); give a folder "
                "that save_pretrained has written, a configuration, or a function that returns a "
                "model"
            )
        if packed and kind != "causal":
            raise TaskError(
                f"FineTune(packed=True, kind={kind!r}): only tokens that predict the next one can "
                'share a row; leave packed out, or give kind="causal"'
            )
        self._base, self._adapter, self._data, self.kind = model, adapter, data, kind
        self._is_packed = packed
        self.optimizer = optimizer
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_labels, self.base_seed = num_labels, base_seed
        self.steps_per_epoch = steps_per_epoch
        self.version = version

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return the base (its files by content), the adapters, the data and the options."""
        base: Any = self._base
        if isinstance(base, str | Path):
            base = _digests(Path(base))
        elif isinstance(base, _transformers().PretrainedConfig):
            base = base.to_dict()
        return {
            "base": base,
            "adapter": described(self._adapter),
            "data": self._data,
            "optimizer": self.optimizer,
            "kind": self.kind,
            "batch_size": self.batch_size,
            "num_labels": self.num_labels,
            "base_seed": self.base_seed,
            "steps_per_epoch": self.steps_per_epoch,
            # databases of before know no packed sequences, and have to find their trials again
            **({"packed": True} if self._is_packed else {}),
        }

    def data(self, hp: HyperParameters) -> Any:
        """Return the data.

        Raises:
            TaskError: Tokens have padding before them, but look to the left.
        """
        data = self._data(hp) if callable(self._data) else self._data
        if self.kind == "causal" and not self._is_packed:
            check_paddings(data)
        return data

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        """Return the frozen base with new adapters.

        Raises:
            TaskError: The adapters do not fit the base, or it cannot be trained in this way.
        """
        base = self._base_model(hp)
        self._check_positions(base)
        masks = masks_of(base, kind=self.kind, is_packed=self._is_packed)
        model = self._with_adapters(base, hp)
        hold(model, masks, kind=self.kind, is_packed=self._is_packed)
        return model

    def meta_model(self, hp: HyperParameters) -> torch.nn.Module | None:
        """Return the model without values; None if a function makes the base."""
        if not _is_described(self._base):
            return None
        with torch.device("meta"):
            return self._with_adapters(self._base_model(hp, is_meta=True), hp)

    def _check_positions(self, base: Any) -> None:
        if self._is_packed and "position_ids" not in inspect.signature(base.forward).parameters:
            raise TaskError(
                f"FineTune(packed=True): {type(base).__name__} takes no position_ids, so positions "
                "cannot begin again within a row; leave packed out and pad each sequence"
            )

    def _with_adapters(self, base: Any, hp: HyperParameters) -> torch.nn.Module:
        config = self._adapter.config(hp, kind=self.kind)
        try:
            with warnings.catch_warnings():
                # peft asks transformers for an attribute by the name that it had before
                old_name = "`is_gradient_checkpointing` is deprecated"
                warnings.filterwarnings("ignore", message=old_name, category=FutureWarning)
                # and says that it does the right thing for the layers of GPT-2
                warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
                skeleton = skeleton_of(base) if self._adapter.may_idle else None
                model: torch.nn.Module = peft_library().get_peft_model(base, config)
                if skeleton is not None:
                    every = self._adapter.everywhere().config(hp, kind=self.kind)
                    add_idle(model, peft_library().get_peft_model(skeleton, every))
        except ValueError as error:
            raise TaskError(f"FineTune: the adapters do not fit the model: {error}") from error
        return model

    def __thrifty_finished__(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a trained model without adapters of rank 0."""
        let_go(model)
        return without_idle(model)

    def _base_model(self, hp: HyperParameters, *, is_meta: bool = False) -> Any:
        if not _is_described(self._base):
            make: Any = self._base
            return make(hp)
        name = "CausalLM" if self.kind == "causal" else "SequenceClassification"
        auto = getattr(_transformers(), f"AutoModelFor{name}")
        options = {} if self.kind == "causal" else {"num_labels": self.num_labels}
        # the base does not depend on the seed of a trial
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.base_seed)
            if isinstance(self._base, str | Path) and is_meta:
                config = _transformers().AutoConfig.from_pretrained(
                    self._base, local_files_only=True, **options
                )
                return auto.from_config(config)
            if isinstance(self._base, str | Path):
                loaded = auto.from_pretrained(self._base, local_files_only=True, **options)
                for parameter in loaded.parameters():
                    # mapped memory cannot be shared by trials
                    parameter.data = parameter.detach().clone()
                return loaded
            config = deepcopy(self._base)
            for name, value in options.items():
                setattr(config, name, value)
            return auto.from_config(config)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy, over tokens or over sequences."""
        ids, mask, labels = self._parts(batch)
        return self._loss(self._logits(model, ids, mask), labels)

    def loss_weight(self, batch: Batch) -> float:
        """Return the number of tokens (or sequences) of a part of a batch that count."""
        _, _, labels = self._parts(batch)
        if self.kind == "classification":
            return float(len(labels))
        return float((labels[:, 1:] != IGNORED).sum())

    def metrics(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return ``loss``, and ``accuracy`` of tokens or sequences."""
        ids, mask, labels = self._parts(batch)
        logits = self._logits(model, ids, mask)
        if self.kind == "causal":
            counts = (labels[:, 1:] != IGNORED).to(logits.dtype)
            right = (logits[:, :-1].argmax(-1) == labels[:, 1:]).to(logits.dtype) * counts
            accuracy = right.sum() / counts.sum()
        else:
            accuracy = (logits.argmax(-1) == labels).to(logits.dtype).mean()
        return {"loss": self._loss(logits, labels), "accuracy": accuracy}

    def _parts(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return tokens, mask (or numbers of sequences) and labels of a batch."""
        parts = tuple(batch)
        if self._is_packed:
            if len(parts) != 3:
                raise TaskError(
                    f"FineTune(packed=True): a batch has {len(parts)} parts; give (ids, numbers, "
                    "labels), as pack_tokens returns them"
                )
            ids, numbers, labels = parts
            # a first token is predicted by no token of its own sequence
            inner = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] != 0)
            first = torch.zeros_like(inner[:, :1])
            return ids, numbers, labels.masked_fill(~torch.cat([first, inner], 1), IGNORED)
        if len(parts) == 1:
            return parts[0], None, parts[0]
        if len(parts) == 2:
            return parts[0], None, parts[1]
        if len(parts) == 3:
            return parts
        raise TaskError(
            f"FineTune: a batch has {len(parts)} parts; give (ids, labels), or (ids, mask, labels)"
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.kind == "classification":
            return F.cross_entropy(logits, labels)
        wanted = labels[:, 1:].reshape(-1)
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), wanted, ignore_index=IGNORED
        )

    def _logits(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        masks = held(model, kind=self.kind, is_packed=self._is_packed)
        if self._is_packed:
            assert mask is not None
            apart, positions = packed_mask_for(model, mask, masks)
            packed: torch.Tensor = model(
                input_ids=ids, attention_mask=apart, position_ids=positions, use_cache=False
            ).logits
            return packed
        if self.kind == "causal":
            if mask is not None:
                check_padding(mask)
            # tokens look to the left only, so padding on the right changes nothing
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
            return logits
        if mask is not None:
            mask = mask_for(model, mask, masks)
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
        return found


def _is_described(base: Any) -> bool:
    """Return whether a base is a folder or a configuration, not a function."""
    return isinstance(base, str | Path | _transformers().PretrainedConfig)


def _transformers() -> Any:
    return require("transformers", extra="huggingface")


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


def _digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files of a model by name."""
    out = {}
    for file in sorted(folder.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as read:
                out[file.name] = hashlib.file_digest(read, "blake2b").hexdigest()
    return out


# -- adapters --------------------------------------------------------------------------------------


Kind = Literal["causal", "classification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Low-rank adapters: ``W x + (alpha / r) B A dropout(x)`` in the target layers.

    Each field is a value, or the name of a hyper-parameter: ``LoRA(r="rank")``.

    Attributes:
        r: Rank of the adapters.
        alpha: Numerator of their factor.
        targets: Names of the layers that get one, such as ``("q_proj", "v_proj")``, or
            ``("all-linear",)``.
        dropout: Probability with which an input of an adapter is dropped.
        layers: Numbers of the blocks that get adapters; None for all. Blocks below the first one
            are computed once for all trials of a pack.
        rslora: Whether the factor is ``alpha / sqrt(r)``.
        all_targets: All layers that any trial of the study adapts. Given these, trials with other
            ``targets`` may train in one pack, if one of them has the layers of the others: a trial
            holds adapters of rank 0 where it has none, which add nothing. ``load_model`` and
            exports leave them out.
        all_layers: The same for ``layers``.

    >>> LoRA(r=8, alpha="alpha", targets=("q_proj", "v_proj")).values({"alpha": 32})["alpha"]
    32

    References:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.
        Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
    """

    r: int | str = 8
    alpha: float | str = 16
    targets: Sequence[str] | str = ("all-linear",)
    dropout: float | str = 0.0
    layers: Sequence[int] | str | None = None
    rslora: bool = False
    all_targets: Sequence[str] = ()
    all_layers: Sequence[int] = ()

    def values(self, hp: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, with hyper-parameters in place of their names."""
        return {
            name: hp[value] if isinstance(value, str) else value
            for name, value in asdict(self).items()
        }

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

    def config(self, hp: Mapping[str, Any], *, kind: Kind) -> peft.LoraConfig:
        """Return the adapters as peft's configuration.

        Raises:
            TaskError: A value is invalid.
        """
        found = self.values(hp)
        rank, targets, layers = found["r"], found["targets"], found["layers"]
        if not isinstance(rank, int) or rank < 1:
            raise TaskError(f"LoRA: r must be a whole number of at least 1, got {rank!r}")
        if not 0.0 <= found["dropout"] < 1.0:
            raise TaskError(f"LoRA: dropout must be in [0, 1), got {found['dropout']!r}")
        names = [targets] if isinstance(targets, str) else list(targets)
        if not names:
            raise TaskError('LoRA: targets is empty; name layers, such as ("q_proj", "v_proj")')
        made: peft.LoraConfig = peft_library().LoraConfig(
            r=rank,
            lora_alpha=found["alpha"],
            target_modules="all-linear" if names == ["all-linear"] else names,
            lora_dropout=float(found["dropout"]),
            layers_to_transform=None if layers is None else list(layers),
            use_rslora=self.rslora,
            task_type="CAUSAL_LM" if kind == "causal" else "SEQ_CLS",
        )
        return made


_NAME = "default"
"""The name that peft gives an adapter."""


def described(adapter: LoRA) -> dict[str, Any]:
    """Return the fields of adapters; databases of before do not know those for idle ones."""
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
    tensors = (*base.parameters(), *base.buffers())
    return deepcopy(
        base,
        {
            id(t): torch.nn.Parameter(t.to("meta"), requires_grad=t.requires_grad)
            if isinstance(t, torch.nn.Parameter)
            else t.to("meta")
            for t in tensors
        },
    )


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
        like = next(base.parameters())
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
