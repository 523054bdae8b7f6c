"""A GPU and processors of one machine train one network together, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.common.harness import Part, at_least, at_most, equal, table
from bench.common.processes import free_port, member


_LIMIT_S = 100.0
"""Seconds that the workers may take; then what they have said so far is reported."""


def mixed(
    *, quick: bool, device: str, cpu_workers: int = 1, networks: Sequence[str] = ("CNN", "MLP")
) -> Part:
    """Compare a GPU with processors, evenly and unevenly, with the GPU alone.

    With ``device="cpu"``, a process of one thread stands in for the GPU.
    """
    first = "cuda:0" if device == "cuda" else device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    # One core is left for the process that launches the GPU's kernels.
    threads = max(1, (cores - 1) // cpu_workers)
    devices = [first, *["cpu"] * cpu_workers]
    names = list(networks)[: 1 if quick else None]
    batch, steps, answer = (64, 9, 3) if quick else (2048, 40, 8)
    lines, errors = _run(devices, {
        "networks": names, "batch": batch, "steps": steps, "answer_steps": answer,
        "samples": 4 * batch if quick else 16_384, "timeout_s": 60,
    }, threads=threads)  # fmt: skip
    found = {(line["phase"], line["rank"], line.get("dtype", "")): line for line in lines}
    rows = [row for name in names for row in _rows(name, found, devices)]
    if rows:
        table(rows)
    answers = [line for line in lines if "distance" in line]
    if answers:
        print("\nparameters after some steps together, relative to the worker's own run alone\n")
        table([_answer_row(line, devices) for line in answers])
    for error in errors:
        print(f"\n{error}")
    print()
    goals = [
        at_most(f"{row['phase']}, {row['dtype']}, {devices[row['rank']]}: parameters from one "
                "process's, relative", row["distance"], 1e-10 if "64" in row["dtype"] else 1e-5)
        for row in answers
    ]  # fmt: skip
    goals.append(equal("workers that failed", len(errors), 0))
    if not quick:
        for name in names:
            goals += _speed_goals(name, found)
    return {"devices": devices, "threads": threads, "rows": rows, "lines": lines}, goals


def _rows(
    name: str, found: dict[tuple[str, int, str], dict[str, Any]], devices: Sequence[str]
) -> list[dict[str, Any]]:
    rows = []
    kinds = [(f"{devices[rank]} alone", "alone", rank) for rank in range(len(devices))]
    kinds += [(kind, kind, 0) for kind in ("even", "uneven", "uneven, checked")]
    for label, kind, rank in kinds:
        ranks = [rank] if kind == "alone" else range(len(devices))
        line = _trained(f"{name}: {kind}", found, ranks)
        if line is not None:
            # A worker that stands by has no share.
            shares = dict(zip(line["trained_by"], line["split"], strict=True))
            own = "0" if kind == "alone" else str(rank)
            rows.append({
                "network": name,
                "workers": label,
                "samples/s": line["samples_per_s"],
                "ms a step": line["step_ms"],
                "split": " + ".join(map(str, line["split"])),
                "trained by": " + ".join(
                    devices[rank if kind == "alone" else int(each)] for each in shares
                ),
                "first worker's share": shares.get(own, 0) / sum(line["split"]),
                "busy, ms": " / ".join(f"{each:.2f}" for each in line["busy_ms"]),
                "splits": line["splits"],
            })
    return rows


def _trained(
    phase: str, found: dict[tuple[str, int, str], dict[str, Any]], ranks: Iterable[int]
) -> dict[str, Any] | None:
    """Return what the first worker says that has trained all steps; others may have stood by."""
    for rank in ranks:
        line = found.get((phase, rank, ""))
        if line is not None and "samples_per_s" in line:
            return line
    return None


def _answer_row(line: dict[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    return {
        "phase": line["phase"],
        "numbers": line["dtype"].removeprefix("torch."),
        "worker": devices[line["rank"]],
        "distance": f"{line['distance']:.1e}",
    }


def _speed_goals(name: str, found: dict[tuple[str, int, str], dict[str, Any]]) -> list[Any]:
    def rate(kind: str, *ranks: int) -> float:
        line = _trained(f"{name}: {kind}", found, ranks or sorted({rank for _, rank, _ in found}))
        return line["samples_per_s"] if line else 0.0

    fastest = max(rate("alone", 0), rate("alone", 1), 1e-9)
    return [
        at_least(f"{name}: uneven / even", rate("uneven") / max(rate("even"), 1e-9), 1.0),
        at_least(f"{name}: uneven / the fastest worker alone", rate("uneven") / fastest, 0.9),
    ]


def _run(
    devices: Sequence[str], options: dict[str, Any], *, threads: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the workers; return their lines, and what those that failed said last."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank, device in enumerate(devices):
            own = {"device": device, "rank": rank, "threads": threads if rank else 1, **options}
            out, err = Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err"
            with out.open("w") as to, err.open("w") as to_err:
                process = subprocess.Popen(
                    [sys.executable, "-m", "bench.hetero.mixed_worker", json.dumps(own)],
                    stdout=to, stderr=to_err,
                    # A machine without a network may not resolve its own name, as gloo would.
                    env={**os.environ, **member(rank, len(devices), port),
                         "GLOO_SOCKET_IFNAME": "lo"},
                )  # fmt: skip
            workers.append((device, process, out, err))
        end = time.monotonic() + _LIMIT_S
        lines, errors = [], []
        for device, process, out, err in workers:
            try:
                status: int | str = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = f"no end after {_LIMIT_S:.0f} s"
            lines += [json.loads(line) for line in out.read_text().splitlines() if line[:1] == "{"]
            if status:
                errors.append(f"worker on {device}: {status}\n{err.read_text()[-3000:]}")
    return lines, errors
