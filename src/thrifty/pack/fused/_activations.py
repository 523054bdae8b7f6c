"""Activations of frozen trunks, kept by sample across steps, epochs, trials and studies.

They are kept in memory first, then in a folder that later processes find again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakSet, ref

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from thrifty.core import plain_logger
from thrifty.core._files import replacing
from thrifty.pack._frozen import digest_of
from thrifty.pack.task._data_contents import Samples
from thrifty.pack.verify import relative_tolerance, rounds_to_tf32

from ._structure import Variant
from ._tape import Tape
from ._trunk import Cut, CutValue


logger = plain_logger(__name__)


_CGROUP = "/sys/fs/cgroup/memory."

MEMORY_SHARE = 0.25
"""The share of the memory that is free at first use which kept activations may take."""
SMALLEST = 1e-30
"""The least magnitude assumed for activations when they are compared."""


class Activations:
    """The values at one cut for the samples of one data set.

    Attributes:
        num_kept: How many samples have values so far.
        failure: Why the values must not be used; "" if nothing speaks against them.
        is_proven: Whether kept values have been compared with values computed anew.
        is_dropped: Whether they have been freed.
        users: The programs that use them; while one of them is active, they are not evicted.
    """

    def __init__(
        self,
        values: Sequence[CutValue],
        *,
        num: int,
        device: torch.device,
        on_complete: Callable[[Sequence[torch.Tensor]], None] = lambda _: None,
    ) -> None:
        self._values = tuple(values)
        self._rows = [
            torch.empty((num, *value.shape), dtype=value.dtype, device=device) for value in values
        ]
        self._has = torch.zeros(num, dtype=torch.bool, device=device)
        self._compared = torch.zeros_like(self._has)
        self._on_complete = on_complete
        self.num_kept = 0
        self.failure = ""
        self.is_proven = False
        self.is_dropped = False
        self.users: WeakSet[ActivationUser] = WeakSet()

    @property
    def num_bytes(self) -> int:
        """Bytes of the values of all samples."""
        return sum(rows.numel() * rows.element_size() for rows in self._rows)

    @property
    def is_complete(self) -> bool:
        """Whether all samples have values."""
        return self.num_kept == len(self._has)

    def fill(self, rows: Sequence[torch.Tensor]) -> None:
        """Take over the values of all samples, as ``on_complete`` was given them."""
        for own, given in zip(self._rows, rows, strict=True):
            own.copy_(given)
        self._has[:] = True
        self.num_kept = len(self._has)

    def have(self, index: torch.Tensor) -> bool:
        """Return whether some samples all have values."""
        return self.is_complete or (self.num_kept >= len(index) and bool(self._has[index].all()))

    def save(self, index: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Keep the values of some samples; ``values`` are those at the cut for the whole batch."""
        if self.is_complete:
            return
        for rows, value, whole in zip(self._rows, self._values, values, strict=True):
            rows[index] = value.by_sample(whole)
        self._has[index] = True
        self.num_kept = int(self._has.sum())
        if self.is_complete:
            self._on_complete(self._rows)

    def load(self, index: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Write the kept values of some samples to where the head reads them."""
        for rows, value, whole in zip(self._rows, self._values, values, strict=True):
            target = value.by_sample(whole)
            if target.is_contiguous():
                torch.index_select(rows, 0, index, out=target)
            else:
                target.copy_(rows[index])

    def agree(self, index: torch.Tensor, values: Sequence[torch.Tensor]) -> bool:
        """Return whether kept values are those just computed, up to rounding."""
        self._compared[index] = True
        return all(
            _agree(rows[index], value.by_sample(whole))
            for rows, value, whole in zip(self._rows, self._values, values, strict=True)
        )

    def were_compared(self, index: torch.Tensor) -> bool:
        """Return whether the values of some samples have all been compared with new ones."""
        return bool(self._compared[index].all())

    def fail(self, reason: str) -> None:
        """Never use these values again."""
        if not self.failure:
            self.failure = reason
            logger.warning("activations of a frozen trunk are computed again: %s", reason)
            self.drop()

    def drop(self) -> None:
        """Free the memory; nothing is kept or read from now on."""
        self.is_dropped = True
        self._rows = []


def _agree(kept: torch.Tensor, fresh: torch.Tensor) -> bool:
    if not fresh.dtype.is_floating_point:
        return torch.equal(fresh, kept)
    tolerance = relative_tolerance(
        fresh.dtype, num_terms=fresh.numel(), tf32=rounds_to_tf32([fresh])
    )
    finite = fresh[fresh.isfinite()]  # a mask may hold infinities, relative to which all is small
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, SMALLEST)
    return torch.allclose(kept, fresh, rtol=0.0, atol=tolerance * scale, equal_nan=True)


class ActivationUser:
    """An object that uses kept activations.

    Attributes:
        is_active: Whether it is going to use them again.
    """

    is_active = False


Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewlyKept:
    """A forecast of what it takes and saves to keep activations, made before the first is kept.

    The fields are those of ``thrifty.core.ActivationsKept``.
    """

    num_samples: int
    num_bytes: int
    saved: float
    is_training: bool


class ActivationStore:
    """Activations of frozen trunks, by the content of trunk and data.

    Args:
        limit_bytes: The most bytes of memory that they may take (default: a quarter of what is free
            when they are first kept); 0 keeps none.
        folder: A folder that also has them, for later processes (default: none).
    """

    def __init__(
        self, *, limit_bytes: int | None = None, folder: ActivationFolder | None = None
    ) -> None:
        self._limit_bytes = limit_bytes
        self._folder = folder
        self._kept: OrderedDict[Key, Activations] = OrderedDict()
        self._news: list[NewlyKept] = []

    def take_news(self) -> list[NewlyKept]:
        """Return what is kept since the last call."""
        news, self._news = self._news, []
        return news

    def configure(self, *, limit_bytes: int | None, folder: ActivationFolder | None) -> None:
        """Set what the constructor takes, for what is kept from now on."""
        self._limit_bytes, self._folder = limit_bytes, folder

    def shrink(self) -> None:
        """Free what is kept, and keep half as much from now on; call it if memory ran out."""
        self._limit_bytes = self.num_bytes // 2
        for kept in self._kept.values():
            kept.drop()
        self._kept.clear()

    @property
    def is_on(self) -> bool:
        """Whether anything may be kept."""
        return self._limit_bytes != 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are set aside."""
        return sum(each.num_bytes for each in self._kept.values())

    def open(
        self,
        key: Key,
        cut: Cut,
        *,
        variant: Variant,
        num: int,
        device: torch.device,
        user: ActivationUser,
    ) -> Activations | None:
        """Return the activations of a key, new ones if there are none.

        Args:
            key: The content of the trunk and of the data.
            cut: The trunk and the values at the cut.
            variant: The variant of the program that was cut.
            num: Number of samples.
            device: Where they are kept.
            user: Who is going to use them.

        Returns:
            The activations, or None if they may not be used or would not fit beside those in use.
        """
        found = self._kept.get(key)
        if found is None:
            found = self._new(key, cut.values, num=num, device=device)
            if found is not None:
                news = NewlyKept(
                    num_samples=num,
                    num_bytes=found.num_bytes,
                    saved=cut.saved(variant.size),
                    is_training=variant.training,
                )
                self._news.append(news)
        if found is None or found.failure:
            return None
        self._kept.move_to_end(key)
        found.users.add(user)
        return found

    def _new(
        self, key: Key, values: Sequence[CutValue], *, num: int, device: torch.device
    ) -> Activations | None:
        """Return activations of a key that memory does not hold; None if they do not fit."""
        if not self._has_room(num * sum(value.sample_bytes for value in values), device):
            return None
        folder = self._folder
        found = Activations(
            values,
            num=num,
            device=device,
            on_complete=_ignore if folder is None else partial(folder.write, key),
        )
        rows = None if folder is None else folder.read(key)
        if rows is not None:
            try:
                found.fill(rows)
            except (ValueError, RuntimeError) as error:  # other shapes
                logger.warning("kept activations do not fit, and are computed again: %s", error)
        self._kept[key] = found
        return found

    def _has_room(self, num_bytes: int, device: torch.device) -> bool:
        """Return whether something fits, after evicting what was not used for the longest time."""
        if self._limit_bytes is None:
            self._limit_bytes = int(MEMORY_SHARE * free_memory(device))
        idle = [key for key, each in self._kept.items() if not any(u.is_active for u in each.users)]
        busy_bytes = sum(each.num_bytes for key, each in self._kept.items() if key not in idle)
        if busy_bytes + num_bytes > self._limit_bytes:
            return False
        while self.num_bytes + num_bytes > self._limit_bytes:
            del self._kept[idle.pop(0)]
        return True


def _ignore(_: object) -> None:
    return


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on a device, within the limit of a container."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, KeyError, ValueError):
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024.0 * float(known["MemAvailable"].split()[0])
    with suppress(OSError, ValueError):
        limit, used = (int(Path(_CGROUP + name).read_text()) for name in ("max", "current"))
        free = min(free, float(limit - used))
    return free


class KeptTrunk:
    """A bound trunk whose results are kept by sample.

    Args:
        cut: The program that it is a part of, cut in two.
        tape: The trunk; it leaves its results in ``values``.
        values: Where the head reads the results.
        activations: The results kept so far.
        samples: The samples that they belong to; only a weak reference is kept.
        once: Whether each result is compared once and not at each check: of an evaluation, the
            metrics are compared, too.

    Attributes:
        was_used: Whether kept results have gone into a step or an evaluation.
        head_elements: Elements of the largest value of the head, for each sample of a batch.
    """

    def __init__(
        self,
        cut: Cut,
        tape: Tape,
        values: Sequence[torch.Tensor],
        *,
        activations: Activations,
        samples: Samples,
        once: bool,
    ) -> None:
        self._once = once
        self._head_reads = cut.head_reads
        self.head_elements = cut.head_elements
        self._tape = tape
        self._values = tuple(values)
        self.activations = activations
        self.samples = ref(samples)
        self.was_used = False
        self._index: torch.Tensor | None = None
        self._verify = self._loads = False

    @property
    def is_doubtful(self) -> bool:
        """Whether results were used that must not be."""
        return self.was_used and bool(self.activations.failure)

    def begin(
        self, samples: Samples, index: torch.Tensor | None, *, verify: bool
    ) -> frozenset[int] | None:
        """Choose how the next run gets its results.

        Args:
            samples: The samples that the batch is taken from.
            index: Which of them; None if that is not known.
            verify: Whether to compare kept results with new ones.

        Returns:
            The inputs that have to be in; None for all of them.
        """
        kept = self.activations
        known = self.samples()
        is_known = (
            known is not None
            and not kept.is_dropped
            and all(one is other for one, other in zip(samples.arrays, known.arrays, strict=True))
        )
        self._index = index if is_known else None
        has_all = self._index is not None and kept.have(self._index)
        if self._once and has_all and verify:
            assert self._index is not None
            verify = not kept.were_compared(self._index)
        self._verify = has_all and (verify or not kept.is_proven)
        self._loads = has_all and not self._verify
        return self._head_reads if self._loads else None

    def run(self) -> None:
        """Put the results where the head reads them."""
        kept, index = self.activations, self._index
        if self._loads and index is not None:
            self.was_used = True
            kept.load(index, self._values)
            return
        self._tape.run()
        if index is None:
            return
        if not self._verify:
            kept.save(index, self._values)
        elif kept.agree(index, self._values):
            kept.is_proven = True
            kept.load(index, self._values)
        else:
            kept.fail("kept values differ from new ones by more than rounding")


_STORES: dict[torch.device, ActivationStore] = {}


def activation_store(device: torch.device | str) -> ActivationStore:
    """Return the activations that this process keeps on a device."""
    return _STORES.setdefault(torch.device(device), ActivationStore())


ACTIVATION_DISK = 2**31
"""The most bytes of files with activations, unless another limit is given."""


def keep_activations(
    device: torch.device | str,
    *,
    memory_bytes: int | None = None,
    folder: Path | None = None,
    disk_bytes: int = ACTIVATION_DISK,
) -> ActivationStore:
    """Say how much this process keeps of frozen trunks' activations on a device, and where.

    Args:
        device: The device.
        memory_bytes: The most bytes of memory (default: a quarter of what is free when they are
            first kept); 0 keeps none.
        folder: A folder for files that later processes read (default: none).
        disk_bytes: The most bytes that these files may take; 0 writes none.

    Returns:
        The activations.
    """
    store = activation_store(device)
    files = ActivationFolder(folder, limit_bytes=disk_bytes) if folder and disk_bytes else None
    store.configure(limit_bytes=memory_bytes, folder=files)
    return store


# -- activations in files --------------------------------------------------------------------------


TEMPORARY = ".tmp"
STALE_S = 3600.0
"""The age in seconds from which a file that is still being written counts as abandoned."""


class ActivationFolder:
    """A folder of safetensors files, one for each content of trunk and data.

    Nothing that goes wrong here is an error: what cannot be read is computed again, and what cannot
    be written is not kept.

    Args:
        path: The folder, which is made when something is first written.
        limit_bytes: The most bytes that its files may take; the oldest are removed first.
    """

    def __init__(self, path: Path, *, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._has_failed = False

    def read(self, key: Sequence[str]) -> list[torch.Tensor] | None:
        """Return the rows that were written under a key; None if there are none or not intact."""
        path = self._file(key)
        try:
            with safe_open(path, framework="pt") as file:
                meta = json.loads(file.metadata()["thrifty"])
                rows = [file.get_tensor(str(n)) for n in range(len(meta["digests"]))]
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            logger.warning("%s is computed again, because it cannot be read: %s", path, error)
            return None
        if meta["key"] != list(key) or meta["digests"] != [digest_of(each) for each in rows]:
            logger.warning("%s is computed again, because it is damaged", path)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used last
        return rows

    def write(self, key: Sequence[str], rows: Sequence[torch.Tensor]) -> None:
        """Write rows atomically, and remove old files beyond the limit."""
        path = self._file(key)
        if self._has_failed or not self._make_room(sum(r.numel() * r.itemsize for r in rows)):
            return
        tensors = {str(n): each.detach().cpu().contiguous() for n, each in enumerate(rows)}
        meta = {"key": list(key), "digests": [digest_of(each) for each in tensors.values()]}
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with replacing(path, suffix=TEMPORARY) as new:
                save_file(tensors, new, metadata={"thrifty": json.dumps(meta)})
        except (OSError, SafetensorError) as error:
            self._has_failed = True
            logger.warning("activations are kept in memory only: %s", error)

    def _file(self, key: Sequence[str]) -> Path:
        digest = hashlib.blake2b(json.dumps(list(key)).encode(), digest_size=16)
        return self._path / f"{digest.hexdigest()}.safetensors"

    def _make_room(self, num_bytes: int) -> bool:
        """Remove the oldest files until a new one fits; return whether it can fit."""
        if num_bytes > self._limit_bytes:
            return False
        found: list[tuple[float, int, Path]] = []
        with suppress(OSError):
            for path in self._path.iterdir():
                stat = path.stat()
                if path.suffix == TEMPORARY and stat.st_mtime < time.time() - STALE_S:
                    path.unlink()
                elif path.suffix == ".safetensors":
                    found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + num_bytes <= self._limit_bytes:
                break
            with suppress(OSError):
                path.unlink()
            total -= size
        return True
