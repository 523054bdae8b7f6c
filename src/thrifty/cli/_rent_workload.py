"""The workload of ``thrifty rent``: from a stored profile, or from a task that is timed here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from thrifty.cloud import Workload, widths_of
from thrifty.core import MissingExtraError, UsageError
from thrifty.perf import StepProfile

from ._rent_options import Asked


_STATE = 3
"""Checkpoint bytes per gradient byte: weights, and two moments of the optimiser."""


def load_workload(file: Path, asked: Asked) -> tuple[Workload, Mapping[str, Any]]:
    """Return the workload and the hyper-parameters that it was timed with.

    The file is loaded only if necessary.

    Raises:
        UsageError: The file or an option is invalid.
        MissingExtraError: platformdirs is not installed.
    """
    stored = None if asked.profile is None else _stored(asked.profile)
    if stored is not None and asked.steps and asked.batch and not asked.study:
        return _of(stored, steps=asked.steps, batch=asked.batch), {}
    from ._rent_task import load_subject, steps_of  # noqa: PLC0415 -- importing torch takes seconds

    subject = load_subject(file, name=asked.name, hp=dict(asked.hp))
    study, batch = subject.study, asked.batch or subject.batch_size
    if asked.study and study is None:
        raise UsageError(f"{file} defines no study, which --study is about")
    epochs = asked.epochs or (study.algorithm.max_epochs if study else None)
    if epochs is None and asked.steps is None:
        raise UsageError("say how long the training is: --epochs or --steps")
    source = subject.source()
    profile = stored
    if profile is None:
        with Console(stderr=True).status("timing the model on this machine ..."):
            profile = subject.profile(source, batch=batch, cache=_cache(asked))
    each = steps_of(source, batch)
    workload = _of(profile, steps=asked.steps or epochs * each, batch=batch)
    if asked.study:
        widths = widths_of(study.plan().forest, steps_per_epoch=each)
        workload = replace(workload, widths=widths)
    return workload, {} if stored else subject.values


def _of(profile: StepProfile, *, steps: int, batch: int) -> Workload:
    return Workload(
        profile=profile,
        steps=steps,
        global_batch=batch,
        state_bytes=_STATE * sum(profile.bucket_bytes),
    )


def _stored(path: Path) -> StepProfile:
    try:
        return StepProfile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} holds no profile: {error}") from error


def _cache(asked: Asked) -> Path:
    if asked.cache is not None:
        return asked.cache
    try:
        from platformdirs import user_cache_path  # noqa: PLC0415 (optional dependency)
    except ImportError as error:
        raise MissingExtraError("platformdirs", extra="cloud") from error
    return Path(user_cache_path("thrifty"))
