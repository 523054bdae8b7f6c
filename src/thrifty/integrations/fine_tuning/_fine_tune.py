"""Fine-tuning of transformers models: one frozen base, and an adapter for each trial."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from thrifty.core import TaskError, error_text, require
from thrifty.integrations._adapters import check_class, set_by_class
from thrifty.pack import HyperParameters, Task, TaskIdentity
from thrifty.pack._quantized import settled
from thrifty.pack.task._data import Batch
from thrifty.pack.trial._trial_needs import BASE_BYTES

from ._attention_masks import (
    check_labels,
    check_padding,
    check_tokens,
    held,
    hold,
    let_go,
    mask_for,
    masks_of,
    packed_mask_for,
)
from ._bases import Base, Head, transformers_library, unlend_trained
from ._lora import Kind, LoRA, described, peft_library, with_adapters, without_idle
from ._token_losses import (
    IGNORED,
    accuracy_of_sequences,
    accuracy_of_tokens,
    check_classes,
    check_classes_of,
    check_num_labels,
    described_tokens,
    is_even,
    loss_of_sequences,
    loss_of_tokens,
)


if TYPE_CHECKING:
    import transformers


_EVAL_BATCH_SIZE = 64
_RULES = "2"
"""Raised when ``FineTune`` computes something else from the same inputs."""


class FineTune(Task):
    """Fine-tunes a transformers model with adapters over a frozen base.

    All trials of a study have the same base. thrifty keeps it once in a worker, leaves it out of
    checkpoints, and in a pack computes what lies below the first adapter once for all trials. Each
    trial's adapter is what ``peft`` trains; ``study.best_trial.load_model()`` returns it as a
    ``PeftModel``, and ``thrifty export NAME --adapter DIR`` writes it for ``peft`` and vLLM.

    Args:
        model: The base: a folder with a model, a transformers configuration (random weights), or a
            function of the hyper-parameters that returns a model. Its linear layers may be
            quantised to 8 or 4 bits by bitsandbytes.
        adapter: The adapters. Their fields may name hyper-parameters.
        data: ``ArrayData`` or another kind of data, or a function of the hyper-parameters that
            returns it. Batches are ``(ids, labels)``, or ``(ids, mask, labels)`` where the mask is
            0 at padding. ``kind="causal"`` also takes ``(ids,)``.
        optimizer: As ``Task.optimizer``, such as ``th.AdamW(lr="lr")``. A subclass may define it
            instead. It may also set ``kind``, ``batch_size`` and what follows that.
        kind: ``"causal"`` (default): predict the next token; ids and labels have the same shape,
            padding is on the right, and labels of -100 do not count. ``"classification"``: one
            label for each sequence. A causal model such as Llama judges a sequence by its last
            token that is not ``pad_token_id``, so its configuration has to name one.
        packed: Whether a row has several sequences, one after the other (``kind="causal"`` only).
            Batches then are ``(ids, numbers, labels)``: ``numbers`` says to which sequence of the
            row a token belongs (1, 2, ...; 0 at padding). ``pack_tokens`` makes them. A sequence
            gets the results that it gets in a row of its own: tokens see no other sequence, and
            positions begin again with each. The loss is the mean over all tokens of the batch.
            Models that do not keep sequences apart are refused, and rows longer than a window.
        batch_size: As ``Task.batch_size`` (default: 8).
        eval_batch_size: As ``Task.eval_batch_size`` (default: 64). Metrics are means over all
            tokens (or sequences) of the validation data that count, so it changes only speed and
            memory.
        num_labels: Number of classes, for ``kind="classification"`` (default: 2).
        base_seed: Seed of the base's random weights, where it is a configuration, and of a new
            classification head (default: 0). All trials have the same ones.
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

    kind: Kind = "causal"
    batch_size: int | str = 8
    eval_batch_size: int = _EVAL_BATCH_SIZE
    num_labels: int = 2
    base_seed: int = 0

    _metrics_of_outputs = True
    """``metrics`` below depends on the model's outputs alone, so padded trials may share it."""

    @property
    def _metrics_by_weight(self) -> bool:
        """Whether validation means are over tokens, so that they do not depend on batches."""
        return self.kind == "causal"

    def __init__(  # noqa: PLR0913 (one argument for each part of a task)
        self,
        model: str | Path | transformers.PretrainedConfig | Callable[[HyperParameters], Any],
        *,
        adapter: LoRA,
        data: Any,
        optimizer: Any = None,
        kind: Kind | None = None,
        packed: bool = False,
        batch_size: int | str | None = None,
        eval_batch_size: int | None = None,
        num_labels: int | None = None,
        base_seed: int | None = None,
        steps_per_epoch: int | None = None,
        version: str | None = None,
    ) -> None:
        peft_library(), transformers_library()
        check_class(self, FineTune, {"packed": packed})
        kind = self.kind if kind is None else kind
        if kind not in ("causal", "classification"):
            raise TaskError(f'FineTune: kind must be "causal" or "classification", got {kind!r}')
        base = Base(model)
        if not isinstance(adapter, LoRA):
            what = type(adapter).__name__
            raise TaskError(f"FineTune: adapter must be a thrifty.LoRA(...), got {what}")
        if packed and kind != "causal":
            raise TaskError(
                f"FineTune(packed=True, kind={kind!r}): only tokens that predict the next one can "
                'share a row; leave packed out, or give kind="causal"'
            )
        self._base, self._adapter, self._data, self.kind = base, adapter, data, kind
        self._is_packed = packed
        self._set_optimizer(optimizer)
        self._set_options(
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_labels=num_labels,
            base_seed=base_seed,
            steps_per_epoch=steps_per_epoch,
            version=version,
        )
        if kind == "classification" and type(self).loss is FineTune.loss:
            check_num_labels(self.num_labels)

    def _set_optimizer(self, optimizer: Any) -> None:
        if not set_by_class(self, FineTune, {"optimizer": None}):
            self.optimizer = optimizer
        elif optimizer is not None:
            raise TaskError(
                f"{type(self).__name__} defines an optimizer, and one is given; leave one of them "
                "out"
            )

    def _set_options(self, **given: Any) -> None:
        """Set the options that are given; the others are those of the class, perhaps a subclass.

        There is an assignment for each one, because identities find attributes by those.
        """
        if given["batch_size"] is not None:
            self.batch_size = given["batch_size"]
        if given["eval_batch_size"] is not None:
            self.eval_batch_size = given["eval_batch_size"]
        if given["num_labels"] is not None:
            self.num_labels = given["num_labels"]
        if given["base_seed"] is not None:
            self.base_seed = given["base_seed"]
        if given["steps_per_epoch"] is not None:
            self.steps_per_epoch = given["steps_per_epoch"]
        if given["version"] is not None:
            self.version = given["version"]

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return the base (its files by content), the adapters, the data and the options."""
        return {
            "base": self._base.identity(),
            "adapter": described(self._adapter),
            "data": self._data,
            "optimizer": self.optimizer,
            "kind": self.kind,
            "batch_size": self.batch_size,
            "num_labels": self.num_labels,
            "base_seed": self.base_seed,
            "steps_per_epoch": self.steps_per_epoch,
            # their versions and what the user has changed in them
            "libraries": (transformers_library().PreTrainedModel, peft_library().PeftModel),
            # its versions, where it computes the products with the base
            **({"quantizer": _bitsandbytes()} if self._base.quantizer == "bitsandbytes" else {}),
            # left out where it is not set, so that identities in earlier databases still match
            **({"packed": True} if self._is_packed else {}),
        }

    def __thrifty_unchanged__(self) -> None:
        """Check that the files of the base are those of the identity.

        Raises:
            TaskError: They are not.
        """
        self._base.check_unchanged()

    def _content(self) -> TaskIdentity:
        """Return the identity by content, with what only evaluation depends on.

        What was always so has no entry, so that identities in earlier databases still match.
        """
        found = super()._content()
        evaluation = dict(found.evaluation)
        if self.eval_batch_size != _EVAL_BATCH_SIZE:
            evaluation["attribute eval_batch_size"] = str(self.eval_batch_size)
        if self._metrics_by_weight and not is_even(self._data, batch_size=self.eval_batch_size):
            evaluation["mean of metrics"] = "over tokens"
        training = dict(found.training)
        if (
            self._is_packed
            or self.kind == "classification"
            or isinstance(self._adapter.rslora, str)
            or self.precision != "fp32"
            or self._base.may_be_half
        ):  # the others have the results of the first rules, as in earlier databases
            training["rules"] = _RULES
        return replace(found, training=training, evaluation=evaluation)

    def data(self, hp: HyperParameters) -> Any:
        """Return the data.

        Raises:
            TaskError: Tokens have padding before them, but look to the left; padding has labels
                that count; labels are a mask, shifted already, or no classes.
        """
        data = self._data(hp) if callable(self._data) else self._data
        if type(self).loss is not FineTune.loss:
            return data  # what its batches mean is up to the user's own loss
        if self.kind == "causal" and not self._is_packed:
            check_tokens(data, ignored=IGNORED)
        if self.kind == "classification":
            check_classes_of(data, num_labels=self.num_labels)
        return data

    def model(self, hp: HyperParameters) -> torch.nn.Module:
        """Return the frozen base with new adapters.

        Raises:
            TaskError: The adapters do not fit the base, or it cannot be trained in this way.
        """
        base, missing = self._base.model(hp, head=self._head, seed=self.base_seed)
        settled(base)  # masks are measured by evaluations
        self._check_positions(base)
        masks = masks_of(base, kind=self.kind, is_packed=self._is_packed)
        model = with_adapters(base, self._adapter, hp, kind=self.kind, missing=missing)
        unlend_trained(model)
        hold(model, masks, kind=self.kind, is_packed=self._is_packed)
        return model

    def meta_model(self, hp: HyperParameters) -> torch.nn.Module | None:
        """Return the model without values; None if a function makes the base."""
        if not self._base.is_described:
            return None
        base, missing = self._base.empty(head=self._head)
        with torch.device("meta"):
            model = with_adapters(base, self._adapter, hp, kind=self.kind, missing=missing)
        if self._base.quantizer:
            setattr(model, BASE_BYTES, self._base.num_bytes)
        return model

    @property
    def _head(self) -> Head:
        return Head(self.kind, self.num_labels)

    def _check_positions(self, base: Any) -> None:
        if self._is_packed and "position_ids" not in inspect.signature(base.forward).parameters:
            raise TaskError(
                f"FineTune(packed=True): {type(base).__name__} takes no position_ids, so positions "
                "cannot begin again within a row; leave packed out and pad each sequence"
            )

    def __thrifty_finished__(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a trained model without adapters of rank 0."""
        let_go(model)
        return without_idle(model)

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy, over tokens or over sequences."""
        ids, mask, labels = self._parts(batch)
        return self._loss(self._logits(model, ids, mask, labels=labels), labels)

    def loss_weight(self, batch: Batch) -> float | None:
        """Return the number of tokens (or sequences) of a part of a batch that count.

        None, which stands for the number of rows, for batches that a loss of your own understands
        and this class does not: dicts, pairs of answers, one number for each sequence.
        """
        if type(self).loss is not FineTune.loss and not (_is_usual(batch) and _has_tokens(batch)):
            return None
        _, _, labels = self._parts(batch)
        if self.kind == "classification":
            return float(len(labels))
        return float((labels[:, 1:] != IGNORED).sum())

    def metrics(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Any]:
        """Return ``loss``, and ``accuracy`` of tokens or sequences."""
        ids, mask, labels = self._parts(batch)
        logits = self._logits(model, ids, mask, labels=labels)
        loss = self._loss(logits, labels)
        accuracy = accuracy_of_tokens if self.kind == "causal" else accuracy_of_sequences
        return {"loss": loss, "accuracy": accuracy(logits, labels)}

    def _parts(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return tokens, mask (or numbers of sequences) and labels of a batch."""
        if self._is_packed:
            if not _is_usual(batch, least=3):
                raise TaskError(
                    f"FineTune(packed=True): a batch is {_described(batch)}; give (ids, numbers, "
                    "labels), as pack_tokens returns them"
                )
            ids, numbers, labels = batch
            # a first token is predicted by no token of its own sequence
            inner = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] != 0)
            first = torch.zeros_like(inner[:, :1])
            return ids, numbers, labels.masked_fill(~torch.cat([first, inner], 1), IGNORED)
        if not _is_usual(batch):
            raise TaskError(
                f"FineTune: a batch is {_described(batch)}; give (ids, labels), or (ids, mask, "
                "labels), or subclass thrifty.FineTune and write loss and metrics for such batches"
            )
        parts = tuple(batch)
        if len(parts) == 1:
            return parts[0], None, parts[0]
        if len(parts) == 2:
            return parts[0], None, parts[1]
        return parts

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.kind == "classification":
            check_classes(labels, num_labels=self.num_labels)
        loss = loss_of_tokens if self.kind == "causal" else loss_of_sequences
        return loss(logits, labels)

    def _logits(
        self,
        model: torch.nn.Module,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        try:
            return self._outputs(model, ids, mask, labels=labels)
        except IndexError as error:
            raise TaskError(
                f"FineTune: {type(model).__name__} failed with {error_text(error)}, probably for "
                f"{described_tokens(model, ids)}"
            ) from error

    def _outputs(
        self,
        model: torch.nn.Module,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        labels: torch.Tensor | None,
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
                check_padding(mask, labels, ignored=IGNORED)
            elif labels is not None and labels is not ids:
                check_labels(ids, labels)
            # tokens look to the left only, so padding on the right changes nothing
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
            return logits
        if mask is not None:
            mask = mask_for(model, mask, masks)
        found: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
        return found


def _is_usual(batch: Any, *, least: int = 1) -> bool:
    """Return whether a batch is some tensors, three at most."""
    return (
        isinstance(batch, tuple | list)
        and least <= len(batch) <= 3
        and all(isinstance(each, torch.Tensor) for each in batch)
    )


def _has_tokens(batch: Sequence[torch.Tensor]) -> bool:
    """Return whether a batch has rows of tokens, each with a label."""
    return batch[0].dim() == 2 and batch[-1].shape == batch[0].shape


def _described(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} with {', '.join(map(repr, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)} parts"
    return f"a {type(batch).__name__}"


def _bitsandbytes() -> Any:
    return require("bitsandbytes.nn", extra="quantized").Linear4bit
