"""Epochs of a number of steps, and streams: those that resume exactly, and those that cannot."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

import thrifty as th
from bench.trust.case import normal
from bench.trust.moving import BATCH, PLAIN, Regression, batches_of, moving


STEPS = 3


def _regression(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(BATCH, 6, seed=seed)
    return x, x.sin().sum(1, keepdim=True)


def _held_out() -> list[Any]:
    return [_regression(999)]


class Streamed(Regression):
    """Base class of the tasks on streams."""

    steps_per_epoch = STEPS


# -- epochs of a number of steps ---------------------------------------------------------


def _within_passes(epoch: int) -> list[Any]:
    x = normal(96, 6, seed=5)[:64]
    train = (x, x.sin().sum(1, keepdim=True))
    passes = chain.from_iterable(batches_of(train, number, size=BATCH) for number in range(9))
    return list(islice(passes, epoch * STEPS, (epoch + 1) * STEPS))


@moving("E", loop=replace(PLAIN, batches=_within_passes))
def epochs_that_end_within_a_pass() -> type[th.Task]:
    return Streamed


@moving("E", refused="fixed value", rows=th.MultiStep([16, 8], milestones=[2]))
def batch_size_that_moves_where_steps_are_counted() -> type[th.Task]:
    class Mine(Streamed):
        batch_size = "rows"

    return Mine


# -- streams that resume -----------------------------------------------------------------


def _of_epoch(epoch: int) -> list[Any]:
    return [_regression(100 * epoch + step) for step in range(STEPS)]


@moving("E", loop=replace(PLAIN, batches=_of_epoch, valid=lambda: _held_out()[0]))
def stream_from_a_function() -> type[th.Task]:
    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            def train(seed: int, epoch: int) -> Iterator[Any]:
                return (_regression(100 * epoch + step) for step in itertools.count())

            return th.StreamData(train=train, valid=_held_out)

    return Mine


@moving("E", loop=replace(PLAIN, batches=_of_epoch, valid=lambda: _held_out()[0]))
def stream_from_a_function_read_in_advance() -> type[th.Task]:
    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            def train(seed: int, epoch: int) -> Iterator[Any]:
                return (_regression(100 * epoch + step) for step in itertools.count())

            return th.StreamData(train=train, valid=_held_out, prefetch=2)

    return Mine


class Rows(IterableDataset[Any]):
    """Samples one after the other, in passes of ``num``, and the position among them."""

    def __init__(self, num: int = 40) -> None:
        self.num = num
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.num:
            self.at += 1
            x = normal(6, seed=self.at)
            yield x, x.sin().sum(0, keepdim=True)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def _of_rows(epoch: int) -> list[Any]:
    x = torch.stack([normal(6, seed=at) for at in range(1, 41)])
    one = [part.clone() for part in x.split(BATCH)]
    batches = [(each, each.sin().sum(1, keepdim=True)) for each in one]
    return list(islice(itertools.cycle(batches), epoch * STEPS, (epoch + 1) * STEPS))


SHARED = Rows()


@moving("E", loop=replace(PLAIN, batches=_of_rows, valid=lambda: _held_out()[0]))
def one_stream_with_a_state_for_all_trials() -> type[th.Task]:
    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            return th.StreamData(train=SHARED, valid=_held_out)

    return Mine


# -- streams that cannot ------------------------------------------------------------------


@moving("E", refused="no state_dict and load_state_dict")
def stream_without_a_state() -> type[th.Task]:
    class Stateless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (_regression(step) for step in itertools.count())

    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            return th.StreamData(train=Stateless(), valid=_held_out)

    return Mine


class Forgetful(Rows):
    """It saves where it is, and begins anew."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = 0


@moving("E", refused="goes on differently when it is restored")
def stream_whose_state_is_not_all() -> type[th.Task]:
    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            return th.StreamData(train=Forgetful(), valid=_held_out)

    return Mine


@moving("E", refused="other batches")
def stream_that_counts_its_readings() -> type[th.Task]:
    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            count = itertools.count()

            def train(seed: int, epoch: int) -> Iterator[Any]:
                return (_regression(next(count)) for _ in itertools.count())

            return th.StreamData(train=train, valid=_held_out)

    return Mine


@moving("E", refused="other batches than before")
def validation_that_changes() -> type[th.Task]:
    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            count = itertools.count()

            def train(seed: int, epoch: int) -> Iterator[Any]:
                return (_regression(100 * epoch + step) for step in itertools.count())

            def valid() -> list[Any]:
                return [_regression(1), _regression(next(count))]

            return th.StreamData(train=train, valid=valid)

    return Mine


@moving("E", refused="ended after 2 batches")
def stream_that_ends_within_an_epoch() -> type[th.Task]:
    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            return th.StreamData(
                train=lambda seed, epoch: [_regression(2 * epoch + n) for n in range(2)],
                valid=_held_out,
            )

    return Mine


@moving("E", refused="make it an attribute of the task")
def token_file_that_the_identity_does_not_see() -> type[th.Task]:
    path = Path(tempfile.mkdtemp()) / "tokens.bin"
    np.arange(200, dtype=np.uint16).tofile(path)

    class Mine(Streamed):
        def data(self, hp: th.HyperParameters) -> Any:
            file = th.TokenFile(path, block_size=6)
            return th.StreamData(train=file, valid=file)

    return Mine
