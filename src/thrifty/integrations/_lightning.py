"""LightningModules as tasks of a study."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch

from thrifty.core import TaskError, derive_seed
from thrifty.pack import TRAIN_LOSS, HyperParameters, borrowed_streams
from thrifty.pack._quantized import first_quantized
from thrifty.pack._state import seed_everything
from thrifty.pack.task._own_generators import OwnGenerators

from ._adapters import (
    HpMemo,
    KeptTrainable,
    check_class,
    check_loss,
    check_max_steps,
    check_steps,
    described,
    from_plain,
)
from ._lightning_parts import (
    Lightning,
    OneFit,
    keep_metrics,
    lightning_of,
    quiet,
    where,
    with_metrics,
)
from ._lost_values import (
    FEW_BATCHES,
    Examined,
    FirstBatches,
    LostValues,
    Mending,
    Rehearsal,
    outcome_of,
)
from ._model_copies import ModelCopies, fill_in, frozen_digests
from ._trainer_runs import StepBatches, reseed
from ._unsaved_values import owners_of, values_of


_OURS = {
    "accelerator": "Local(devices=...) says where",
    "check_val_every_n_epoch": "every epoch is validated",
    "default_root_dir": "nothing is written",
    "devices": "Local(devices=...) says where",
    "enable_checkpointing": "the study keeps checkpoints",
    "enable_model_summary": "it would be printed for each epoch of each trial",
    "enable_progress_bar": "the study shows progress",
    "fast_dev_run": "give the algorithm fewer epochs",
    "logger": "give loggers to Study.run(observers=...)",
    "max_time": "the algorithm says how far, in epochs",
    "min_epochs": "the algorithm says how far",
    "min_steps": "the algorithm says how far, in epochs",
    "num_nodes": "a trial has one device",
    "num_sanity_val_steps": "every epoch is validated",
    "strategy": "a trial has one device",
    "use_distributed_sampler": "a trial has one device",
}
"""Options of a Trainer that the user must not set here, and why."""

_OURS_WITH_STEPS = {
    "limit_train_batches": "steps_per_epoch says how long an epoch is",
    "overfit_batches": "steps_per_epoch says how long an epoch is",
}
"""The same, if the user sets ``steps_per_epoch``."""

_PLACE = "the state of the trial"
"""Placeholder for a path: states stay in memory."""

_HEAVY = ("state_dict", "optimizer_states", "frozen", "finished", "sums")
"""Parts of a state that are weights and moments."""

_MENDING = Mending(
    values=(
        "keep tensors in buffers (self.register_buffer), other values of the module in "
        "on_save_checkpoint and on_load_checkpoint, and those of a callback in state_dict and "
        "load_state_dict"
    ),
    frozen=(
        "set requires_grad at the start of each epoch from then on (current_epoch >= n, "
        "not current_epoch == n)"
    ),
)

_FEW = {"limit_train_batches": FEW_BATCHES, "overfit_batches": 0.0, "val_check_interval": 1.0}
"""Options of a Trainer in a rehearsal of few batches."""


class LightningTrainable(KeptTrainable):
    """Tunes a LightningModule, unchanged.

    An epoch is one ``Trainer.fit`` call that continues from the state of the previous epoch. It
    draws its random numbers from a stream derived from seed and epoch, so a trial's metrics do not
    depend on which process trained its first epochs. Besides the values that the module logs, the
    task reports ``train_loss``, the mean over the epoch. Attributes of the module that are neither
    parameters nor buffers last for one epoch, unless ``on_save_checkpoint`` saves them; if results
    depend on one of them, that is a ``StateError``. A trial ends where the module or a callback
    stops training: its last metrics hold for later epochs.

    Args:
        module: Function that makes the LightningModule from the hyper-parameters. It is called for
            an epoch with that epoch's values, and the module then gets the trial's weights. Thus
            dropout rates, loss weights and options of the optimizer follow the schedules of the
            space. Epochs from the fourth on get copies, if a copy is found to be the same as a
            module that is made; a number that changes with the epoch may be kept in the module.
        data: Function that makes the training data from the hyper-parameters: a
            LightningDataModule, a pair of loaders (training, validation) or one loader. It is
            called for each trial, and again when a value that it reads changes. None: the module
            has loaders itself.
        monitor: The logged values that are the trial's metrics (default: all).
        max_epochs: Value of ``trainer.max_epochs``, for a module whose own lr_scheduler needs it.
        steps_per_epoch: Number of optimizer steps in an epoch (default: one pass over the data).
            The data begin again when they end, and an epoch goes on in them where the last one
            ended. With manual optimization, it is the number of batches.
        trainer: Other options of ``lightning.pytorch.Trainer``: ``{"precision": "bf16-mixed"}``.
            With ``steps_per_epoch``, ``max_steps`` may say when training ends.
        version: Change this when something changes that the code does not show, such as a data
            file.

    Raises:
        TaskError: An option of the Trainer sets something that the study controls, or
            ``steps_per_epoch`` is not positive.

    >>> task = LightningTrainable(lambda hp: None, trainer={"gradient_clip_val": 1.0})
    >>> LightningTrainable(lambda hp: None, trainer={"logger": True})
    Traceback (most recent call last):
        ...
    thrifty.TaskError: LightningTrainable(trainer={'logger': ...}): give loggers to
    Study.run(observers=...); leave it out
    """

    not_state = ("_modules", "_lost", "_examined")

    def __init__(
        self,
        module: Callable[[HyperParameters], Any],
        data: Callable[[HyperParameters], Any] | None = None,
        *,
        monitor: Sequence[str] = (),
        max_epochs: int | None = None,
        steps_per_epoch: int | None = None,
        trainer: Mapping[str, Any] | None = None,
        version: str = "",
    ) -> None:
        options = {
            "monitor": monitor,
            "max_epochs": max_epochs,
            "steps_per_epoch": steps_per_epoch,
            "trainer": trainer,
        }
        check_class(self, LightningTrainable, options)
        ours = _OURS if steps_per_epoch is None else {**_OURS, **_OURS_WITH_STEPS}
        for name in trainer or {}:
            if name in ours:
                raise TaskError(
                    f"LightningTrainable(trainer={{{name!r}: ...}}): {ours[name]}; leave it out"
                )
        check_steps(
            type(self).__name__, steps_per_epoch, max_steps=(trainer or {}).get("max_steps")
        )
        super().__init__(version=version)
        self._make_module = module
        self._make_data = data
        self._data: HpMemo | None = None
        self._monitor = (monitor,) if isinstance(monitor, str) else tuple(monitor)
        self._max_epochs = max_epochs
        self._num_steps = steps_per_epoch
        self._options = dict(trainer or {})
        self._examined = Examined()
        self._lost = self._lost_values()

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return the functions that make module and data, and all options."""
        # Left out where it is not set, so that identities in earlier databases still match.
        steps = {} if self._num_steps is None else {"steps_per_epoch": self._num_steps}
        return {
            "module": self._make_module,
            "data": self._make_data,
            "monitor": self._monitor,
            "max_epochs": self._max_epochs,
            "trainer": self._options,
            **steps,
        }

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of optimizer steps in an epoch; None if an epoch is one pass over the data."""
        return self._num_steps

    def _legacy_identity(self) -> Mapping[str, str]:
        parts = tuple(self.__thrifty_identity__().values())
        return {**super()._legacy_identity(), "attributes": described(parts)}

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Discard the state and the data of the previous trial."""
        super().setup(hp, seed=seed, device=device)
        self._modules = ModelCopies(self._make_module)
        self._lost = self._lost_values()
        self._forget_data()

    def _forget_data(self) -> None:
        self._data = None if self._make_data is None else HpMemo(self._make_data)

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Run one ``Trainer.fit``, stopped at the end of its first epoch.

        Raises:
            TaskError: ``module`` does not make a LightningModule, the epoch is beyond
                ``max_epochs``, two schedules control the learning rate, a metric to monitor is
                not logged, or a callback trains more than its epochs.
            DivergedError: The training loss is not finite.
            StateError: The last epoch has changed a value that results depend on, and that its
                checkpoint does not hold, or its checkpoint does not bring back all weights.
        """
        if self._has_ended(hp):
            self._forget_data()
            return
        self._check_epoch(epoch)
        self._lost.examine(epoch, self._rehearse)
        self._hp = hp
        module = self._modules.get(hp, seed=derive_seed(self._seed, "model"))
        lightning = lightning_of(module)
        module, frozen = frozen_digests(module, kept=self._kept, make=self._build)
        keep_metrics(module)
        data = None if self._data is None else self._data.get(hp, seed=self._seed)
        seed = derive_seed(self._seed, "lightning", epoch)
        memory, callback = (
            lightning.Memory(self._kept.get("checkpoint"), module=module, frozen=frozen),
            lightning.EpochCallback(self._kept),
        )
        trainer = self._trainer(lightning, memory, callback)
        given = _prepared(
            data, module, seed=self._seed, change=partial(self._loaders, epoch=epoch, seed=seed)
        )
        owners = owners_of(trainer.callbacks, module=module)
        self._lost.begin(self._kept, owners)
        parts = {"memory": memory, "callback": callback, "kept": self._kept, "seed": seed}
        fit = self._one_fit(lightning, trainer, module, **parts)
        with quiet(lightning), OwnGenerators({"data": data}).kept():
            kept = fit.run(given)
        if "datamodule" in given:
            given["datamodule"].trainer = None  # each epoch has a Trainer of its own
        if callback.is_stopped:
            kept["ended"] = True
        else:
            self._check_num_steps(trainer, module, epoch=epoch)
        kept["metrics"] = self._metrics(trainer.callback_metrics, callback, epoch=epoch)
        self._kept = kept
        self._lost.end(
            self._kept,
            owners,
            epoch=epoch,
            hp=hp,
            seed=self._seed,
            excused=self.not_state,
            rehearse=self._rehearse,
        )

    def _check_epoch(self, epoch: int) -> None:
        """Check that an epoch is within ``max_epochs``, and its steps within ``max_steps``.

        Raises:
            TaskError: They are not.
        """
        if self._max_epochs is not None and epoch >= self._max_epochs:
            raise TaskError(
                f"LightningTrainable(max_epochs={self._max_epochs}) is asked for epoch "
                f"{epoch + 1}; give it the "
                "max_epochs of the algorithm"
            )
        check_max_steps(
            "LightningTrainable(trainer={'max_steps': ...})",
            self._options.get("max_steps"),
            steps_per_epoch=self._num_steps,
            epoch=epoch,
        )

    def _rehearse(
        self, kept: dict[str, Any], *, epoch: int, hp: HyperParameters, run: Rehearsal
    ) -> None:
        """Train some epochs of few batches in one ``Trainer.fit``."""
        module = self._made(hp)
        lightning = lightning_of(module)
        module, frozen = frozen_digests(module, kept=kept, make=partial(self._made, hp))
        keep_metrics(module)
        data = None if self._data is None else self._data.get(hp, seed=self._seed)
        if not isinstance(data, tuple) and hasattr(data, "train_dataloader"):
            data = copy.copy(data)  # it may count how often it is asked for loaders
            vars(data).pop("train_dataloader", None)
        seed = derive_seed(self._seed, "lightning", epoch)
        memory = lightning.Memory(kept.get("checkpoint"), module=module, frozen=frozen)
        callback = lightning.EpochCallback(kept, num_epochs=run.num_epochs)
        step = lightning.StepCallback(run, module=module)
        is_validated = self._options.get("limit_val_batches") != 0
        few = {**_FEW, "limit_val_batches": FEW_BATCHES if is_validated else 0}
        trainer = self._trainer(lightning, memory, callback, first=step, few=few)
        step.owners = owners_of(trainer.callbacks, module=module)
        given = _prepared(
            data, module, seed=self._seed, change=partial(_first_batches, run=run, seed=seed)
        )
        parts = {"memory": memory, "callback": callback, "kept": kept, "seed": seed}
        fit = self._one_fit(lightning, trainer, module, **parts)
        with quiet(lightning), OwnGenerators({"data": data}).kept():
            run.kept = fit.run(given)
        run.at_end = values_of(step.owners)
        run.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        made = run.kept["checkpoint"]
        run.outcome = outcome_of(made["state_dict"], made["optimizer_states"])

    def _one_fit(self, lightning: Lightning, trainer: Any, module: Any, **parts: Any) -> OneFit:
        data_seed = derive_seed(self._seed, "lightning")
        return OneFit(lightning, trainer, module, path=_PLACE, data_seed=data_seed, **parts)

    def _lost_values(self) -> LostValues:
        return LostValues(
            type(self).__name__, mending=_MENDING, heavy=_HEAVY, examined=self._examined
        )

    @property
    def model(self) -> torch.nn.Module:
        """The LightningModule with the trial's weights."""
        with borrowed_streams():
            module = self._build()
            module.configure_model()
            keep_metrics(module)
        if self._kept:
            held = self._kept["checkpoint"]["state_dict"], self._kept.get("frozen", {})
            weights, frozen = self._finished(*held)
            state = fill_in(from_plain(weights), frozen, model=module)
            module.load_state_dict(with_metrics(state, module))
        return module  # type: ignore[no-any-return]

    def _build(self) -> Any:
        return self._made(self._hp)

    def _made(self, hp: HyperParameters) -> Any:
        seed_everything(derive_seed(self._seed, "model"))
        module = self._make_module(hp)
        if isinstance(module, torch.nn.Module) and (name := first_quantized(module)):
            raise TaskError(
                f"LightningTrainable: the layer {name!r} is quantised by bitsandbytes, and "
                "Lightning cannot load a checkpoint with such layers; give the base in its own "
                "precision, or write a thrifty.Task or a thrifty.FineTune"
            )
        return module

    def _trainer(
        self,
        lightning: Lightning,
        memory: Any,
        callback: Any,
        *,
        first: Any = None,
        few: Mapping[str, Any] | None = None,
    ) -> Any:
        options = copy.deepcopy(self._options)  # callbacks and plugins belong to one trial
        options.update(few or {})
        plugins = options.pop("plugins", [])
        plugins = plugins if isinstance(plugins, list) else [plugins]
        callbacks = options.pop("callbacks", [])
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        with quiet(lightning):
            trainer = lightning.Trainer(
                **where(self._device),
                max_epochs=-1 if self._max_epochs is None else self._max_epochs,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                callbacks=[*([] if first is None else [first]), *callbacks, callback],
                plugins=[*plugins, memory, lightning.environment()],
                **options,
            )
        # With `max_steps`, Lightning takes a checkpoint from the end of an epoch for one from
        # within, and would train nothing. `_check_num_steps` sees if this no longer mends it.
        trainer.fit_loop._iteration_based_training = lambda: False
        return trainer

    def _loaders(self, loaders: Any, *, epoch: int, seed: int) -> Any:
        """Return training loaders as they have to be in an epoch."""
        if self._num_steps is None:
            reseed(loaders, seed)
            return loaders
        part = partial(self._part, epoch=epoch, seed=seed)
        if isinstance(loaders, Mapping):
            return {name: part(loader, name=str(name)) for name, loader in loaders.items()}
        if isinstance(loaders, list | tuple):
            return [part(loader, name=str(i)) for i, loader in enumerate(loaders)]
        return part(loaders, name="")

    def _part(self, loader: Any, *, name: str, epoch: int, seed: int) -> StepBatches:
        if type(loader).__name__ == "CombinedLoader":
            raise TaskError(
                "LightningTrainable(steps_per_epoch=...): the training data are a CombinedLoader, "
                "whose passes thrifty cannot continue; return a dict or a list of loaders"
            )
        assert self._num_steps is not None
        num_batches = self._num_steps * self._options.get("accumulate_grad_batches", 1)
        return StepBatches(
            loader,
            seed=derive_seed(self._seed, "data order", name),
            epoch_seed=derive_seed(seed, name),
            start=epoch * num_batches,
            num_batches=num_batches,
        )

    def _check_num_steps(self, trainer: Any, module: Any, *, epoch: int) -> None:
        """Check that the epoch had the number of optimizer steps that the user has asked for.

        A callback may change the number of accumulated batches, and a training step may skip one.
        """
        if self._num_steps is None or not module.automatic_optimization:
            return
        wanted = (epoch + 1) * self._num_steps
        if trainer.global_step != wanted:
            raise TaskError(
                f"LightningTrainable(steps_per_epoch={self._num_steps}): after epoch {epoch + 1} "
                f"there are {trainer.global_step} optimizer steps, not {wanted}; something stops "
                "the epoch early or changes accumulate_grad_batches, such as a callback"
            )

    def _metrics(self, logged: Mapping[str, Any], callback: Any, *, epoch: int) -> dict[str, float]:
        metrics = {name: float(value) for name, value in logged.items()}
        loss = callback.mean_loss()
        if loss is not None:
            metrics.setdefault(TRAIN_LOSS, loss)
            check_loss(loss, epoch=epoch, clipping="gradient_clip_val")
        missing = [name for name in self._monitor if name not in metrics]
        if missing:
            raise TaskError(
                f"the module does not log {', '.join(missing)} (it logs "
                f"{', '.join(sorted(metrics)) or 'nothing'}); "
                "call self.log(name, value) in training_step or validation_step"
            )
        return {name: metrics[name] for name in self._monitor} if self._monitor else metrics


def _first_batches(loaders: Any, *, run: Rehearsal, seed: int, name: str = "train") -> Any:
    """Return loaders of the first batches only."""
    part = partial(_first_batches, run=run, seed=seed)
    if isinstance(loaders, Mapping):
        return {key: part(each, name=f"{name} {key}") for key, each in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [part(each, name=f"{name} {number}") for number, each in enumerate(loaders)]
    return FirstBatches(loaders, kept=run.batches, name=name, seed=seed)


def _prepared(data: Any, module: Any, *, seed: int, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the data as arguments of ``Trainer.fit``.

    ``change`` makes training loaders what they have to be in this epoch.
    """
    if isinstance(data, tuple):
        if len(data) != 2:
            raise TaskError(
                f"LightningTrainable: data(hp) made a tuple of {len(data)}; it has to be "
                "(training, validation)"
            )
        train, valid = data
        return {"train_dataloaders": change(train), "val_dataloaders": valid}
    owner = module if data is None else data
    if not hasattr(owner, "train_dataloader"):
        return {"train_dataloaders": change(data)}
    _change_what_it_makes(owner, change)
    if data is None:
        return {}
    _set_up_once(data, seed=seed)
    return {"datamodule": data}


def _set_up_once(datamodule: Any, *, seed: int) -> None:
    """Make a data module load its data once, although each epoch is a separate fit."""
    if getattr(datamodule, "_thrifty_once", False):
        return
    datamodule._thrifty_once = True
    datamodule.prepare_data = _once(datamodule.prepare_data, seed=seed)
    datamodule.setup = _once(datamodule.setup, seed=seed)
    datamodule.teardown = wraps(datamodule.teardown)(lambda *_, **__: None)


def _once(hook: Callable[..., Any], *, seed: int) -> Callable[..., Any]:
    called: set[str] = set()

    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> None:
        if repr((args, kwargs)) not in called:
            with borrowed_streams():
                seed_everything(derive_seed(seed, "data"))
                hook(*args, **kwargs)
            called.add(repr((args, kwargs)))

    return call


def _change_what_it_makes(owner: Any, change: Callable[[Any], Any]) -> None:
    make = getattr(owner.train_dataloader, "thrifty_make", owner.train_dataloader)

    @wraps(make)
    def train_dataloader() -> Any:
        return change(make())

    train_dataloader.thrifty_make = make  # type: ignore[attr-defined]
    owner.train_dataloader = train_dataloader
