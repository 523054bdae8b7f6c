"""The back-end that chooses: fused where that works and pays, concatenated otherwise."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from thrifty.core import fingerprint
from thrifty.perf import PackCurve

from ._backend import Backend, EpochPlan, Member, Outcome
from ._calibrate import calibrate
from ._concatenated import ConcatenatedBackend
from ._fused import FusedBackend, Structures
from ._solo import SoloBackend
from ._state import State
from ._task import Task, Trainable
from .fused._block import BlockOptions
from .fused._member import FusedTrial
from .fused._registry import UnfusableError


logger = logging.getLogger(__name__)

Prefer = Literal["auto", "fused", "concatenated", "solo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured for one structure on one device; ``key`` names both, ``structure`` and ``device`` in words.

    ``memory_bytes`` is what the device has for everybody.
    """

    key: str
    structure: str
    device: str
    curves: tuple[PackCurve, ...]
    memory_bytes: float = math.inf

    @property
    def solo_s(self) -> float:
        """Seconds of a step of one trial alone."""
        return next(c.step_s[1] for c in self.curves if c.backend == "solo")

    @property
    def best(self) -> PackCurve:
        """The curve with the least time for each trial, at its best size."""
        return min(self.curves, key=lambda c: min(c.per_trial(k) for k in c.step_s))


class AutoBackend(Backend):
    """Any number of slots. Each structure goes to the back-end that a short measurement finds best.

    Options: ``device``; ``prefer`` one back-end (``"concatenated"`` and ``"solo"`` are bit-identical to a trial alone); ``known``
    calibrations by key; ``on_calibrated`` is told each one, known or new.
    """

    def __init__(
        self,
        task: Task | Trainable,
        *,
        device: torch.device | str = "cpu",
        prefer: Prefer = "auto",
        known: Mapping[str, Sequence[PackCurve]] | None = None,
        on_calibrated: Callable[[Calibration], None] = lambda _: None,
    ) -> None:
        self._task = task
        self._device = torch.device(device)
        self._prefer: Prefer = prefer
        self._known = known or {}
        self._on_calibrated = on_calibrated
        self._structures: Structures = {}
        self._fused: FusedBackend | None = None
        self._concatenated: ConcatenatedBackend | None = None
        if isinstance(task, Task):
            self._fused = FusedBackend(task, device=device, structures=self._structures)
            self._concatenated = ConcatenatedBackend(task, device=device)
        self._where: dict[int, Backend] = {}
        self._inner: dict[int, int] = {}
        self._calibrations: dict[Hashable, Calibration | None] = {}
        self._of_slot: dict[int, Calibration | None] = {}
        self._said: set[str] = set()

    def stack(self, slot: int, member: Member) -> None:
        """Puts a trial into a slot of the back-end that is best for it."""
        self._of_slot[slot] = None
        if self._fused is not None and self._prefer in ("auto", "fused"):
            try:
                self._stack_fused(slot, member)
            except UnfusableError as error:
                self._say(str(error))
            else:
                return
        self._stack_plain(slot, member)

    def num_steps(self, slot: int, values: Mapping[str, Any]) -> int:
        """How many optimiser steps the next epoch has."""
        return self._where[slot].num_steps(self._inner[slot], values)

    def step(self, plans: Mapping[int, EpochPlan]) -> Mapping[int, Outcome]:
        """Every back-end goes on until one of its trials has ended its epoch."""
        outcomes: dict[int, Outcome] = {}
        for backend in dict.fromkeys(self._where.values()):
            slots = {self._inner[s]: s for s, where in self._where.items() if where is backend}
            mine = {inner: plans[s] for inner, s in slots.items() if s in plans}
            for inner, outcome in backend.step(mine).items():
                outcomes[slots[inner]] = outcome
        for slot, outcome in list(outcomes.items()):
            if isinstance(outcome, UnfusableError):
                outcomes[slot] = self._move(slot, plans[slot], outcome)
        return outcomes

    def unstack(self, slot: int) -> State:
        """A copy of the full state."""
        return self._where[slot].unstack(self._inner[slot])

    def release(self, slot: int) -> None:
        """Frees a slot."""
        where = self._where.pop(slot, None)
        if where is not None:
            where.release(self._inner.pop(slot))

    def calibration(self, slot: int) -> Calibration | None:
        """What was measured for the trial in a slot, if anything."""
        return self._of_slot.get(slot)

    # -- where to ------------------------------------------------------------------------

    def _stack_fused(self, slot: int, member: Member) -> None:
        assert self._fused is not None
        trial = self._fused.prepare(member)
        key = self._fused.host(trial, member.values) or self._fused.key(trial, member.values)
        if key not in self._calibrations:
            self._calibrations[key] = self._calibrate(key, trial, member)
        calibration = self._of_slot[slot] = self._calibrations[key]
        if (
            calibration is not None
            and calibration.best.backend != "fused"
            and self._prefer == "auto"
        ):
            self._stack_plain(slot, member)
            return
        self._fused.place(slot, trial, member.values)
        self._where[slot], self._inner[slot] = self._fused, slot

    def _stack_plain(self, slot: int, member: Member) -> None:
        if self._concatenated is not None:
            self._concatenated.stack(slot, member)
            self._where[slot], self._inner[slot] = self._concatenated, slot
            return
        solo = SoloBackend(self._task, device=self._device)
        solo.stack(0, member)
        self._where[slot], self._inner[slot] = solo, 0

    def _move(self, slot: int, plan: EpochPlan, reason: UnfusableError) -> Outcome:
        """A trial whose hyper-parameters have changed so that it can no longer be fused goes on elsewhere."""
        self._say(str(reason))
        assert self._fused is not None
        seed = self._fused.seed(slot)
        state = self.unstack(slot)
        self.release(slot)
        self._stack_plain(
            slot, Member(values=plan.values, seed=seed, epoch=plan.epoch, state=state)
        )
        return self._where[slot].step({self._inner[slot]: plan})[self._inner[slot]]

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(
                "%s is trained by plain PyTorch, not fused: %s",
                type(self._task).__name__,
                reason,
            )

    # -- measuring -----------------------------------------------------------------------

    def _calibrate(self, key: Hashable, trial: FusedTrial, member: Member) -> Calibration:
        assert isinstance(self._task, Task)
        assert self._fused is not None
        device = device_name(self._device)
        name = fingerprint([repr(key), device, torch.get_num_threads(), torch.__version__])
        curves = self._known.get(name)
        if curves is None:
            structure = self._fused.structure(trial, member.values)
            curves = calibrate(
                self._task,
                member,
                device=self._device,
                structures=self._structures,
                channels_last=structure.has_images,
            )
        calibration = Calibration(
            key=name,
            structure=f"{type(trial.model).__qualname__}, {describe(trial.model)}",
            device=device,
            curves=tuple(curves),
            memory_bytes=device_memory(self._device),
        )
        best = calibration.best
        if best.backend == "fused":
            self._fused.configure(
                key,
                BlockOptions(
                    size=max(best.step_s), channels_last=best.variant == "channels last"
                ),
            )
        self._on_calibrated(calibration)
        return calibration


def device_name(device: torch.device) -> str:
    """What a device is called by its maker."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def device_memory(device: torch.device) -> float:
    """The memory of a GPU, or what this machine has free; infinite where nobody can tell."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return math.inf


def describe(model: torch.nn.Module) -> str:
    """The size of a model in words."""
    return f"{sum(p.numel() for p in model.parameters()):,} parameters"
