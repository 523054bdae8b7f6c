"""Main program of a ``HeteroTask`` worker process, started by ``thrifty.core._child.Child``."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, TensorDataset

from thrifty.core import (
    HeteroError,
    PeerLostError,
    TaskError,
    TooFewWorkersError,
    derive_seed,
    error_text,
)
from thrifty.core._child import parent_of
from thrifty.hetero._job import HeteroOptions
from thrifty.hetero._trainer import HeteroTrainer
from thrifty.hetero.workers._elastic import LOOPBACK, keep_gloo_here, open_store
from thrifty.hetero.workers._membership import from_bytes, to_bytes
from thrifty.pack import (
    TRAIN_LOSS,
    ArrayData,
    DatasetPair,
    EpochPlan,
    HyperParameters,
    Task,
    evaluate,
    open_source,
)
from thrifty.pack._quantized import settled
from thrifty.pack._state import seed_everything
from thrifty.pack.task._followed_optimizer import FollowedOptimizer
from thrifty.pack.task._task import Readings, check_usual_step


_TIMEOUT = timedelta(seconds=300)


class TrialWorker:
    """One process of a trial: the task's model, data and optimizer with thrifty's usual seeds."""

    def __init__(self, task: Task, begin: Mapping[str, Any]) -> None:
        values: Mapping[str, Any] = begin["values"]
        check_usual_step(task, where="HeteroTask")
        self._readings = Readings(type(task).__name__, values)
        self._task = task
        self._seed: int = begin["seed"]
        self._device = torch.device(begin["devices"][begin["rank"]])
        if self._device.type == "cuda" and self._device.index is not None:
            torch.cuda.set_device(self._device)  # what names no device means this one
        seed_everything(derive_seed(self._seed, "data"))
        data = task.data(self._readings.once("data"))
        self._source = open_source(data, device=self._device)
        seed_everything(derive_seed(self._seed, "model"))
        self._model = settled(task.model(self._readings.once("model")).to(self._device))
        self._followed = FollowedOptimizer(
            task.optimizer, dict(self._model.named_parameters()), values
        )
        if self._followed.clipping.value is not None:
            raise TaskError(
                f"HeteroTask cannot train {type(task).__name__}, because it clips gradients by "
                "value; use clip_norm"
            )
        self._readings.note_once("optimizer", self._followed.read_when_built)
        options: HeteroOptions = begin["options"]
        if options.stand_by is None:
            # The loop over reports is ours, so nothing in it can miss a worker that stands by.
            options = replace(options, stand_by=True)
        reduction, weight = pickle.loads(begin["objective"])
        size = task.batch_size
        if isinstance(size, str):
            self._readings.note_once("batch_size", {size})
        self._batch_size = int(values[size] if isinstance(size, str) else size)
        self._trainer = HeteroTrainer(
            self._model,
            self._followed.torch,
            _dataset(data),
            loss=task.loss,
            global_batch=self._batch_size,
            **_reading(data),
            seed=self._seed,
            reduction=reduction,
            weight=weight,
            options=options,
        )

    def epoch(self, epoch: int, values: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        """Train one epoch and evaluate.

        Returns:
            The steps that this process trained, fewer than all if it stood by, and its metrics.

        Raises:
            TaskError: A hyper-parameter that changes over time is read only once, and nothing
                follows it.
        """
        hp = HyperParameters(values)
        # What `adapt` draws must be equal on all workers.
        seed_everything(derive_seed(self._seed, "epoch", epoch))
        self._task.adapt(self._model, hp)
        self._followed.follow(values)
        self._readings.followed |= {*hp.names_read, *self._followed.names}
        self._readings.check_epoch(EpochPlan(epoch=epoch, values=values))
        if self._followed.clipping.norm is not None:
            self._trainer.clip_norm = self._followed.clipping.norm
        self._model.train()
        losses = [report.loss for report in self._trainer.run(epochs=epoch + 1)]
        if not losses:
            raise HeteroError(f"epoch {epoch} has been trained before")
        metrics = {TRAIN_LOSS: sum(losses) / len(losses), **self._evaluate(epoch)}
        return len(losses), metrics

    def state(self) -> bytes:
        """Return everything needed to resume."""
        data: bytes = to_bytes(self._trainer.state()).numpy().tobytes()
        return data

    def load_state(self, data: bytes) -> None:
        """Restore what ``state`` returned."""
        self._trainer.load_state(from_bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        self._followed.forget()

    def _evaluate(self, epoch: int) -> dict[str, float]:
        if dist.get_rank():
            return {}  # only the first worker evaluates
        seed = derive_seed(self._seed, "evaluate", epoch)
        return evaluate(self._task, self._model, source=self._source, seed=seed)


def main(arguments: list[str]) -> None:
    """Serve one trial until the connection closes."""
    connection = parent_of(arguments)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        return  # the study process is gone
    except BaseException as error:  # noqa: BLE001 (user code may raise anything, even SystemExit)
        lost = isinstance(error, PeerLostError | TooFewWorkersError)
        with contextlib.suppress(OSError):  # another worker's error may have ended the trial
            connection.send(("lost" if lost else "error", error_text(error)))


def _serve(connection: Connection) -> None:
    # Set the path before loading the task, so that its module is found as in the study's process.
    sys.path[:] = connection.recv()
    task: Task = pickle.loads(connection.recv())
    begin: dict[str, Any] = connection.recv()
    if begin["cores"] is not None:
        os.sched_setaffinity(0, begin["cores"])
        torch.set_num_threads(len(begin["cores"]))
    store = None
    if not begin["rank"]:
        store = open_store(LOOPBACK, timeout=_TIMEOUT)
        connection.send(("port", store.port))
    meeting = connection.recv()
    if store is None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK, meeting["port"], is_master=False, timeout=_TIMEOUT
        )
    keep_gloo_here()
    dist.init_process_group(
        "gloo", store=store, rank=begin["rank"], world_size=meeting["workers"], timeout=_TIMEOUT
    )
    worker = TrialWorker(task, begin)
    connection.send(("ready", None))
    while True:
        what, *about = connection.recv()
        if what == "epoch":
            connection.send(("done", worker.epoch(*about)))
        elif what == "get":
            connection.send(("state", worker.state()))
        else:
            worker.load_state(*about)
            connection.send(("loaded", None))


def _dataset(data: Any) -> Dataset[Any]:
    """Return the training set as a data set; ``open_source`` has already checked the data."""
    if isinstance(data, ArrayData):
        return TensorDataset(*data.train)
    if isinstance(data, DatasetPair):
        return data.train
    if isinstance(data, tuple):
        train: Dataset[Any] = data[0]
        return train
    raise HeteroError(
        f"a job of several workers trains on arrays or datasets, not on {type(data).__name__}: "
        "return th.ArrayData or a pair of datasets from Task.data"
    )


def _reading(data: Any) -> dict[str, Any]:
    """Return how the training set is read, as arguments of ``HeteroTrainer``."""
    options = data.loader if isinstance(data, DatasetPair) else {}
    if options.get("worker_init_fn") is not None and options.get("num_workers"):
        raise HeteroError(
            "HeteroTask reads samples in the processes that train, so worker_init_fn of the "
            "thrifty.DatasetPair would never be called; do in the data set's __init__ what it does"
        )
    return {name: options[name] for name in ("drop_last",) if name in options} | (
        {"collate": options["collate_fn"]} if options.get("collate_fn") else {}
    )


if __name__ == "__main__":
    main(sys.argv[1:])
