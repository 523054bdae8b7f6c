"""How many trials each worker should train at a time, as the study goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from thrifty.core import Calibrated, Event, PackShrunk, StoreUnreachableError, plain_logger
from thrifty.perf import PackCurve
from thrifty.plan import Chain, Measured, SearchPlan, pack_size
from thrifty.store import Store


logger = plain_logger(__name__)


class Packing:
    """The choice of a pack size from the measurements and memory limits of workers.

    Before the first measurement, a worker trains one trial. ``fixed_size`` is a size that the user
    has set and that replaces the computed one; ``known`` holds the keys of measurements that the
    store already has.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        fixed_size: int | None = None,
        memory_margin: float = 0.9,
        known: Collection[str] = (),
    ) -> None:
        self._num_workers = num_workers
        self._fixed_size = fixed_size
        self._known = set(known)
        self._margin = memory_margin
        self._measured: dict[str, Measured] = {}
        self._limit: int | None = None

    def on_event(self, event: Event, store: Store) -> None:
        """Record measurements and out-of-memory reductions of a pack."""
        if isinstance(event, Calibrated):
            self._measured[event.key] = Measured(
                curves=tuple(PackCurve.from_json(dict(c)) for c in event.curves),
                memory_bytes=event.memory_bytes,
            )
            if event.key not in self._known:
                self._known.add(event.key)
                _keep(event, store)
        elif isinstance(event, PackShrunk):
            self._limit = event.size if self._limit is None else min(self._limit, event.size)

    def size(self, plan: SearchPlan, running: Iterable[Chain]) -> int:
        """Return the number of trials that each worker trains at a time."""
        size = self._fixed_size
        if size is None:
            size = pack_size(
                plan,
                list(self._measured.values()),
                running=running,
                workers=self._num_workers,
                memory_margin=self._margin,
            )
        return size if self._limit is None else min(size, self._limit)


def _keep(event: Calibrated, store: Store) -> None:
    try:
        store.curves.put(
            event.key, device=event.device, structure=event.structure, curves=event.curves
        )
    except StoreUnreachableError as error:
        logger.warning("%s; another run will measure packs again", error)
