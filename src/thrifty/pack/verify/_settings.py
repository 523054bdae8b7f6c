"""Process-wide settings that change what code computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thrifty.pack.identity import MISSING, Place


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Settings:
    """Settings by the name of the function that reads them, read and written like places.

    >>> SETTINGS.get("torch.get_default_dtype()")
    torch.float32
    """

    def __init__(self) -> None:
        self._known = {
            "torch.get_default_dtype()": _Setting(
                torch.get_default_dtype, torch.set_default_dtype
            ),
            "torch.get_default_device()": _Setting(
                torch.get_default_device, torch.set_default_device
            ),
            "torch.get_float32_matmul_precision()": _Setting(
                torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
            ),
            "torch.are_deterministic_algorithms_enabled()": _Setting(
                torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
            ),
            "os.getcwd()": _Setting(_folder, _go_to),
        }

    def get(self, name: str, default: Any = MISSING) -> Any:
        """Return the value of a setting."""
        known = self._known.get(name)
        return default if known is None else known.read()

    def __setitem__(self, name: str, value: Any) -> None:
        setting = self._known[name]
        # write only a change: some settings have a cost, such as a default device for each call
        if setting.read() != value:
            setting.write(value)

    def places(self) -> Iterator[Place]:
        """Yield a place for each setting."""
        for name in self._known:
            yield Place(name=name, kind="item", holder=self, key=name)


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # the folder was removed
        return None


def _go_to(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


SETTINGS = Settings()
