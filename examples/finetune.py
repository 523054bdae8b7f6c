"""Sweep LoRA settings over one frozen base: `python examples/finetune.py`, about a minute.

The base is a small character model with random weights, so the accuracy means little. Give
`th.FineTune` a folder with a real model instead.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig

import thrifty as th


TEXT = "the quick brown fox jumps over the lazy dog. " * 40
LETTERS = sorted(set(TEXT))


def letters(_: th.HyperParameters) -> th.ArrayData:
    """Return the text in pieces of 32 characters."""
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    rows = ids[: len(ids) // 32 * 32].view(-1, 32)
    return th.ArrayData(train=(rows[:40],), valid=(rows[40:],))


task = th.FineTune(
    LlamaConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
    # adapters in the upper half only: what is below is computed once for all trials
    adapter=th.LoRA(r="rank", alpha="alpha", targets=("q_proj", "v_proj"), layers=(2, 3)),
    data=letters,
    optimizer=th.AdamW(lr="lr"),
    batch_size=8,
)
rate = th.Choice([0.01, 0.03])
space = th.Space(
    rank=th.Choice([2, 4]),
    alpha=th.Choice([4, 16]),
    lr=th.Choice([th.Constant(rate), th.Step(rate, [2])]),
)
study = th.Study(
    task,
    space,
    algorithm=th.GridSearch(max_epochs=4),
    metric="loss",
    mode="min",
    name="adapters",
    storage="sqlite:///adapters.db",
)

if __name__ == "__main__":
    print(study.plan())
    study.run(executor=th.Local(threads=1))
    print(study.best_trial.config, study.best_trial.values)
    print(study.savings)
