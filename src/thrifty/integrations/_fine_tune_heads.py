"""Heads of fine-tuned models: what is new in a model, and so is trained and saved whole."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator

import torch


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
                f"FineTune: the folder of the base has no {name!r}, so it is random, is not "
                "trained, and is not exported with the adapter; give a folder that has it",
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
