"""Writing a file, or a folder, in whole or not at all; sizes as text."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


_NUMBERS = itertools.count()


@contextmanager
def replacing(path: Path, *, suffix: str = ".tmp") -> Iterator[Path]:
    """Give a new name beside a path to write to, and move what is written there in the end.

    So a full disk or a kill leaves no half of a file: a path holds all of the new content, or what
    it held before. Where the path is a device or a pipe, such as ``/dev/stdout``, it is given
    itself.

    Args:
        path: The file, or a folder that does not exist yet.
        suffix: Ending of the new name.

    Raises:
        OSError: It cannot be put in place.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder) / "table.csv"
    ...     with replacing(table) as new:
    ...         _ = new.write_text("1, 2")
    ...     table.read_text(), len(list(Path(folder).iterdir()))
    ('1, 2', 1)
    """
    path = path.resolve()  # a link keeps its target
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    new = path.with_name(f".{path.name}.{os.getpid()}-{next(_NUMBERS)}{suffix}")
    try:
        yield new
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
        raise


def size_text(num_bytes: float) -> str:
    """Return a number of bytes as readable text.

    >>> size_text(900), size_text(3 * 2**20), size_text(1.5 * 2**30)
    ('0.9 KiB', '3.0 MiB', '1.5 GiB')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"
