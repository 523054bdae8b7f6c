"""Models of Hugging Face's transformers as tasks of a study."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from thrifty.core import MissingExtraError, TaskError, derive_seed
from thrifty.pack import TRAIN_LOSS, HyperParameters, borrowed_streams
from thrifty.pack._quantized import settled
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
)
from ._lost_values import Examined, LostValues, Mending, Rehearsal, outcome_of
from ._model_copies import ModelCopies, frozen_digests
from ._unsaved_values import values_of


try:
    import accelerate  # noqa: F401 (a Trainer needs it)
    import transformers
except ImportError as error:
    package = str(error.name or "transformers")
    raise MissingExtraError(package, extra="huggingface") from None

from ._huggingface_parts import EpochCallback, OneRun, StepCallback, going_on, load, trainer_owners


_OURS = {
    "auto_find_batch_size": "a trial has the batch size that it is given",
    "data_seed": "the study has a seed",
    "deepspeed": "a trial has one device",
    "disable_tqdm": "the study shows progress",
    "eval_strategy": "every epoch is evaluated",
    "fsdp": "a trial has one device",
    "load_best_model_at_end": "the study finds the best trial",
    "output_dir": "the study keeps checkpoints",
    "push_to_hub": "push the best trial's model when the study is done",
    "report_to": "give loggers to Study.run(observers=...)",
    "save_strategy": "the study keeps checkpoints",
    "seed": "the study has a seed",
    "use_cpu": "Local(devices=...) says where",
}
"""TrainingArguments that the user must not set here, and why."""

_OURS_WITH_STEPS = {
    "eval_delay": "every epoch is evaluated",
    "eval_steps": "every epoch is evaluated",
    "ignore_data_skip": "an epoch goes on in the data where the last one ended",
    "num_train_epochs": "say max_steps",
}
"""The same, if the user sets ``steps_per_epoch``."""

_HEAVY = ("model", "optimizer", "frozen", "finished")
"""Parts of a state that are weights and moments."""

_MENDING = Mending(
    values=(
        "keep tensors in buffers of the model (register_buffer), and other values in a callback "
        "that is an ExportableState"
    ),
    frozen=(
        "set requires_grad at the beginning of each epoch from then on (state.epoch >= n, "
        "not state.epoch == n)"
    ),
)

SMALL_BYTES = 4 * 2**20
"""Size of a model, in bytes of parameters, from which memory is collected before each epoch."""


class HuggingFaceTrainable(KeptTrainable):
    """Tunes a transformers model with its own ``Trainer``, unchanged.

    An epoch is one ``Trainer.train`` call that continues from the state of the previous epoch. It
    draws its random numbers from a stream derived from seed and epoch, so a trial's metrics do not
    depend on which process trained its first epochs. Besides ``eval_...`` the task reports
    ``train_loss``, the mean over the epoch. A trial ends where a callback or the Trainer stops
    training: its last metrics hold for later epochs.

    The learning rate is constant unless the space has a schedule for it or ``lr_scheduler_type`` is
    given. The latter needs ``num_train_epochs``, or ``max_steps`` with ``steps_per_epoch``. If both
    are given, the two are multiplied.

    Args:
        model: Function that makes the model from the hyper-parameters. Each epoch begins with a
            new model that gets the trial's weights. If the model consists of classes of torch,
            transformers and peft, without hooks and on the CPU, the function is called once for
            each trial, and again when a value that it reads changes; epochs get copies. It is
            called for each epoch otherwise.
        train_dataset: A data set, or a function that makes one from the hyper-parameters. The
            function is called for each trial, and again when a value that it reads changes.
        eval_dataset: The same for evaluation, which ends each epoch.
        args: Options of ``transformers.TrainingArguments``, or a function from the hyper-parameters
            to these options: ``lambda hp: {"learning_rate": hp.lr}``. It is called for each epoch,
            so the options follow the schedules of the space.
        steps_per_epoch: Number of optimizer steps in an epoch (default: one pass over the data).
            The data begin again when they end, and an epoch goes on in them where the last one
            ended. ``max_steps`` in ``args`` then takes the place of ``num_train_epochs``.
        compute_metrics: As for a ``Trainer``; the study calls a metric ``accuracy``
            ``eval_accuracy``.
        trainer_class: Your own ``Trainer`` subclass, for example with another ``compute_loss``.
        trainer: Other options of the ``Trainer``: ``{"data_collator": ...}``.
        version: Change this when something changes that the code does not show, such as a data
            file.

    Raises:
        TaskError: An argument sets something that the study controls.
        MissingExtraError: transformers or accelerate is not installed.

    >>> task = HuggingFaceTrainable(lambda hp: None, train_dataset=[], args={"learning_rate": 1e-4})
    >>> HuggingFaceTrainable(lambda hp: None, train_dataset=[], args={"seed": 3})
    Traceback (most recent call last):
        ...
    thrifty.TaskError: HuggingFaceTrainable(args={'seed': ...}): the study has a seed;
    leave it out
    """

    not_state = ("_models", "_lost", "_examined")

    def __init__(  # noqa: PLR0913 -- the Trainer's arguments; all but the model are keywords
        self,
        model: Callable[[HyperParameters], Any],
        *,
        train_dataset: Any,
        eval_dataset: Any = None,
        args: Mapping[str, Any] | Callable[[HyperParameters], Mapping[str, Any]] | None = None,
        steps_per_epoch: int | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        trainer_class: type | None = None,
        trainer: Mapping[str, Any] | None = None,
        version: str = "",
    ) -> None:
        options = {
            "args": args,
            "steps_per_epoch": steps_per_epoch,
            "compute_metrics": compute_metrics,
            "trainer_class": trainer_class,
            "trainer": trainer,
        }
        check_class(self, HuggingFaceTrainable, options)
        super().__init__(version=version)
        check_steps(type(self).__name__, steps_per_epoch)
        self._num_steps = steps_per_epoch
        self._make_model = model
        self._datasets = (train_dataset, eval_dataset)
        self._made: tuple[HpMemo | None, ...] = ()
        self._args = args if callable(args) else self._checked(args or {})
        self._compute_metrics = compute_metrics
        self._trainer_class = trainer_class or transformers.Trainer
        self._options = dict(trainer or {})
        self._examined = Examined()
        self._lost = self._lost_values()

    def __thrifty_identity__(self) -> Mapping[str, Any]:
        """Return the functions that make model and data, and all options."""
        # Left out where it is not set, so that identities in earlier databases still match.
        steps = {} if self._num_steps is None else {"steps_per_epoch": self._num_steps}
        return {
            "model": self._make_model,
            "datasets": self._datasets,
            "args": self._args,
            "compute_metrics": self._compute_metrics,
            "trainer_class": self._trainer_class,
            "trainer": self._options,
            **steps,
        }

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of optimizer steps in an epoch; None if an epoch is one pass over the data."""
        return self._num_steps

    def _legacy_identity(self) -> Mapping[str, str]:
        parts = (
            self._make_model,
            tuple(d if callable(d) else _summary(d) for d in self._datasets),
            self._args,
            self._compute_metrics,
            self._trainer_class,
            self._options,
        )
        return {**super()._legacy_identity(), "attributes": described(parts)}

    def setup(self, hp: HyperParameters, *, seed: int, device: torch.device) -> None:
        """Discard the state and the data of the previous trial."""
        super().setup(hp, seed=seed, device=device)
        self._forget_data()
        self._models = ModelCopies(self._make_model)
        self._lost = self._lost_values()

    def _forget_data(self) -> None:
        self._made = tuple(HpMemo(each) if callable(each) else None for each in self._datasets)

    def train(self, epoch: int, hp: HyperParameters) -> None:
        """Run one ``Trainer.train``, stopped at the end of the epoch.

        Raises:
            TaskError: The epoch is beyond ``num_train_epochs`` or ``max_steps``, or the chosen
                lr_scheduler needs one of them and it is missing, or a stream of data has ended.
            DivergedError: The training loss is not finite.
            StateError: The last epoch has changed a value that results depend on, and that its
                checkpoint does not hold.
        """
        if self._has_ended(hp):
            self._forget_data()
            return
        self._lost.examine(epoch, self._rehearse)
        self._hp = hp
        options = self._arguments(hp, epoch=epoch)
        seed = derive_seed(self._seed, "transformers", epoch) % 2**32
        stop = None if self._num_steps is None else (epoch + 1) * self._num_steps
        callback = EpochCallback(self._kept, stop=stop)
        model = settled(self._models.get(hp, seed=derive_seed(self._seed, "model")))
        model, frozen = frozen_digests(model, kept=self._kept, make=self._fresh)
        model.train()
        with _on(self._device), TemporaryDirectory(prefix="thrifty-") as folder:
            args = self._training_arguments(options, folder, data_seed=seed)
            trainer = self._trainer(model, args, callback)
            run = OneRun(trainer, callback, kept=self._kept, frozen=frozen, seed=seed)
            with _generators_of(trainer).kept():
                resume = self._write_trainer_state(
                    trainer, Path(folder), kept=self._kept, epoch=epoch
                )
                self._lost.begin(self._kept, trainer_owners(trainer))
                kept = run.run(resume)
            owners = trainer_owners(trainer)  # a Trainer makes callbacks anew that export state
        _release(trainer)
        loss = callback.mean_loss()
        check_loss(loss, epoch=epoch, clipping="max_grad_norm")
        # Training that is stopped within an epoch of steps may end without an evaluation.
        before = self._kept["metrics"] if self._kept and "ended" in kept else {}
        kept["metrics"] = {**before, TRAIN_LOSS: loss, **callback.metrics()}
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

    def _rehearse(
        self, kept: dict[str, Any], *, epoch: int, hp: HyperParameters, run: Rehearsal
    ) -> None:
        """Train some epochs of few batches in one ``Trainer.train``."""
        options = self._arguments(hp, epoch=epoch)
        seed = derive_seed(self._seed, "transformers", epoch) % 2**32
        last = epoch + run.num_epochs
        if self._num_steps is not None:
            # One short pass takes the place of an epoch of steps.
            options |= {"eval_strategy": "epoch" if self._datasets[1] is not None else "no"}
            options["num_train_epochs"] = math.ceil(options.pop("max_steps") / self._num_steps)
            options["ignore_data_skip"] = True
        # Runs that are compared have the same length, which a schedule may ask for.
        options["num_train_epochs"] = max(options.get("num_train_epochs", 0), epoch + 2)
        callback = EpochCallback(kept, stop=None, num_epochs=run.num_epochs)
        step = StepCallback(run, last=last - 1)
        model = self._made_with(hp)
        model, frozen = frozen_digests(model, kept=kept, make=lambda: self._made_with(hp))
        model.train()
        with _on(self._device), TemporaryDirectory(prefix="thrifty-") as folder:
            args = self._training_arguments(options, folder, data_seed=seed)
            trainer = self._trainer(model, args, callback, first=step)
            trainer.rehearsal = run
            if "last_epoch" in kept.get("scheduler", ()):
                # The few steps of an experiment begin where this epoch begins in the schedule.
                kept["scheduler"]["last_epoch"] = epoch * _steps_of(trainer)
            step.trainer = trainer
            one_run = OneRun(trainer, callback, kept=kept, frozen=frozen, seed=seed)
            with _generators_of(trainer).kept():
                resume = self._write_trainer_state(
                    trainer, Path(folder), kept=kept, epoch=epoch, is_short=True
                )
                run.kept = one_run.run(resume)
            run.at_end = values_of(trainer_owners(trainer))
        _release(trainer)
        run.outcome = outcome_of(run.kept["model"], run.kept["optimizer"])
        run.metrics = callback.metrics()

    def _lost_values(self) -> LostValues:
        return LostValues(
            type(self).__name__, mending=_MENDING, heavy=_HEAVY, examined=self._examined
        )

    @property
    def model(self) -> torch.nn.Module:
        """The model with the trial's weights."""
        with borrowed_streams():
            return self._build()

    def _build(self) -> torch.nn.Module:
        model = self._fresh()
        if self._kept:
            held = self._kept["model"], self._kept.get("frozen", {})
            load(model, *self._finished(*held))
        return model

    def _fresh(self) -> torch.nn.Module:
        return self._made_with(self._hp)

    def _made_with(self, hp: HyperParameters) -> torch.nn.Module:
        seed_everything(derive_seed(self._seed, "model"))
        model: torch.nn.Module = self._make_model(hp)
        return settled(model) if isinstance(model, torch.nn.Module) else model

    def _arguments(self, hp: HyperParameters, *, epoch: int) -> dict[str, Any]:
        given = dict(self._checked(self._args(hp)) if callable(self._args) else self._args)
        kind = given.setdefault("lr_scheduler_type", "constant")
        kind = getattr(kind, "value", kind)
        end = "num_train_epochs" if self._num_steps is None else "max_steps"
        total = given.get(end, math.inf)
        if total == math.inf and kind != "constant":
            length = "" if self._num_steps is None else "steps_per_epoch times "
            raise TaskError(
                f"HuggingFaceTrainable(args={{'lr_scheduler_type': {kind!r}}}) needs to know when "
                f"training ends; give it {end}, {length}the max_epochs of the algorithm"
            )
        if self._num_steps is not None:
            check_max_steps(
                "HuggingFaceTrainable(args={'max_steps': ...})",
                given.get("max_steps"),
                steps_per_epoch=self._num_steps,
                epoch=epoch,
            )
            given.setdefault("max_steps", (epoch + 1) * self._num_steps)
            given["eval_steps"] = self._num_steps
        elif epoch >= total:
            raise TaskError(
                f"HuggingFaceTrainable(args={{'num_train_epochs': {total:g}}}) is asked for epoch "
                f"{epoch + 1}; give it the "
                "max_epochs of the algorithm"
            )
        else:
            given["num_train_epochs"] = epoch + 1 if total == math.inf else total
        if epoch > 0:
            given.pop("eval_on_start", None)  # training has begun in the first epoch
        interval = "epoch" if self._num_steps is None else "steps"
        return {
            "dataloader_pin_memory": self._device.type == "cuda",
            "logging_strategy": "no",
            **given,
            "disable_tqdm": True,
            "eval_strategy": "no" if self._datasets[1] is None else interval,
            "ignore_data_skip": self._num_steps is None,
            "report_to": "none",
            "restore_callback_states_from_checkpoint": True,
            "save_strategy": "no",
            "use_cpu": self._device.type == "cpu",
        }

    def _training_arguments(
        self, options: Mapping[str, Any], folder: str, *, data_seed: int
    ) -> transformers.TrainingArguments:
        """Return the arguments of a Trainer.

        Args:
            options: Those of the user, and those that thrifty sets.
            folder: Where it writes.
            data_seed: The seed of what the data draw in this epoch. What a Trainer draws once, when
                it is made and makes its data, has the same seed in all epochs.
        """
        seed = derive_seed(self._seed, "transformers") % 2**32
        args = transformers.TrainingArguments(
            **options, output_dir=folder, seed=seed, data_seed=data_seed
        )
        _place(args, self._device)
        return args

    def _trainer(
        self, model: torch.nn.Module, args: Any, callback: EpochCallback, *, first: Any = None
    ) -> Any:
        train, evaluation = (
            given if made is None else made.get(self._hp, seed=self._seed)
            for given, made in zip(self._datasets, self._made, strict=True)
        )
        options = copy.deepcopy(self._options)  # callbacks belong to one trial
        before = [] if first is None else [first]
        callbacks = [*before, *(options.pop("callbacks", None) or []), callback]
        trainer = going_on(self._trainer_class)(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            compute_metrics=self._compute_metrics,
            callbacks=callbacks,
            **options,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.losses = []
        _reseed_collator(trainer.data_collator, args.data_seed)
        callback.trainer = trainer
        if sum(p.nbytes for p in model.parameters()) < SMALL_BYTES:
            # A Trainer begins with a full garbage collection, which takes several epochs of a small
            # model. What earlier Trainers of such models hold can wait for Python's own collection.
            trainer.accelerator.free_memory = lambda *objects: objects
        return trainer

    def _write_trainer_state(
        self,
        trainer: Any,
        folder: Path,
        *,
        kept: Mapping[str, Any],
        epoch: int,
        is_short: bool = False,
    ) -> str | None:
        """Write the Trainer's own state file, which is plain JSON, and return its folder."""
        has_steps = self._num_steps is not None and not is_short
        if has_steps:
            trainer.pass_seed = derive_seed(self._seed, "data order")
        if not kept:
            return None
        per_pass = _steps_of(trainer)
        step = epoch * (self._num_steps if has_steps and self._num_steps else per_pass)
        trainer.first_pass = step // per_pass
        # The batch size may have changed, and the Trainer computes the epoch from the step.
        now = {"global_step": step, "train_batch_size": trainer.args.train_batch_size}
        text = json.dumps({**kept["trainer"], **now})
        (folder / "trainer_state.json").write_text(text, encoding="utf-8")
        return str(folder)

    def _checked(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        ours = _OURS if self._num_steps is None else {**_OURS, **_OURS_WITH_STEPS}
        for name in args:
            if name in ours:
                raise TaskError(
                    f"HuggingFaceTrainable(args={{{name!r}: ...}}): {ours[name]}; leave it out"
                )
        check_steps(type(self).__name__, self._num_steps, max_steps=args.get("max_steps"))
        return args


def _steps_of(trainer: Any) -> int:
    """Return how many optimizer steps a pass over the data has, as the Trainer counts them."""
    loader = trainer.get_train_dataloader()
    try:
        num_batches = len(loader)
    except TypeError:  # a stream: all steps belong to one pass
        return int(trainer.args.max_steps)
    num_steps: int = math.ceil(num_batches / trainer.args.gradient_accumulation_steps)
    return max(num_steps, 1)


def _release(trainer: Any) -> None:
    """Drop what a Trainer holds of its model, which reference cycles would keep alive."""
    for holder in (trainer, trainer.callback_handler):
        for name in ("model", "model_wrapped", "optimizer", "lr_scheduler"):
            if hasattr(holder, name):
                setattr(holder, name, None)
    for name in ("_models", "_optimizers", "_schedulers"):
        getattr(trainer.accelerator, name, []).clear()


def _summary(dataset: Any) -> str:
    length = len(dataset) if hasattr(dataset, "__len__") else "no"
    return f"{type(dataset).__module__}.{type(dataset).__qualname__} of {length} rows"


def _place(args: Any, device: torch.device) -> None:
    """Restrict a Trainer to one GPU, because it would take all GPUs that it sees."""
    if device.type == "cuda":
        args.device  # noqa: B018 (detects devices; the result is then replaced)
        args._n_gpu = 1
        args.__dict__["_setup_devices"] = device
        torch.cuda.set_device(device)


_SETTINGS = ("ACCELERATE_TORCH_DEVICE", "ACCELERATE_MIXED_PRECISION")
"""Environment variables through which accelerate learns of the device and of the precision.

transformers 4 sets the latter, and takes it for the precision of the next trial.
"""


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Set accelerate's device, and restore its settings on exit."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    if device.type == "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _generators_of(trainer: Any) -> OwnGenerators:
    """Return the generators of a Trainer's data sets and of its data collator."""
    names = ("train_dataset", "eval_dataset", "data_collator")
    return OwnGenerators({name: getattr(trainer, name, None) for name in names})


def _reseed_collator(collator: Any, seed: int) -> None:
    """Let a collator of transformers with a seed of its own mask other tokens in each epoch.

    It makes its generator when it is first called, which here would be once an epoch.
    """
    given = getattr(collator, "seed", None)
    if isinstance(given, int) and getattr(collator, "generator", 0) is None:
        collator.seed = derive_seed(seed, "collator", given) % 2**32
