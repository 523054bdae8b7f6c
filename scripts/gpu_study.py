"""Run a study of some seconds on this machine's GPUs; print what the dashboard and the CLI say.

    python scripts/gpu_study.py [--device cpu] [--seconds 10]

The worker names of the dashboard (``/api/studies/1/workers``) say which GPU trained. Without
FastAPI, the same rows are read from the database. Exit status: 1 if a device trained nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import thrifty as th


class Waves(th.Task):
    """Classes of noisy waves, for a small convolutional network."""

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = 128

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        """Return noisy waves of five frequencies."""
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, 5, (5120,), generator=generator)
        phase = torch.linspace(0, 12, 64)[None] * (1 + y[:, None])
        x = (phase.sin() + torch.randn(len(y), 64, generator=generator))[:, None]
        return th.ArrayData(train=(x[:4096], y[:4096]), valid=(x[4096:], y[4096:]))

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        """Return a network of two convolutions."""
        return torch.nn.Sequential(
            torch.nn.Conv1d(1, 32, 7, padding=3), torch.nn.ReLU(), torch.nn.MaxPool1d(2),
            torch.nn.Conv1d(32, 32, 5, padding=2), torch.nn.ReLU(), torch.nn.Flatten(),
            torch.nn.Linear(32 * 32, 5),
        )  # fmt: skip

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the cross-entropy."""
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> dict[str, Any]:
        """Return the accuracy."""
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def main() -> int:
    """Run the study, and print what is said of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="such as cpu (default: all GPUs, or the CPU)")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    executor = th.Local() if args.device is None else th.Local(devices=(args.device,))
    devices = executor.local_devices
    print(f"th.Local() trains on {', '.join(devices)}")
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "study.db"
        study = th.Study(
            Waves(),
            th.Space(lr=th.Float(0.001, 0.3, log=True)),
            algorithm=th.RandomSearch(num_trials=200, max_epochs=3),
            metric="accuracy",
            storage=f"sqlite:///{database}",
            name="waves",
            seed=0,
        )
        began = time.monotonic()
        study.run(executor=executor, stop=th.StopWhen(seconds=args.seconds), progress=False)
        print(f"{len(study.trials)} trials in {time.monotonic() - began:.1f} s\n{study.savings}\n")
        names = _workers(database)
        _command("status", "--storage", f"sqlite:///{database}")
        _command("doctor")
    missing = [device for device in devices if not any(name.startswith(device) for name in names)]
    if missing:
        print(f"trained nothing: {', '.join(missing)}")
    return bool(missing)


def _workers(database: Path) -> list[str]:
    """Print what the dashboard says of the workers; return their names."""
    if importlib.util.find_spec("fastapi") and importlib.util.find_spec("httpx"):
        from starlette.testclient import TestClient  # noqa: PLC0415 -- not on every machine

        from thrifty.web import create_app  # noqa: PLC0415

        app = create_app(f"sqlite:///{database}")
        with TestClient(app, base_url="http://localhost") as client:
            found = client.get("/api/studies/1/workers").json()
        rows = [
            {name: value for name, value in worker.items() if name != "stages"}
            for worker in found["workers"]
        ]
    else:
        import sqlite3  # noqa: PLC0415 -- only without FastAPI

        print("FastAPI is not installed: read from the database")
        with sqlite3.connect(database) as connection:
            rows = [
                {"name": name, "total": total}
                for name, total in connection.execute(
                    "select worker, count(*) from stages group by worker"
                )
            ]
    print(f"dashboard: {json.dumps(rows)}\n", flush=True)
    return [row["name"] for row in rows]


def _command(*arguments: str) -> None:
    print(f"$ thrifty {' '.join(arguments)}", flush=True)
    code = "from thrifty.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, *arguments], check=False)
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
