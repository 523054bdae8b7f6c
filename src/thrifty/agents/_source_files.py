"""The studies that files define, loaded again when the files, or what they import, have changed."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import thrifty
from thrifty.core import UsageError
from thrifty.study import Study


_NOT_THE_USERS = tuple(
    f"{Path(folder).resolve()}/"
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *thrifty.__path__,
    }
)


_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also of environments beside the user's files."""


class Studies:
    """The studies of some files. A file is run when one of its studies is first asked for.

    Args:
        files: The files, which the user has named.
        load: Returns the studies that a file defines.
        storage: Address of a database to use instead of that of the studies; None for theirs.
    """

    def __init__(
        self,
        files: Sequence[Path],
        *,
        load: Callable[[Path], Sequence[Study]],
        storage: str | None = None,
    ) -> None:
        self._files = tuple(files)
        self._load = load
        self._storage = storage
        self._studies: dict[str, tuple[Path, Study]] | None = None
        self._sources: Mapping[str, tuple[Path, object]] = {}

    @property
    def all(self) -> Mapping[str, tuple[Path, Study]]:
        """The studies by name, each with its file.

        Raises:
            UsageError: A file cannot be loaded, or two define studies of one name.
        """
        if self._studies is not None and any(
            _stamp(file) != stamp for file, stamp in self._sources.values()
        ):
            self._forget()
        if self._studies is None:
            before = dict(sys.modules)
            try:
                self._studies = self._loaded()
            finally:
                self._sources = self._modules(before)
                if self._studies is None:
                    self._forget()  # once it is mended, all of it is imported again
        return self._studies

    def _loaded(self) -> dict[str, tuple[Path, Study]]:
        found: dict[str, tuple[Path, Study]] = {}
        for file in self._files:
            for study in self._load(file):
                if study.name in found:
                    other, _ = found[study.name]
                    raise UsageError(
                        f"{other} and {file} both define study {study.name!r}; rename one"
                    )
                if self._storage is not None:
                    study.storage = replace(study.storage, url=self._storage)
                found[study.name] = (file, study)
        return found

    @staticmethod
    def _modules(before: Mapping[str, object]) -> Mapping[str, tuple[Path, object]]:
        """Return the user's modules that were imported since, by name.

        Each has its file, with a stamp that changes when the file does.
        """
        found = {}
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if path is None:
                continue
            file = Path(path).resolve()
            is_installed = str(file).startswith(_NOT_THE_USERS) or _INSTALLED & set(file.parts)
            if before.get(name) is not module and not is_installed:
                found[name] = (file, _stamp(file))
        return found

    def _forget(self) -> None:
        """Forget the modules of the user, so that they are imported again."""
        for name in self._sources:
            sys.modules.pop(name, None)
        self._studies, self._sources = None, {}
        linecache.checkcache()

    def get(self, name: str) -> tuple[Path, Study]:
        """Return a study and its file.

        Raises:
            UsageError: No file defines such a study.
        """
        found = self.all.get(name)
        if found is None:
            known = ", ".join(self.all) or "none"
            raise UsageError(f"no file of this server defines study {name!r}; they define: {known}")
        return found

    def urls(self, default: str) -> list[str]:
        """Return the addresses of all databases.

        Args:
            default: The address to use without any file and any option.
        """
        if self._storage is not None:
            return [self._storage]
        found = dict.fromkeys(study.storage.url for _, study in self.all.values())
        return list(found) or [default]


def _stamp(file: Path) -> object:
    with suppress(OSError):
        found = file.stat()
        return found.st_mtime_ns, found.st_size
    return None
