"""What thrifty gives a trial: initial weights, the order of batches, and random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import torch

from thrifty.core import derive_seed, step_seed
from thrifty.pack._state import seed_everything, seed_step
from thrifty.pack.task._data import Batch, open_source, valid_batches
from thrifty.pack.task._epochs import epoch_batches, epoch_length
from thrifty.pack.task._streams import trial_stream
from thrifty.pack.task._task import HyperParameters, Task, options_of

from ._trial import batch_size_of


class TrialInputs:
    """The inputs of a trial, for a plain PyTorch loop that reproduces it bit for bit.

    Everything follows from the seed. The global random streams are left where they are after the
    last call, as in a trial.

    Args:
        task: The task of the study.
        values: The trial's hyper-parameters in epoch 0.
        seed: The study's seed. For replica ``r`` of a study with several seeds, it is
            ``thrifty.core.replica_seed(seed, r)``.
        device: Where model and batches are.

    Example:
        >>> import thrifty as th
        >>> class Line(th.Task):
        ...     batch_size, optimizer = 16, th.SGD(lr="lr")
        ...
        ...     def data(self, hp):
        ...         x = torch.linspace(-1, 1, 32)[:, None]
        ...         return th.ArrayData(train=(x, 2 * x), valid=(x, 2 * x))
        ...
        ...     def model(self, hp):
        ...         return torch.nn.Linear(1, 1)
        ...
        ...     def loss(self, model, batch):
        ...         x, y = batch
        ...         return (model(x) - y).square().mean()
        ...
        ...     def metrics(self, model, batch):
        ...         return {"mse": self.loss(model, batch)}
        >>> inputs = TrialInputs(Line(), {"lr": 0.1}, seed=0)
        >>> model = inputs.model()
        >>> [len(x) for x, y in inputs.batches(0)]
        [16, 16]
    """

    def __init__(
        self,
        task: Task,
        values: Mapping[str, Any],
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._task = task
        self._values = values
        self._seed = seed
        self._device = torch.device(device)
        seed_everything(derive_seed(seed, "data"))
        self._source = open_source(task.data(HyperParameters(values)), device=self._device)
        self._stream = trial_stream(self._source)
        self._num_steps = options_of(task).steps_per_epoch

    def model(self) -> torch.nn.Module:
        """Return a model with the trial's initial weights."""
        seed_everything(derive_seed(self._seed, "model"))
        return self._task.model(HyperParameters(self._values)).to(self._device)

    def batches(self, epoch: int, *, values: Mapping[str, Any] | None = None) -> Iterator[Batch]:
        """Yield the training batches of an epoch (0, 1, ...), and seed what each step draws.

        The random streams are seeded before a batch is returned, so a step that begins with it
        draws the trial's random numbers: dropout masks, noise, augmentation. Read the epochs of a
        stream in their order, each to its end.

        Args:
            epoch: The epoch.
            values: The hyper-parameters in that epoch, if ``batch_size`` follows one that changes.
        """
        size = batch_size_of(self._task, self._values if values is None else values)
        found = self._read(epoch, size)
        epoch_seed = derive_seed(self._seed, "epoch", epoch)
        seed_everything(epoch_seed)
        for step in count():
            if self._source.arrays is None:
                seed_everything(step_seed(derive_seed(self._seed, "fetch", epoch), step))
            batch = next(found, None)
            if batch is None:
                return
            seed_step(step_seed(epoch_seed, step), self._device)
            yield batch

    def _read(self, epoch: int, size: int) -> Iterator[Batch]:
        if self._stream is None:
            return epoch_batches(
                self._source,
                seed=self._seed,
                epoch=epoch,
                batch_size=size,
                num_steps=self._num_steps,
            )
        num = epoch_length(
            self._source, seed=self._seed, batch_size=size, num_steps=self._num_steps
        )
        return self._stream.epoch(epoch, batch_size=size, num=num)

    def valid_batches(self, epoch: int) -> Iterator[tuple[Batch, int]]:
        """Yield each validation batch and its number of rows, for the evaluation after an epoch.

        The random streams are seeded once, at the beginning.
        """
        seed_everything(derive_seed(self._seed, "evaluate", epoch))
        yield from valid_batches(self._source, batch_size=self._task.eval_batch_size)
