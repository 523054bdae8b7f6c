"""The parts of Lightning that ``LightningTrainable`` uses, and what it adds to a Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from thrifty.core import TaskError

from ._adapters import Options, follow, from_plain, options_of, to_plain
from ._lost_values import Rehearsal, check_rates, seed_step
from ._model_copies import Digests, fill_in, leave_out
from ._unsaved_values import values_of


_LOGGERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")

_NOT_KEPT = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")
"""Arguments of the module, left out because it is made again from the hyper-parameters."""


class Lightning(NamedTuple):
    """The parts that are used of a module's package: ``lightning`` or ``pytorch_lightning``."""

    Trainer: Any
    Memory: Any
    EpochCallback: Any
    StepCallback: Any
    environment: Any
    warning: type[Warning]
    bases: tuple[type, ...]


def lightning_of(module: object) -> Lightning:
    for kind in type(module).__mro__:
        root = kind.__module__.partition(".")[0]
        if kind.__name__ == "LightningModule" and root in ("lightning", "pytorch_lightning"):
            return _parts("lightning.pytorch" if root == "lightning" else root)
    raise TaskError(
        f"LightningTrainable: module(hp) made a {type(module).__name__}; it has to make a "
        "LightningModule"
    )


@cache
def _parts(package: str) -> Lightning:
    pl = import_module(package)
    plugins = import_module(f"{package}.plugins")
    return Lightning(
        Trainer=pl.Trainer,
        Memory=_memory_class(plugins.CheckpointIO),
        EpochCallback=_epoch_callback_class(pl.Callback),
        StepCallback=_step_callback_class(pl.Callback),
        environment=import_module(f"{package}.plugins.environments").LightningEnvironment,
        warning=import_module(f"{package}.utilities.warnings").PossibleUserWarning,
        bases=(
            *pl.LightningModule.__mro__,
            pl.Callback,
            import_module(f"{package}.callbacks").GradientAccumulationScheduler,
        ),
    )


def _memory_class(base: Any) -> type:
    class Memory(base):  # type: ignore[misc]
        """Checkpoint plug-in that keeps a checkpoint in memory."""

        def __init__(
            self, kept: dict[str, Any] | None, *, module: torch.nn.Module, frozen: Digests
        ) -> None:
            self.kept = kept
            self.frozen = frozen
            self._module = module

        def save_checkpoint(
            self, checkpoint: dict[str, Any], path: Any, *_: Any, **__: Any
        ) -> None:
            state, self.frozen = leave_out(checkpoint["state_dict"], self.frozen)
            held = {**checkpoint, "state_dict": state}
            self.kept = {k: to_plain(v) for k, v in held.items() if k not in _NOT_KEPT}

        def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> Any:
            held = from_plain(self.kept)
            state = fill_in(held["state_dict"], self.frozen, model=self._module)
            return {**held, "state_dict": state}

        def remove_checkpoint(self, path: Any) -> None:
            self.kept = None

    return Memory


def _epoch_callback_class(base: Any) -> type:
    class EpochCallback(base):  # type: ignore[misc]
        """Callback that updates options, sums up the loss and stops, usually after one epoch.

        A study decides how long a trial is. A rehearsal goes on where the user's code stops.
        """

        def __init__(self, kept: Mapping[str, Any], *, num_epochs: int = 1) -> None:
            self.epochs_left = num_epochs
            self.is_stopped = self.has_begun = False
            self._before: Options | None = kept.get("options")
            self.options: Options = []
            self._losses: list[torch.Tensor] = []

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.options = options_of(trainer.optimizers)
            self.has_begun = True

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if isinstance(loss, torch.Tensor):
                # With gradient accumulation, the loss is given divided by the number of batches.
                self._losses.append(loss.detach() * trainer.accumulate_grad_batches)

        def follow(self, trainer: Any) -> None:
            """Apply options that have changed since the last epoch."""
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            if self._before is not None:
                follow(trainer.optimizers, schedulers, before=self._before, now=self.options)

        def stop(self, trainer: Any) -> None:
            """Count an epoch, note whether the user's code has stopped training, and stop it."""
            self.is_stopped = bool(trainer.should_stop)
            self.epochs_left -= 1
            trainer.should_stop = self.epochs_left <= 0

        def mean_loss(self) -> float | None:
            return float(torch.stack(self._losses).mean()) if self._losses else None

    return EpochCallback


def _step_callback_class(base: Any) -> type:
    class StepCallback(base):  # type: ignore[misc]
        """Callback of a rehearsal, which seeds steps and notes the values before the last epoch.

        It comes before all others.
        """

        def __init__(self, run: Rehearsal, *, module: Any) -> None:
            self.owners: dict[str, Any] = {"module": module}
            self._run = run

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            seed_step(self._run, trainer.current_epoch)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
            number = batch[-1]
            if number == 0:
                check_rates(trainer.optimizers)
                self._run.at_start = values_of(self.owners)
            seed_step(self._run, trainer.current_epoch, number)

    return StepCallback


def where(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"accelerator": "gpu", "devices": [device.index or 0]}
    return {"accelerator": device.type, "devices": 1}


@contextmanager
def quiet(lightning: Lightning) -> Iterator[None]:
    """Silence what a Trainer reports at each start, which here is each epoch of each trial."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(max(each.level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lightning.warning)
            warnings.filterwarnings("ignore", "GPU available but not used")
            # Lightning itself uses something that torch has renamed since.
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
