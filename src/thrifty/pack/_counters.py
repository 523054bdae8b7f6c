"""Buffers that count optimiser steps."""

from __future__ import annotations

import torch


def step_counters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that modules name in ``step_counters``, by path, each once; training loops add one to them after each optimiser step.

    A layer that has to know the step counts neither its own calls, of which there may be several a step, nor those of another loop's hooks.
    """
    # a module that stands in several places is visited once
    return {
        f"{path}.{name}" if path else name: getattr(module, name)
        for path, module in model.named_modules()
        for name in getattr(type(module), "step_counters", ())
    }
