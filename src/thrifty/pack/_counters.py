"""Buffers that count optimizer steps."""

from __future__ import annotations

import torch


def step_counters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that modules name in ``step_counters``, by path, each once.

    Training loops add one to each of them after each optimizer step. A layer that has to know the
    step cannot count its own calls, because a step may call it several times, nor rely on the hooks
    of another training loop.
    """
    # ``named_modules`` visits a module that is used in several places only once
    return {
        f"{path}.{name}" if path else name: getattr(module, name)
        for path, module in model.named_modules()
        for name in getattr(type(module), "step_counters", ())
    }
