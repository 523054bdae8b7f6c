"""Sharing of prefixes on a GPU: are results those of each trial alone, bit for bit?

Digits again, now with a small convolutional network. ``python -m bench.sharing.gpu`` is one method
in a process of its own; ``bench_sharing --device cuda`` runs all of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch

import thrifty as th
from bench.common import digits
from bench.common.digits_task import space_of
from bench.common.harness import Goal, at_least, equal, finish, table
from bench.common.processes import in_fresh_process, say_result
from thrifty.run import train_alone
from thrifty.space import Timeline


class ConvolutionalDigits(th.Task):
    """Digits, with a network of two convolutions."""

    optimizer = th.SGD(lr="lr", momentum=0.9)
    batch_size = digits.BATCH_SIZE

    def data(self, hp: th.HyperParameters) -> th.ArrayData:
        # Each worker reads the data once, before it trains.
        deterministic()
        (x, y), (valid_x, valid_y) = digits.load()
        return th.ArrayData(
            train=(x.view(-1, 1, 8, 8), y), valid=(valid_x.view(-1, 1, 8, 8), valid_y)
        )

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        # No pooling: its backward pass on a GPU adds in an order that depends on timing.
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1, stride=2), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(32 * 16, 64), torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )  # fmt: skip

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        scores = model(batch[0])
        # The loss shows a difference of one bit in most weights; the accuracy would hide it.
        return {
            "loss": torch.nn.functional.cross_entropy(scores, batch[1]),
            "accuracy": (scores.argmax(1) == batch[1]).double().mean(),
        }


def deterministic() -> None:
    """Choose kernels whose results do not depend on timing."""
    # cuBLAS reads it when it starts; without it, its results depend on timing.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def schedules(*, quick: bool) -> list[dict[str, Any]]:
    """Return step schedules, and a cosine for each learning rate."""
    epochs = max_epochs(quick=quick)
    rates = digits.LEARNING_RATES[: 1 if quick else 3]
    out: list[dict[str, Any]] = []
    for lr in rates:
        for first in (epochs // 3, 2 * epochs // 3):
            out += [
                {"kind": "step", "lr": lr, "drops": drops, "gamma": gamma}
                for gamma in ((0.1,) if quick else (0.1, 0.3))
                for drops in ([first], [first, first + epochs // 4])
            ]
        out.append({"kind": "cosine", "lr": lr, "epochs": epochs})
    return out


def max_epochs(*, quick: bool) -> int:
    return 4 if quick else 9


class _Trained:
    """Counter of the epochs that were really trained."""

    def __init__(self) -> None:
        self.num_epochs = 0

    def on_event(self, event: Any) -> None:
        self.num_epochs += type(event).__name__ == "EpochDone"


def shared(device: str, *, pack: str, quick: bool) -> dict[str, Any]:
    """Train all schedules by a study on one worker."""
    configs = schedules(quick=quick)
    epochs = max_epochs(quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        study = th.Study(
            ConvolutionalDigits(),
            space_of(configs),
            algorithm=th.GridSearch(max_epochs=epochs),
            metric="loss",
            mode="min",
            storage=f"sqlite:///{folder}/bench.db",
            name="bench",
            seed=digits.SEED,
        )
        trained = _Trained()
        executor = th.Local(workers=1, threads=1, devices=(device,), pack=pack)
        began = time.perf_counter()
        study.run(executor=executor, progress=False, observers=[trained])
        seconds = time.perf_counter() - began
        by_schedule = {schedule: i for i, schedule in enumerate(study.space["lr"].options)}
        trials = {by_schedule[trial.config["lr"]]: trial for trial in study.trials}
        return {
            "seconds": seconds,
            "epochs": trained.num_epochs,
            "unique": study.savings.unique_epochs,
            "trial_epochs": study.savings.trial_epochs,
            "packed_epochs": study.savings.packed_epochs,
            "curves": [list(trials[i].curve) for i in range(len(configs))],
            "weights": [digest(trials[i].load_model().state_dict()) for i in range(len(configs))],
        }


def separate(device: str, *, quick: bool) -> dict[str, Any]:
    """Train each schedule by itself, from its first epoch to its last."""
    epochs = max_epochs(quick=quick)
    curves, weights = [], []
    began = time.perf_counter()
    for schedule in space_of(schedules(quick=quick))["lr"].options:
        backend, metrics = train_alone(
            ConvolutionalDigits(), Timeline({"lr": schedule}, epochs=epochs),
            seed=digits.SEED, epochs=epochs, device=device, threads=1,
        )  # fmt: skip
        curves.append([each["loss"] for each in metrics])
        weights.append(digest(backend.model.state_dict()))
    return {
        "seconds": time.perf_counter() - began,
        "epochs": epochs * len(curves),
        "curves": curves,
        "weights": weights,
    }


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of all bits of a model's state."""
    out = blake2b(digest_size=16)
    for name, tensor in sorted(state.items()):
        out.update(name.encode())
        out.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return out.hexdigest()


def run(device: str, *, quick: bool) -> None:
    """Run all methods, each in a fresh process; print a table and the goals."""
    flags = ["--device", device, *(["--quick"] if quick else [])]
    results = {}
    for name in ("separate", "shared", "packed"):
        try:
            results[name] = in_fresh_process("bench.sharing.gpu", name, *flags)
        except RuntimeError as error:  # the others still count
            print(f"{name}: {error}", flush=True)
            continue
        found = results[name]
        print(f"{name}: {found['seconds']:.2f} s, {found['epochs']} epochs", flush=True)
    alone = results.get("separate")
    rows = [_row(name, found, alone) for name, found in results.items()]
    print()
    if rows:
        table(rows)
    finish("sharing", {"device": device, "rows": rows}, _goals(results, quick=quick))


def _row(name: str, found: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": name,
        "seconds": found["seconds"],
        "epochs trained": found["epochs"],
    }
    row["packed epochs"] = found.get("packed_epochs")
    if alone is not None:
        row["trials"] = len(found["curves"])
        row["equal curves"] = _num_equal(found["curves"], alone["curves"])
        row["equal weights"] = _num_equal(found["weights"], alone["weights"])
        row["largest difference"] = f"{_distance(found['curves'], alone['curves']):.1e}"
    return row


def _num_equal(ones: Sequence[Any], others: Sequence[Any]) -> int:
    return sum(one == other for one, other in zip(ones, others, strict=True))


def _distance(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Return the largest relative difference of a loss."""
    pairs = [
        pair
        for one, other in zip(ones, others, strict=True)
        for pair in zip(one, other, strict=False)
    ]
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def _goals(results: Mapping[str, dict[str, Any]], *, quick: bool) -> list[Goal]:
    if not {"separate", "shared"} <= results.keys():
        return [equal("methods that ran", len(results), 3)]
    alone, ours = results["separate"], results["shared"]
    num = len(alone["curves"])
    goals = [
        equal("methods that ran", len(results), 3),
        equal("shared: trials with the bits of the trial alone, losses",
              _num_equal(ours["curves"], alone["curves"]), num),
        equal("shared: trials with the bits of the trial alone, weights",
              _num_equal(ours["weights"], alone["weights"]), num),
        equal("shared: epochs trained against the unique ones", ours["epochs"], ours["unique"]),
    ]  # fmt: skip
    if not quick:
        goals.append(
            at_least("separate / shared, seconds", alone["seconds"] / ours["seconds"], 1.3)
        )
    return goals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=("separate", "shared", "packed"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    deterministic()
    digits.warm_up()
    device = "cuda:0" if args.device == "cuda" else args.device
    if device != "cpu":
        torch.zeros(1, device=device)  # start CUDA before any clock runs
    if args.method == "separate":
        say_result(separate(device, quick=args.quick))
    else:
        pack = "solo" if args.method == "shared" else "auto"
        say_result(shared(device, pack=pack, quick=args.quick))


if __name__ == "__main__":
    # Workers load the task from the module's own name, not from `__main__`.
    from bench.sharing import gpu

    gpu.main()
