"""Trust: user code that tries to break sharing, packed and in studies, against plain PyTorch loops.

    python -m bench.bench_trust [--quick] [--show] [--every N] [--through WAY]

- Each case of the corpus runs through ``thrifty.pack`` and through a study for each way of
  packing, in which trials share stages. Beside it runs the loop that one would write without
  thrifty. Each run has a process of its own. ``measured`` is ``fused`` with packs that an earlier
  study has measured and found good: nothing is tried on copies before trials are packed.
- Tasks that move hyper-parameters (C), keep state of their own (D) and group parameters (E) run
  in the same studies.
- Random edits of a small project show their effect on a task's identity (B).

A *silent deviation* is a result that differs from the plain loop's and was not refused. A *crash*
is an error that plain PyTorch does not raise and that does not say what to do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.common.harness import Goal, at_least, at_most, equal, finish, parser, table
from bench.trust.cases import CORPUS, MOVING
from bench.trust.mutations import run as run_mutations
from bench.trust.packed import Verdict, run_packed
from bench.trust.studied import MEASURED, run_moving, run_studied


FUNCTION = "thrifty.pack"
PACKS = ("auto", "fused", MEASURED, "concatenated", "solo")
NUM_EDITS = 200
QUICK = 12
"""Stride over the cases in a smoke run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: a case through ``thrifty.pack``, or a case or a task through a study."""

    kind: str
    name: str
    pack: str = ""


def jobs(*, every: int) -> Iterator[Job]:
    """Yield all runs, or every ``every``-th one."""
    for name in list(CORPUS)[::every]:
        yield Job(kind="pack", name=name)
    for name in [n for n, named in CORPUS.items() if named.in_study][::every]:
        for pack in PACKS:
            yield Job(kind="study", name=name, pack=pack)
    for name in list(MOVING)[::every]:
        for pack in PACKS:
            yield Job(kind="task", name=name, pack=pack)


def judge(job: Job) -> Verdict:
    """Run a job in a process of its own."""
    torch.set_num_threads(1)
    if job.kind == "pack":
        return run_packed(CORPUS[job.name])
    if job.kind == "study":
        return run_studied(CORPUS[job.name], pack=job.pack)
    return run_moving(MOVING[job.name], pack=job.pack)


def run_all(every: int, *, through: str | None, processes: int) -> list[tuple[Job, Verdict]]:
    """Run all jobs, each in a fresh process, because cases change globals and patch torch."""
    todo = [job for job in jobs(every=every) if through in (None, job.pack or FUNCTION)]
    # Fork, so that torch is imported once; nothing has computed here before.
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        return list(zip(todo, pool.imap(judge, todo, chunksize=1), strict=True))


def summary(found: Sequence[tuple[Job, Verdict]]) -> list[dict[str, Any]]:
    """Return a row for each way of sharing."""
    rows = []
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for job, verdict in found:
        groups.setdefault((job.kind, job.pack), []).append(verdict)
    for (kind, pack), verdicts in groups.items():
        counts = Counter(v.how for v in verdicts)
        rows.append({
            "through": FUNCTION if kind == "pack" else f"a study, pack={pack!r}",
            "cases": "A" if kind != "task" else "C, D, E",
            "runs": len(verdicts),
            "fused": counts["fused"] if kind == "pack" else None,
            "in turn": counts["in turn"] if kind == "pack" else None,
            "trained": counts["trained"] if kind != "pack" else None,
            "refused": counts["refused"],
            "plain fails, too": counts["plain fails, too"],
            "silent deviations": sum(v.is_silent_deviation for v in verdicts),
            "crashes": sum(v.is_crash for v in verdicts),
        })
    return rows


def show(found: Sequence[tuple[Job, Verdict]]) -> None:
    """Print each run of the corpus."""
    table([
        {
            "case": job.name,
            "through": job.pack or FUNCTION,
            "how": v.how,
            "deviation": f"{v.deviation:.0e}",
            "why": v.why[:90],
        }
        for job, v in found
    ])
    print()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--show", action="store_true", help="print a row for each run")
    arguments.add_argument("--every", type=int, default=1, help="take each so manieth case")
    arguments.add_argument("--through", choices=[FUNCTION, *PACKS], help="one way only")
    arguments.add_argument("--processes", type=int, default=2, help="runs at a time")
    options = arguments.parse_args()
    began = time.perf_counter()
    every = QUICK if options.quick else options.every
    found = run_all(every, through=options.through, processes=options.processes)
    if options.show:
        show(found)
    rows = summary(found)
    table(rows)
    print()
    mutations = run_mutations(edits=20 if options.quick else NUM_EDITS)
    table([{k: v for k, v in mutations.items() if k != "wrong"}])
    bad = [(job, v) for job, v in found if v.is_silent_deviation or v.is_crash]
    for job, v in bad:
        print(
            f"WRONG: {job.name} through {job.pack or FUNCTION}: {v.how}, {v.deviation:.1e}, {v.why}"
        )
    figures = {
        "runs": rows,
        "mutations": mutations,
        "wrong": [{**asdict(job), **asdict(v)} for job, v in bad],
        "how": {f"{job.name}/{job.pack or 'pack'}": v.how for job, v in found},
        "seconds": time.perf_counter() - began,
    }
    finish("trust", figures, goals(found, mutations))


def goals(found: Sequence[tuple[Job, Verdict]], mutations: dict[str, Any]) -> list[Goal]:
    """Return the goals of the corpus."""
    packed = {job.name: v for job, v in found if job.kind == "pack"}
    adversarial = sum(CORPUS[name].adversarial for name in packed)
    rightly_fused = [name for name in packed if CORPUS[name].fuses]
    right = [
        equal("silent deviations", sum(v.is_silent_deviation for _, v in found), 0),
        equal("crashes", sum(v.is_crash for _, v in found), 0),
    ]
    if not packed:
        return right
    return [
        at_least("cases and tasks", len({job.name for job, _ in found}), 120),
        at_least("share of cases that are adversarial", adversarial / len(packed), 0.5),
        *right,
        equal(
            "models that should be fused and are not",
            sum(packed[name].how != "fused" for name in rightly_fused),
            0,
        ),
        equal("false reuse after an edit", mutations["false_reuse"], 0),
        at_most("retraining for edits that change nothing", mutations["needless"], 0),
    ]


if __name__ == "__main__":
    main()
