"""Writing a file, or a folder, in whole or not at all."""

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
