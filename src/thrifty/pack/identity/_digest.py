"""Digests of text and bytes."""

from __future__ import annotations

import hashlib


def digest(*parts: str | bytes) -> str:
    """Return a digest of some parts in order, which also depends on where each part ends.

    >>> digest("a", "b") == digest("ab")
    False
    """
    out = hashlib.blake2b(digest_size=12)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        out.update(b"%d:" % len(data))
        out.update(data)
    return out.hexdigest()
