"""Location of the benchmarks' data: outside of the repository, and never downloaded."""

from __future__ import annotations

import os
from pathlib import Path


def data_folder() -> Path:
    """Return the folder that ``THRIFTY_DATA`` names, or ``shared/data`` beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("THRIFTY_DATA", default))
