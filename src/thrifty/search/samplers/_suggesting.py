"""Base of samplers that use other libraries: random at first, then one suggestion at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from thrifty.core import (
    AlgorithmError,
    require,
)
from thrifty.search._arguments import check_counts
from thrifty.search._history import History
from thrifty.space import Config, Space

from ._prefix import Picker
from ._sampler import Sampler


_NUM_TRIES = 5


class Source(Protocol):
    """Model that has seen the history."""

    def suggest(self) -> dict[str, Any]:
        """Return a configuration worth trying."""

    def note(self, config: Config) -> None:
        """Record that a configuration will be tried, so that the next suggestion differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestingSampler(Sampler):
    """Sampler that asks a source for untried configurations.

    The first ``num_startup`` trials are random.
    """

    adapts: ClassVar[bool] = True
    num_startup: int = 10
    share: int = 0

    @abstractmethod
    def check(self) -> None:
        """Raise AlgorithmError if an option is out of range."""

    @abstractmethod
    def source(self, history: History, space: Space, rng: np.random.Generator) -> Source | None:
        """Return the model, or None as long as there is not enough to learn from."""

    def __post_init__(self) -> None:
        check_counts(self, num_startup=self.num_startup)
        if isinstance(self.share, bool) or not isinstance(self.share, int) or self.share < 0:
            raise AlgorithmError(
                f"{type(self).__name__}(share={self.share!r}): share must be the number of "
                "further suggestions "
                "to choose from, 0 or more"
            )
        self.check()

    def sample(
        self,
        history: History,
        space: Space,
        *,
        num: int,
        rng: np.random.Generator,
    ) -> Sequence[Mapping[str, Any]]:
        """Draw configurations."""
        source = self.source(history, space, rng)
        picker = Picker(history, share=float(self.share > 0))
        configs: list[Mapping[str, Any]] = []
        for _ in range(num):
            config = self._new(source, picker) if source else None
            if config is None:
                config = picker.draw(space, rng)
            if source:
                source.note(config)
            configs.append(config)
        return configs

    def _new(self, source: Source, picker: Picker) -> dict[str, Any] | None:
        """Return the suggestion that shares most training; None if only tried ones come up."""
        for _ in range(_NUM_TRIES):
            suggested = [source.suggest() for _ in range(1 + self.share)]
            # The source gives no acquisition values.
            picked = picker.pick(np.zeros(len(suggested)), suggested.__getitem__)
            if picked is not None:
                return picked[1]
        return None


def load(package: str) -> ModuleType:
    """Import an optional package when it is needed.

    Raises:
        MissingExtraError: it is not installed.
    """
    module: ModuleType = require(package, extra="search")
    return module
