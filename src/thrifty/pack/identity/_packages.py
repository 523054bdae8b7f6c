"""Installed packages by name and version."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Iterable


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages, by the names of their distributions.

    Args:
        packages: The names by which they are imported, such as ``"sklearn"``.

    >>> list(versions(["torch"]))
    ['torch']
    """
    out: dict[str, str] = {}
    for package in sorted(set(packages)):
        out.update(_versions_of(package))
    return out


@functools.cache
def _versions_of(package: str) -> dict[str, str]:
    usual = _USUAL.get(package, package)  # most distributions are named like their package
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {usual: _plain(importlib.metadata.version(usual))}
    names = sorted(set(_distributions().get(package, ())))
    if not names:
        return {package: "unknown"}
    return {name: _plain(importlib.metadata.version(name)) for name in names}


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {k: list(v) for k, v in importlib.metadata.packages_distributions().items()}


def _plain(version: str) -> str:
    """Drop a build's device name: it changes no result that thrifty guarantees.

    >>> _plain("2.6.0+cu124"), _plain("1.0+mine")
    ('2.6.0', '1.0+mine')
    """
    return re.sub(r"\+(cpu|xpu|cu\d+|rocm[\d.]+)$", "", version)


_USUAL = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Well-known packages with other distribution names.

Looking them up takes a second where many packages are installed.
"""
