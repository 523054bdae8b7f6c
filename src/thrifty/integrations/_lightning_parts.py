"""The parts of Lightning that ``LightningTrainable`` uses, and what it adds to a Trainer.

``OneFit`` is what a fit of Lightning does once, although thrifty has a fit for each epoch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader

from thrifty.core import StateError, TaskError, derive_seed
from thrifty.pack._state import borrowed_streams, seed_everything
from thrifty.pack.verify import same

from ._adapters import Options, follow, from_plain, options_of, to_plain
from ._lost_values import Rehearsal, check_rates, seed_step
from ._model_copies import Digests, fill_in, leave_out
from ._trainer_runs import (
    Weights,
    copied,
    finished,
    first_difference,
    generators_within,
    overridden,
    put_back,
    sums_of,
    weights_of,
)
from ._unsaved_values import is_whole_metric, values_of


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
            return {**held, "state_dict": with_metrics(state, self._module)}

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


@contextmanager
def _loaders_put_back() -> Iterator[None]:
    """Put back the methods of loaders' classes that Lightning leaves wrapped when a hook fails.

    It wraps them to record how loaders are made. In later trials of the process, the identities of
    tasks with loaders would depend on that record.
    """
    try:
        yield
    finally:
        for kind in (*_with_subclasses(DataLoader), *_with_subclasses(BatchSampler)):
            for name in _WRAPPED:
                _unwrap(kind, name)


_WRAPPED = ("__init__", "__setattr__", "__delattr__")


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _unwrap(kind: type, name: str) -> None:
    method: Any = vars(kind).get(name)
    wrapped = method
    while _is_lightnings(method):
        method = method.__wrapped__
    if method is not wrapped:
        setattr(kind, name, method)
    if f"__old{name}" in vars(kind):
        delattr(kind, f"__old{name}")


def _is_lightnings(method: Any) -> bool:
    """Return whether a method is a wrapper of Lightning's, which has the name of what it wraps."""
    if not isinstance(method, FunctionType):
        return False
    return str(method.__globals__.get("__name__")).endswith("fabric.utilities.data")


def keep_metrics(module: torch.nn.Module) -> None:
    """Let the metrics of a module keep their values in its state.

    As a rule, those of torchmetrics do not: one fit has them in memory until its end.
    """
    for _, metric in _metrics_of(module):
        metric.persistent(mode=True)


def with_metrics(state: Mapping[str, Any], module: torch.nn.Module) -> dict[str, Any]:
    """Return a state with the values of a module's metrics that it lacks, as older ones do."""
    values = {
        f"{path}.{name}" if path else name: getattr(metric, name)
        for path, metric in _metrics_of(module)
        for name in metric._defaults
    }
    return {**values, **state}


def _metrics_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of a module whose values say all of them, by their paths."""
    return ((path, part) for path, part in module.named_modules() if is_whole_metric(part))


# -- one fit for all epochs ---------------------------------------------------------------

_AT_BEGIN = ("on_fit_start", "on_train_start")
_AT_END = ("on_train_end", "on_fit_end", "teardown")
_CHECKPOINT = ("on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict")

_NEEDS_STATISTICS = "_model_contains_batch_norm"
"""Attribute of ``StochasticWeightAveraging``."""

_CPU = torch.device("cpu")


class OneFit:
    """Lets a fit of one epoch be a part of a longer one.

    - It takes the checkpoint before the hooks at the end of a fit are called.
    - After the hooks at its beginning, weights, optimizers and schedulers are as in the checkpoint,
      unless the fit is the first one of its trial.
    - A checkpoint has to bring back all weights.
    - It stops after its last epoch, and notes whether the user's code has stopped it.

    Args:
        lightning: The package.
        trainer: A Trainer that has not been used.
        module: Its module.
        memory: Its checkpoint plug-in.
        callback: Its callback that counts epochs.
        kept: The state that the last epoch has left; empty for the first fit of a trial.
        path: A placeholder for the path of a checkpoint.
        seed: Seed of the random draws of training.
        data_seed: Seed of those of hooks that make data, the same in each epoch of a trial.
    """

    def __init__(  # noqa: PLR0913 -- the parts of a fit
        self,
        lightning: Lightning,
        trainer: Any,
        module: Any,
        *,
        memory: Any,
        callback: Any,
        kept: Mapping[str, Any],
        path: str,
        seed: int,
        data_seed: int,
    ) -> None:
        self._seed, self._data_seed = seed, data_seed
        self._bases = lightning.bases
        self._trainer, self._module, self._memory, self._callback = (
            trainer,
            module,
            memory,
            callback,
        )
        self._kept, self._path = kept, path
        self._max_epochs = trainer.max_epochs
        self._has_begun = False
        self._weights: Weights | None = None
        """The weights before the hooks at the beginning; None if no hook may change them."""
        self._others: dict[str, Any] = {}
        """The other entries of the module's state then, such as states of metrics."""
        self._held: dict[str, Any] | None = None
        """What is kept before the hooks at the end; None if there are none."""
        self._sums: dict[str, list[int]] = {}
        _around(trainer.strategy, "setup", after=self._note_restored)
        _around(
            trainer.strategy,
            "setup_optimizers",
            before=self._note_versions,
            after=self._check_versions,
        )
        if not trainer.reload_dataloaders_every_n_epochs:
            # as those for training, which are made before
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.setup_data = partial(self._with_data_seed, loop.setup_data)
        _around(trainer.fit_loop, "on_run_start", before=self._begin, after=self._undo_begin)
        _around(trainer.fit_loop, "on_advance_end", after=self._stop)
        _around(trainer.fit_loop, "on_run_end", before=self._save)

    def run(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fit, and return what is kept of it: a checkpoint, and what belongs to it.

        Args:
            given: The data, as arguments of ``Trainer.fit``.

        Raises:
            StateError: The last checkpoint has not brought back all weights, or a hook at the
                beginning replaces what it has brought back.
            TaskError: Hooks train, or change for how long training goes on.
        """
        seed_everything(self._data_seed)
        with _loaders_put_back():
            self._trainer.fit(self._module, **given, ckpt_path=self._path if self._kept else None)
        self._trainer.save_checkpoint(self._path)
        now = {"checkpoint": self._memory.kept, "frozen": self._memory.frozen}
        kept = now if self._held is None else self._held
        kept |= {"options": self._callback.options}
        if self._sums:
            kept["sums"] = self._sums
        if self._held is not None:
            left = finished(_weights_in(now), before=_weights_in(kept), hooks=self._of(_AT_END))
            if left is not None:
                kept["finished"] = left
        return kept

    def _note_versions(self, *_: Any) -> None:
        self._versions = {name: each._version for name, each in weights_of(self._module).items()}

    def _check_versions(self, *_: Any) -> None:
        """Check that making optimizers has left alone the weights that were restored.

        Raises:
            StateError: It has written into one of them.
        """
        if not self._kept:
            return
        for name, each in weights_of(self._module).items():
            if each._version != self._versions.get(name):
                raise StateError(
                    "LightningTrainable: configure_optimizers changes or adds the weight "
                    f"{name!r}. It is called in each epoch, after the weights were restored; do "
                    "this in __init__, configure_model or on_fit_start"
                )

    def _note_restored(self, *_: Any) -> None:
        """Note the weights that the last checkpoint has brought back.

        Raises:
            StateError: They are not those that the last epoch has left.
        """
        sums = self._kept.get("sums")
        if sums:
            name = first_difference(sums, sums_of(weights_of(self._module)))
            if name is not None:
                raise StateError(self._not_brought_back(name))
        if self._kept and self._of(_AT_BEGIN):
            self._weights = copied(weights_of(self._module))
            self._others = copied(self._state_besides_weights())

    def _with_data_seed(self, set_up: Callable[[], None]) -> None:
        """Draw what the loaders for validation draw as the hooks before training do."""
        with borrowed_streams():
            seed_everything(self._data_seed)
            set_up()
        loaders = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        for number, each in enumerate(() if loaders is None else loaders.flattened):
            generators_within(each).seed(derive_seed(self._seed, "valid", number))

    def _state_besides_weights(self) -> dict[str, Any]:
        weights = weights_of(self._module)
        return {k: v for k, v in self._module.state_dict().items() if k not in weights}

    def _begin(self) -> None:
        """Note what hooks may change when training begins.

        Raises:
            TaskError: They have trained, or have changed for how long it goes on.
        """
        if self._has_begun or not self._callback.has_begun:
            raise TaskError(
                "LightningTrainable: a callback or hook trains before the first step, as "
                "LearningRateFinder and BatchSizeFinder do, and would do so again in each epoch; "
                "leave it out, and let the study search for the value"
            )
        self._has_begun = True
        seed_everything(self._seed)
        self._check_max_epochs()
        self._callback.follow(self._trainer)
        self._optimizers = list(self._trainer.optimizers)
        self._is_stopped = self._trainer.should_stop
        self._stepped = [copied(each.state_dict(), device=_CPU) for each in self._steppers()]

    def _stop(self) -> None:
        self._check_max_epochs()
        self._callback.stop(self._trainer)

    def _check_max_epochs(self) -> None:
        now = self._trainer.fit_loop.max_epochs
        # Only with `max_epochs`, `StochasticWeightAveraging` adds its epoch for statistics.
        adds = [each for each in self._trainer.callbacks if vars(each).get(_NEEDS_STATISTICS)]
        if now != self._max_epochs or adds:
            raise TaskError(
                "LightningTrainable: a callback or hook changes trainer.max_epochs, as "
                "StochasticWeightAveraging does for a module with batch normalization, but the "
                "study says how many epochs a trial has; leave it out, or average with "
                "WeightAveraging(use_buffers=True)"
            )

    def _steppers(self) -> list[Any]:
        """Return optimizers and schedulers, if hooks may have changed them."""
        if not self._kept or not self._of(_AT_BEGIN[1:]):
            return []
        schedulers = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return [*self._trainer.optimizers, *schedulers]

    def _undo_begin(self) -> None:
        """Undo what hooks at the beginning have changed: one fit calls them once.

        Raises:
            StateError: They have replaced weights or optimizers.
        """
        if self._weights is None:
            return
        name = put_back(self._module, self._weights)
        self._weights = None
        if not same(self._others, self._state_besides_weights()):
            self._module.load_state_dict(self._others, strict=False)
        if name is not None:
            raise StateError(self._replaced(f"the weight {name!r}"))
        if any(
            one is not other
            for one, other in zip(self._optimizers, self._trainer.optimizers, strict=True)
        ):
            raise StateError(self._replaced("an optimizer"))
        for each, before in zip(self._steppers(), self._stepped, strict=True):
            now = copied(each.state_dict(), device=_CPU)
            if same(before, now):
                continue
            if len(now.get("param_groups", ())) != len(before.get("param_groups", ())):
                raise StateError(self._replaced("the parameter groups of an optimizer"))
            each.load_state_dict(before)
        self._trainer.should_stop = self._is_stopped

    def _save(self) -> None:
        """Take the checkpoint before the hooks at the end, if there are any."""
        if self._of(_CHECKPOINT):
            self._sums = sums_of(weights_of(self._module))
        if self._of(_AT_END):
            self._trainer.save_checkpoint(self._path)
            self._held = {
                "checkpoint": copied(self._memory.kept, device=_CPU),
                "frozen": self._memory.frozen,
            }

    def _of(self, hooks: Collection[str]) -> list[str]:
        """Return the hooks that the module and the callbacks have of their own."""
        # All callbacks have states, and `state_dict` of a callback says nothing of weights.
        of_callbacks = [name for name in hooks if not name.endswith("state_dict")]
        callbacks = [each for each in self._trainer.callbacks if each is not self._callback]
        return [
            *overridden(callbacks, of_callbacks, bases=self._bases),
            *overridden([self._module], hooks, bases=self._bases),
        ]

    def _not_brought_back(self, name: str) -> str:
        return (
            f"LightningTrainable: the checkpoint of the last epoch does not bring back the weight "
            f"{name!r} as it was, so the next epoch would begin with other weights than in one "
            f"Trainer.fit. {' or '.join(self._of(_CHECKPOINT))} saves or loads something else "
            "than the module has. Leave checkpoint['state_dict'] as it is, or bring back the same "
            "in on_load_checkpoint; leave out a callback that cannot resume, such as ModelPruning"
        )

    def _replaced(self, what: str) -> str:
        return (
            f"LightningTrainable: {' or '.join(self._of(_AT_BEGIN))} replaces {what}. Each epoch "
            "is a fit of its own, so this happens again in each epoch, after the weights were "
            "restored. Do it in __init__, configure_model or configure_optimizers"
        )


def _weights_in(kept: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    return kept["checkpoint"]["state_dict"], kept["frozen"]


def _around(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Call functions before and after a method of an object."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> None:
        if before is not None:
            before(*args)
        method(*args, **kwargs)
        if after is not None:
            after(*args)

    setattr(owner, name, call)
