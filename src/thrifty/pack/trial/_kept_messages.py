"""Messages about values that are made once for several trials."""

from __future__ import annotations

from collections.abc import Sequence


def drawn_once(name: str, kept: Sequence[str]) -> str:
    """Return a message about random numbers that are drawn for one trial and kept for others."""
    return (
        f"{name} keeps random numbers that it has drawn for one trial (in {_listed(kept)}), so the "
        "results of a trial would depend on the trials before it in the same process; draw what "
        "is made only once from a generator with a seed of its own, such as "
        "torch.Generator().manual_seed(0), or make it anew for each trial"
    )


def shifted(name: str, kept: Sequence[str], *, what: str) -> str:
    """Return a message about values that depend on whether something was kept before.

    Args:
        name: The code that makes them.
        kept: The names of what it keeps.
        what: The name of a value that depends on it.
    """
    return (
        f"{name} makes another {what!r} if {_listed(kept)} was filled before: the code that fills "
        "it draws from or seeds the global random streams, so what comes after it depends on the "
        "trials before it in the same process; wrap that code in torch.random.fork_rng(), give it "
        "a generator of its own, or fill it before the study, when its module is imported"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5]))
