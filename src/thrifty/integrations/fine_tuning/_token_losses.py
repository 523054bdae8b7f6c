"""Losses, accuracies and checks of tokens and of sequences; rows of several sequences.

They say which labels count, in which precision, and what evaluation averages.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return the mean cross-entropy of the tokens that count; 0 if none does.

    Then a step changes weights as with the loss of plain PyTorch, which is 0 / 0 with gradients of
    zero.
    """
    wanted = labels[:, 1:].reshape(-1).long()
    loss = F.cross_entropy(
        in_single(logits)[:, :-1].reshape(-1, logits.shape[-1]), wanted, ignore_index=IGNORED
    )
    return torch.where((wanted != IGNORED).any(), loss, 0.0)


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


def described_tokens(model: Any, ids: torch.Tensor) -> str:
    """Return what an index may be out of range for: numbers of tokens, or lengths of rows."""
    table = getattr(model.get_input_embeddings(), "num_embeddings", None)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    numbers = f"from {int(ids.min())} to {int(ids.max())} " if can_be_read(ids) else ""
    return (
        f"tokens with numbers {numbers}(the model has {table} tokens) or rows of {ids.shape[-1]} "
        f"tokens (the model has {longest} positions); give data that fit the model"
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
