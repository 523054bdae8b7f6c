"""Run the device tests and the benchmarks for GPUs; write a report of each benchmark.

    python scripts/gpu.py [STEP...] [--quick] [--limit 540] [--out bench/results]

It needs a PyTorch that sees a GPU, and no network. A step that fails or takes too long is said, and
the next one runs. What each step printed is kept in ``build``, too. Exit status: 0 if all steps ran
well, 1 if not, 2 if nothing could run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
NEEDED = {
    "alembic": "alembic",
    "cloudpickle": "cloudpickle",
    "fsspec": "fsspec",
    "numba": "numba",
    "psutil": "psutil",
    "rich": "rich",
    "safetensors": "safetensors",
    "sklearn": "scikit-learn",
    "sqlalchemy": "sqlalchemy",
}
NEEDED_BY = {
    "tests": {
        "allpairspy": "allpairspy",
        "hypothesis": "hypothesis",
        "pytest": "pytest",
        "pytest_timeout": "pytest-timeout",
        "xdist": "pytest-xdist",
    },
    "finetune": {"peft": "peft", "transformers": "transformers"},
    "finetune_memory": {"peft": "peft", "transformers": "transformers"},
}
# Warnings are no errors there: the packages are not the versions that the project pins.
TESTED = ("tests/pack", "tests/nn", "tests/graph", "tests/integrations/test_fine_tune.py")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step: the arguments of ``python``, and how many seconds it may take at most."""

    arguments: tuple[str, ...]
    limit_s: float

    @property
    def bench(self) -> str:
        """The benchmark that it runs; "" if it is none."""
        module = self.arguments[1] if self.arguments[0] == "-m" else ""
        return module.removeprefix("bench.") if module.startswith("bench.") else ""


def _bench(name: str, *options: str, limit_s: float) -> Step:
    return Step(arguments=("-m", f"bench.bench_{name}", *options), limit_s=limit_s)


STEPS = {
    "doctor": Step(arguments=("-c", "from thrifty.cli import main; main()", "doctor"), limit_s=120),
    "tests": Step(
        arguments=(
            "-m", "pytest", "-q", "--device", "cuda", "-n", str(min(os.cpu_count() or 1, 12)),
            "--dist", "loadfile", "--tb", "short", "-p", "no:cacheprovider",
            "-o", "filterwarnings=default", *TESTED,
        ),
        limit_s=540,
    ),
    "pack": _bench("pack", "--device", "cuda", "--limit", "75", limit_s=540),
    "finetune": _bench("finetune", "--device", "cuda", "--only", "sizes", limit_s=300),
    "finetune_memory": _bench("finetune", "--device", "cuda", "--only", "memory", limit_s=240),
    "graph": _bench("graph", "--device", "cuda", limit_s=540),
    "gyro": _bench("gyro", "--device", "cuda", "--only", "speed", limit_s=300),
    "sharing": _bench("sharing", "--device", "cuda", limit_s=120),
    "hetero": _bench("hetero", "--device", "cuda", "--only", "mixed", limit_s=120),
    "energy": _bench("hetero", "--device", "cuda", "--only", "energy", limit_s=60),
    "cloud": _bench("cloud", "--device", "cuda", limit_s=120),
    "study": Step(arguments=("scripts/gpu_study.py",), limit_s=90),
}  # fmt: skip


def main() -> int:
    """Run the steps that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"any of {', '.join(STEPS)}")
    parser.add_argument("--quick", action="store_true", help="benchmarks as smoke runs")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of a step, at most")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    unknown = [name for name in args.steps if name not in STEPS]
    if unknown:
        parser.error(f"no step is called {unknown[0]!r}; the steps are {', '.join(STEPS)}")
    if problem := _problem(args.steps or list(STEPS)):
        print(problem, file=sys.stderr)
        return 2
    gpu = _gpu()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.steps or STEPS:
        step = STEPS[name]
        extra = ("--quick",) if args.quick and step.bench else ()
        began = time.monotonic()
        print(f"== {name}", flush=True)
        text, status = _run(
            (*step.arguments, *extra), limit_s=min(step.limit_s, args.limit), name=name
        )
        seconds = time.monotonic() - began
        print(text[-3000:])
        print(f"== {name}: {status} in {seconds:.0f} s", flush=True)
        if step.bench:
            now = datetime.datetime.now(tz=datetime.UTC)
            report = args.out / f"{name}_{_short(gpu)}_{now:%Y%m}.md"
            command = " ".join(("python", *step.arguments, *extra))
            report.write_text(
                f"# {step.bench}, {name}, {gpu}, {now:%B %Y}\n\n"
                f"`{command}`: {status}, {seconds:.0f} s.\n\n{text.strip()}\n"
            )
            print(f"== {report}")
        if status != "ran well":
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all steps ran well")
    return bool(failed)


def _problem(steps: list[str]) -> str:
    """Return why nothing can run; "" if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is missing; install a build with CUDA for this machine"
    import torch  # noqa: PLC0415 -- only now it is known to be there

    if not torch.cuda.is_available():
        return (
            f"PyTorch {torch.__version__} sees no GPU here; run this on a machine with one, with "
            "PyTorch's build for its driver"
        )
    needed = dict(NEEDED)
    for step in steps:
        needed |= NEEDED_BY.get(step, {})
    missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    return f"missing packages: {' '.join(missing)}" if missing else ""


def _gpu() -> str:
    import torch  # noqa: PLC0415

    return torch.cuda.get_device_name()


def _short(gpu: str) -> str:
    """Return the model of a GPU as a part of a file's name.

    >>> _short("NVIDIA H100 80GB HBM3")
    'h100'
    """
    name = gpu.lower().replace("nvidia", "").strip()
    return re.sub(r"[^a-z0-9]+", "", name.partition(" ")[0]) or "gpu"


def _run(arguments: tuple[str, ...], *, limit_s: float, name: str) -> tuple[str, str]:
    """Run ``python`` with some arguments; return what it printed, and how it ended."""
    places = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    log = ROOT / "build" / f"gpu-{name}.txt"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return log.read_text(), f"stopped after {limit_s:.0f} s"
    return log.read_text(), "ran well" if status == 0 else f"failed with exit status {status}"


if __name__ == "__main__":
    sys.exit(main())
