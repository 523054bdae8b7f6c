"""The parts of transformers that ``HuggingFaceTrainable`` uses, and what it adds to a Trainer."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from thrifty.core import TaskError, derive_seed
from thrifty.pack import borrowed_streams
from thrifty.pack.task._own_generators import is_readable_by_index
from thrifty.pack.trial._weights import load_model

from ._adapters import follow, from_plain, options_of, to_plain
from ._lost_values import FirstBatches, Rehearsal, check_rates, seed_step
from ._model_copies import Digests, fill_in, leave_out
from ._trainer_runs import (
    PassSampler,
    by_passes,
    copied,
    finished,
    generators_within,
    overridden,
    reseed,
)
from ._unsaved_values import owners_of, values_of


_TIMINGS = ("_runtime", "_per_second", "_preparation_time", "_compilation_time")
"""Suffixes of metrics that depend on the machine, not on the trial."""


class EpochCallback(transformers.TrainerCallback):
    """Callback that updates optimizer and scheduler, stops after an epoch and records metrics."""

    def __init__(
        self, kept: Mapping[str, Any], *, stop: int | None, num_epochs: int | None = None
    ) -> None:
        self._before = kept
        self._epochs_left = num_epochs or 1
        self._stop = stop
        self.is_rehearsal = num_epochs is not None
        self.is_due = False
        """Whether the run has to stop now."""
        self.is_over = False
        """Whether the loop over epochs has ended."""
        self.trainer: Any = None
        self._evaluated: list[Mapping[str, Any]] = []
        self._num_steps = 0

    @property
    def counts_steps(self) -> bool:
        """Whether an epoch is a number of steps, or a few in a rehearsal."""
        return self._stop is not None or self.is_rehearsal

    def begin(self) -> None:
        """Restore the fresh optimizer and scheduler and apply changed options."""
        optimizer, scheduler = self.trainer.optimizer, self.trainer.lr_scheduler
        self._options = options_of([optimizer])
        if not self._before:
            return
        optimizer.load_state_dict(from_plain(self._before["optimizer"]))
        scheduler.load_state_dict(from_plain(self._before["scheduler"]))
        if self._before["scaler"] is not None:
            self.trainer.accelerator.scaler.load_state_dict(self._before["scaler"])
        follow([optimizer], [scheduler], before=self._before["options"], now=self._options)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count optimizer steps: one step may accumulate several batches."""
        self._num_steps += 1
        if self._stop is not None and state.global_step >= self._stop:
            self.is_due = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop training after the last epoch, usually the first, unless steps say when it ends.

        Raises:
            TaskError: A stream of data has ended before the last step of the epoch.
        """
        if self._stop is None:
            self._epochs_left -= 1
            self.is_due = self._epochs_left <= 0
        elif state.global_step < self._stop and not has_length(self.trainer.train_dataset):
            raise TaskError(
                f"HuggingFaceTrainable(steps_per_epoch=...): the stream of training data ends "
                f"after {state.global_step} optimizer steps, and the epoch after {self._stop}; "
                "give a stream that begins again (datasets: .repeat(None)), or a data set with a "
                "length"
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collect the metrics of one evaluation set.

        There may be several sets, and other callbacks may still add to the dictionary.
        """
        if not self.is_over:
            self._evaluated.append(kwargs["metrics"])

    def mean_loss(self) -> float:
        """Return the mean loss over the epoch's steps.

        Unlike the Trainer's own mean, this includes values that are not finite.
        """
        return float(torch.stack(self.trainer.losses).sum()) / self._num_steps

    def metrics(self) -> dict[str, float]:
        """Return the metrics without those that differ from run to run."""
        return {
            name: float(value)
            for each in self._evaluated
            for name, value in each.items()
            if name != "epoch" and not name.endswith(_TIMINGS)
        }

    def keep(self) -> dict[str, Any]:
        """Return everything needed to resume."""
        trainer = self.trainer
        file = Path(trainer.args.output_dir) / "trainer_state.json"
        state = copy.copy(trainer.state)
        state.log_history = []  # it contains times and grows without bound
        state.stateful_callbacks = _exported(trainer.callback_handler.callbacks)
        state.save_to_json(str(file))
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "model": trainer.model.state_dict(),
            "optimizer": to_plain(trainer.optimizer.state_dict()),
            "scheduler": to_plain(trainer.lr_scheduler.state_dict()),
            "scaler": None if scaler is None else to_plain(scaler.state_dict()),
            "options": self._options,
            "trainer": json.loads(file.read_text(encoding="utf-8")),
        }


def _exported(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the states of callbacks by the names of their classes, as a Trainer stores them."""
    found: dict[str, list[Any]] = {}
    for each in callbacks:
        if isinstance(each, ExportableState):
            found.setdefault(type(each).__name__, []).append(each.state())
    return {name: each if len(each) > 1 else each[0] for name, each in found.items()}


class OneRun:
    """Lets a run of a Trainer for one epoch be a part of a longer one.

    - It gives the model the trial's weights when all code that runs once, at the beginning of
      training, has seen the model as it is in a run from the beginning.
    - It takes what is kept before the callbacks at the end of training are called.
    - It stops the run after the epoch, and notes whether the user's code has stopped it.

    Args:
        trainer: A Trainer that has not been used. It was made with the seed of the trial, because
            what a run draws before its first step, it draws once.
        callback: Its callback that counts epochs.
        kept: The state that the last epoch has left; empty for the first run of a trial.
        frozen: The digests of what checkpoints may leave out.
        seed: The seed of what the steps draw.
    """

    def __init__(
        self,
        trainer: Any,
        callback: EpochCallback,
        *,
        kept: Mapping[str, Any],
        frozen: Digests,
        seed: int,
    ) -> None:
        self._seed = seed
        self._trainer, self._callback, self._before, self._frozen = trainer, callback, kept, frozen
        handler = trainer.callback_handler
        handler.callbacks[:] = [
            _Flow() if type(each) is transformers.DefaultFlowCallback else each
            for each in handler.callbacks
        ]
        self._order = list(map(type, handler.callbacks))
        self._call, handler.call_event = handler.call_event, self._call_event
        self._is_asked = False
        """Whether the user's code asks to stop training."""
        self._is_shown = False
        """What the Trainer's flag was set to at the last event."""
        self._kept: dict[str, Any] | None = None
        """What is kept before the callbacks at the end; None if there are none."""

    def run(self, resume: str | None) -> dict[str, Any]:
        """Train, and return what is kept.

        Args:
            resume: The folder of the Trainer's own state file; None: a fresh trial.
        """
        self._trainer.train(resume_from_checkpoint=resume)
        kept = self._callback.keep() if self._kept is None else self._kept
        kept["model"], kept["frozen"] = leave_out(kept["model"], self._frozen)
        if self._kept is not None:
            after = leave_out(self._trainer.model.state_dict(), self._frozen)
            before = kept["model"], kept["frozen"]
            left = finished(after, before=before, hooks=self._at_end())
            if left is not None:
                kept["finished"] = left
        if self._is_asked:
            kept["ended"] = True
        return kept

    def _call_event(self, event: str, *given: Any, **kwargs: Any) -> Any:
        """Call callbacks, which see the flag that they would see in one run over all epochs."""
        args, state, control = given
        if event == "on_train_begin":
            self._put_in_order()
        elif event == "on_train_end" and self._kept is None and self._at_end():
            self._kept = copied(self._callback.keep())
        elif event == "on_log" and "train_runtime" in kwargs.get("logs", ()):
            self._callback.is_over = True  # this is the log of the whole run
        if control.should_training_stop != self._is_shown:  # set by code that is no callback
            self._ask(control)
        control.should_training_stop = self._is_asked
        control = self._call(event, args, state, control, **kwargs)
        self._ask(control)
        if (
            control.should_epoch_stop
            and self._callback.counts_steps
            and not self._callback.is_rehearsal
        ):
            raise TaskError(
                "HuggingFaceTrainable(steps_per_epoch=...): code of yours ends a pass over the "
                "data early (control.should_epoch_stop), so thrifty cannot tell where the next "
                "epoch of steps begins; leave steps_per_epoch out, or do not end passes early"
            )
        if event == "on_train_begin":
            if self._before:
                load(self._trainer.model, self._before["model"], self._before.get("frozen", {}))
                self._is_asked = False
                self._count_on(state)
            self._callback.begin()
            transformers.set_seed(self._seed)
        control.should_training_stop = self._is_shown = self._is_asked or self._callback.is_due
        return control

    def _ask(self, control: Any) -> None:
        """Note whether the user's code asks to stop training.

        A rehearsal goes on: a study decides how long a trial is.
        """
        if not (self._callback.is_over or self._callback.is_rehearsal):
            self._is_asked = control.should_training_stop

    def _count_on(self, state: Any) -> None:
        """Go on with the number of steps that the trial has taken.

        A Trainer finds its epoch by the number of steps, as if all epochs had the same number. Code
        may have ended some early (``control.should_epoch_stop``).
        """
        if not self._callback.counts_steps:
            state.global_step = self._before["trainer"]["global_step"]
            self._trainer._globalstep_last_logged = state.global_step

    def _put_in_order(self) -> None:
        """Put callbacks in the order in which they were given; a Trainer adds some of them anew."""
        callbacks = self._trainer.callback_handler.callbacks
        rest = list(callbacks)
        ordered = []
        for kind in self._order:
            found = next((each for each in rest if type(each) is kind), None)
            if found is not None:
                rest.remove(found)
                ordered.append(found)
        callbacks[:] = [*ordered, *rest]

    def _at_end(self) -> list[str]:
        """Return the names of the user's code that runs at the end of training."""
        callbacks = self._trainer.callback_handler.callbacks
        methods, bases = ("train", "_inner_training_loop"), transformers.Trainer.__mro__
        return [
            *overridden(callbacks, ["on_train_end"], bases=[transformers.TrainerCallback]),
            *overridden([self._trainer], methods, bases=bases),
        ]


class _Flow(transformers.DefaultFlowCallback):
    """The Trainer's own flow of evaluations and logs, without the end of training.

    ``EpochCallback`` says when a run ends: not each run ends the training of its trial.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Say what to do after a step."""
        is_stopping = control.should_training_stop
        control = super().on_step_end(args, state, control, **kwargs) or control
        control.should_training_stop = is_stopping
        return control


def load(model: torch.nn.Module, weights: Mapping[str, Any], frozen: Digests) -> None:
    """Give a model the weights that were kept.

    Args:
        model: A fresh model.
        weights: The weights.
        frozen: The digests of what they leave out.
    """
    load_model(model, fill_in(weights, frozen, model=model))


class StepCallback(transformers.TrainerCallback):
    """Callback of a rehearsal, which seeds each step and notes the values before the last epoch.

    It comes before the user's callbacks.
    """

    def __init__(self, run: Rehearsal, *, last: int) -> None:
        self.trainer: Any = None
        self._run = run
        self._last = last
        self._epoch = last + 1 - run.num_epochs
        self._step = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seed what callbacks draw at the beginning of an epoch."""
        seed_step(self._run, self._epoch)
        self._step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seed a step, and note the values before the first one of the last epoch."""
        if self._step == 0 and self._epoch == self._last:
            check_rates([self.trainer.optimizer])
            self._run.at_start = values_of(trainer_owners(self.trainer))
        seed_step(self._run, self._epoch, self._step)
        self._step += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count epochs."""
        self._epoch += 1


def trainer_owners(trainer: Any) -> dict[str, Any]:
    """Return the objects of a Trainer whose values may be lost."""
    callbacks = trainer.callback_handler.callbacks
    return owners_of(callbacks, model=trainer.model, trainer=trainer)


def _seeded(loader: Any, *, seed: int, pass_seed: int | None, first_pass: int) -> Any:
    """Return a training loader whose generators are seeded for an epoch.

    Args:
        loader: The loader.
        seed: The seed of the epoch.
        pass_seed: The seed of the order of all passes; None if an epoch is a pass. Where epochs are
            steps, a stream is read from its beginning, so nothing in it may depend on the epoch.
        first_pass: The number of the pass in which the epoch begins.
    """
    if pass_seed is not None:
        if not is_readable_by_index(getattr(loader, "dataset", None)):
            return loader
        if isinstance(loader, torch.utils.data.DataLoader):
            loader = by_passes(loader, seed=pass_seed, first=first_pass)
    reseed(loader, seed)
    return loader


def going_on(trainer_class: type) -> type:
    class ResumedTrainer(trainer_class):  # type: ignore[misc]
        """A Trainer that records the losses, and whose model ``OneRun`` gives the weights."""

        losses: list[torch.Tensor]
        pass_seed: int | None = None
        first_pass = 0
        rehearsal: Rehearsal | None = None

        def get_train_dataloader(self, *args: Any, **kwargs: Any) -> Any:
            with borrowed_streams():
                # A run of all epochs makes it once, so what is drawn here is the same in each.
                transformers.set_seed(self.args.seed)
                loader = super().get_train_dataloader(*args, **kwargs)
            seeds = {"seed": self.args.data_seed, "pass_seed": self.pass_seed}
            return self._short("train", _seeded(loader, **seeds, first_pass=self.first_pass))

        def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
            given = [each if isinstance(each, str) else id(each) for each in args]
            loader = super().get_eval_dataloader(*args, **kwargs)
            generators_within(loader).seed(derive_seed(self.args.data_seed, "evaluation"))
            return self._short(f"evaluation {given}", loader)

        def _short(self, name: str, loader: Any) -> Any:
            """Return the first batches of a loader in a rehearsal, and all of them otherwise."""
            if self.rehearsal is None:
                return loader
            return FirstBatches(loader, kept=self.rehearsal.batches, name=name, seed=self.args.seed)

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            sampler = super()._get_train_sampler(*args, **kwargs)
            if self.pass_seed is None or sampler is None:
                return sampler
            return PassSampler(sampler, seed=self.pass_seed, first=self.first_pass)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            self.losses.append(loss.detach())
            return loss

        def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            pass

    ResumedTrainer.__name__ = trainer_class.__name__  # for messages
    return ResumedTrainer
