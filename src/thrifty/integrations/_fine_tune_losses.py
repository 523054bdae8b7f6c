"""Losses of fine-tuning: which labels count, in which precision, and what evaluation averages."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from thrifty.core import TaskError
from thrifty.pack import ArrayData


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
    wanted = labels[:, 1:].reshape(-1)
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
