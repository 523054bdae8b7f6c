"""Tuning of a head, or of the top block of six, over a frozen character model.

``python -m bench.finetune.heads METHOD CASE --folder FOLDER`` runs one method in a process of its
own; ``pretrain`` makes the model in the folder first. Trials predict the kind of the next character
from a window of 64. All methods train the same 32 configurations on the same batches.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import thrifty as th
from bench.common.processes import say_result
from bench.finetune.runs import move
from bench.ladder.setting import BLOCK, GPT, loss_of, text_of
from thrifty.core import derive_seed, step_seed
from thrifty.pack import BlockOptions, EpochPlan, FusedBackend, Member, epoch_order
from thrifty.pack._frozen import storage_address
from thrifty.pack.fused import _products


SEED = 0
KINDS = ("aeiou", " ", "\n", ".,;:!?'-&")
"""The kinds of the next character, besides consonants (and everything else)."""
RATES = tuple(1e-4 * 2**power for power in range(8))
DECAYS = (0.0, 0.01, 0.1, 1.0)
CASES = ("head", "block", "augmented")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of data, model and study."""

    num_train: int = 2048
    num_valid: int = 512
    batch: int = 32
    epochs: int = 6
    width: int = 128
    layers: int = 6
    pretraining: int = 600
    trials: int = 32

    @classmethod
    def of(cls, *, quick: bool) -> Sizes:
        if quick:
            return cls(
                num_train=64, num_valid=32, epochs=2, width=32, layers=2, pretraining=5, trials=4
            )
        return cls()

    @property
    def configs(self) -> list[dict[str, float]]:
        grid = [{"lr": rate, "decay": decay} for decay in DECAYS for rate in RATES]
        return grid[: self.trials]


@cache
def windows(text: str, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return windows of characters, the kind of each one's next character, and the vocabulary."""
    whole = text_of(text)
    letters = sorted(set(whole))
    place = {letter: index for index, letter in enumerate(letters)}
    codes = torch.tensor([place[letter] for letter in whole])
    kinds = torch.tensor([
        next((n + 1 for n, kind in enumerate(KINDS) if letter.lower() in kind), 0)
        for letter in letters
    ])
    generator = torch.Generator().manual_seed(SEED)
    num = sizes.num_train + sizes.num_valid
    # the first tenth of the text is for these trials, the rest is what the base has learned
    begins = torch.randperm(len(codes) // 10 - BLOCK, generator=generator)[:num]
    x = torch.stack([codes[begin : begin + BLOCK] for begin in begins])
    return x, kinds[codes[begins + BLOCK]], len(letters)


class Reader(torch.nn.Module):
    """A frozen character model with a trained head, and perhaps a trained top block."""

    def __init__(self, base: GPT, *, opened: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        if opened:
            self.base.blocks[-1].requires_grad_(True)
            self.base.norm.requires_grad_(True)
        self.base.add_module("head", torch.nn.Identity())
        self.head = torch.nn.Linear(base.norm.weight.numel(), len(KINDS) + 1)

    def trunk(self, codes: torch.Tensor) -> torch.Tensor:
        """Return what goes into the top block."""
        x = self.base.letters(codes) + self.base.places.weight[: codes.shape[1]]
        return self.base.blocks[:-1](x)

    def top(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, from what goes into the top block."""
        return self.head(self.base.norm(self.base.blocks[-1](x))[:, -1])

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.top(self.trunk(codes))


class Features(torch.nn.Module):
    """The part of a ``Reader`` that comes after given features."""

    def __init__(self, reader: Reader, *, opened: bool) -> None:
        super().__init__()
        self.block = reader.base.blocks[-1] if opened else torch.nn.Identity()
        self.norm = reader.base.norm if opened else torch.nn.Identity()
        self.head = reader.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.block(x))
        return self.head(out[:, -1] if out.dim() == 3 else out)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One case: its sizes, its text and the folder with the pretrained model.

    With ``double``, all is computed in double precision.
    """

    case: str
    sizes: Sizes
    text: str
    folder: str
    double: bool = False

    @property
    def opened(self) -> bool:
        return self.case == "block"

    def reader(self) -> Reader:
        """Return the model of a trial; its head is drawn from torch's stream."""
        with torch.random.fork_rng(devices=[]):
            base = GPT(
                windows(self.text, self.sizes)[2], width=self.sizes.width, layers=self.sizes.layers
            )
        base.load_state_dict(load_file(Path(self.folder) / "base.safetensors"))
        reader = Reader(base, opened=self.opened)
        return reader.double() if self.double else reader

    def data(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y, _ = windows(self.text, self.sizes)
        num = self.sizes.num_train
        return x[:num], y[:num], x[num:], y[num:]


class Noisy(torch.utils.data.Dataset[Any]):
    """Windows in which each character is replaced by another with a probability of 5 %."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, *, vocabulary: int) -> None:
        self._x, self._y, self._vocabulary = x, y, vocabulary

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        other = torch.randint(self._vocabulary, x.shape)
        return torch.where(torch.rand(x.shape) < 0.05, other, x), self._y[index]


class Tuning(th.Task):
    """A case as a task: ``given`` has the features in place of the windows."""

    optimizer = th.AdamW(lr="lr", weight_decay="decay")

    def __init__(self, work: Work, *, given: bool = False) -> None:
        self.work, self.given = work, given
        self.batch_size = work.sizes.batch
        self.eval_batch_size = work.sizes.num_valid

    def data(self, hp: th.HyperParameters) -> Any:
        x, y, x_valid, y_valid = self.work.data()
        if self.work.case == "augmented":
            vocabulary = windows(self.work.text, self.work.sizes)[2]
            valid = torch.utils.data.TensorDataset(x_valid, y_valid)
            return th.DatasetPair(train=Noisy(x, y, vocabulary=vocabulary), valid=valid)
        if self.given:
            reader = self.work.reader()
            x, x_valid = (features(reader, each, opened=self.work.opened) for each in (x, x_valid))
        return th.ArrayData(train=(x, y), valid=(x_valid, y_valid))

    def model(self, hp: th.HyperParameters) -> torch.nn.Module:
        reader = self.work.reader()
        return Features(reader, opened=self.work.opened) if self.given else reader

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        right = (model(batch[0]).argmax(-1) == batch[1]).float()
        return {"accuracy": right.mean()}


@torch.no_grad()
def features(reader: Reader, x: torch.Tensor, *, opened: bool) -> torch.Tensor:
    """Return what goes into the trained part, for all windows."""

    def of(part: torch.Tensor) -> torch.Tensor:
        out = reader.trunk(part)
        return out if opened else reader.base.norm(reader.base.blocks[-1](out))[:, -1]

    return torch.cat([of(part) for part in x.split(32)])


# -- methods -------------------------------------------------------------------------------


def pretrain(work: Work) -> dict[str, Any]:
    """Train the character model on the last nine tenths of the text, and write it."""
    whole = text_of(work.text)
    letters = sorted(set(whole))
    place = {letter: index for index, letter in enumerate(letters)}
    codes = torch.tensor([place[letter] for letter in whole])[len(whole) // 10 :]
    torch.manual_seed(SEED)
    model = GPT(len(letters), width=work.sizes.width, layers=work.sizes.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(work.sizes.pretraining):
        begins = torch.randint(len(codes) - BLOCK, (16,), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model, torch.stack([codes[b : b + BLOCK + 1] for b in begins]))
        loss.backward()
        optimizer.step()
    save_file(model.state_dict(), Path(work.folder) / "base.safetensors")
    return {"loss": float(loss.detach())}


def optuna(work: Work, *, given: bool = False) -> dict[str, Any]:
    """Train each configuration by a plain loop; with ``given``, on features computed once."""
    import optuna  # noqa: PLC0415

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    configs = work.sizes.configs
    found: list[float] = [0.0] * len(configs)
    task = Tuning(work, given=given)
    began = time.perf_counter()
    data = task.data(th.HyperParameters({}))

    def objective(trial: optuna.Trial) -> float:
        index = trial.suggest_int("run", 0, len(configs) - 1)
        found[index] = train_plainly(task, data, configs[index])
        return found[index]

    with tempfile.TemporaryDirectory() as folder:
        study = optuna.create_study(
            storage=f"sqlite:///{folder}/optuna.db",
            sampler=optuna.samplers.GridSampler({"run": list(range(len(configs)))}, seed=0),
            direction="maximize",
        )
        study.optimize(objective, n_trials=len(configs))
    return {"seconds": time.perf_counter() - began, "accuracies": found}


def train_plainly(task: Tuning, data: Any, config: Mapping[str, float], *, moved: int = 0) -> float:
    """Train one configuration in plain PyTorch and return its accuracy.

    ``moved`` is the seed by which each weight is moved one ulp up or down at the beginning; 0: none
    is.
    """
    sizes = task.work.sizes
    torch.manual_seed(derive_seed(SEED, "model"))
    model = task.model(th.HyperParameters(config))
    if moved:
        move(model, seed=moved)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config["lr"], weight_decay=config["decay"])
    for epoch in range(sizes.epochs):
        order = epoch_order(sizes.num_train, seed=SEED, epoch=epoch)
        for step, rows in enumerate(order.split(sizes.batch)):
            torch.manual_seed(step_seed(derive_seed(SEED, "epoch", epoch), step))
            model.train()
            optimizer.zero_grad()
            task.loss(model, _rows(data, rows)).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        valid = data.valid[:] if isinstance(data, th.DatasetPair) else data.valid
        return float(task.metrics(model, valid)["accuracy"])


def highest(work: Work) -> dict[str, Any]:
    """Train the configurations of the highest rates plainly: as they are, and moved by one ulp.

    They train on given features, which changes no bit of the results.
    """
    task = Tuning(work, given=True)
    data = task.data(th.HyperParameters({}))
    configs = work.sizes.configs
    rates = sorted({config["lr"] for config in configs})[-NUM_HIGHEST:]
    chosen = [number for number, config in enumerate(configs) if config["lr"] in rates]
    runs = [
        [train_plainly(task, data, configs[number], moved=seed) for number in chosen]
        for seed in range(NUM_MOVED + 1)
    ]
    return {"configs": chosen, "plain": runs[0], "moved": runs[1:]}


NUM_HIGHEST = 3
"""How many of the highest rates are looked at: below them, all accuracies are the same."""
NUM_MOVED = 3


def _rows(data: Any, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if isinstance(data, th.DatasetPair):
        return tuple(
            torch.stack(parts) for parts in zip(*(data.train[r] for r in rows), strict=True)
        )
    return tuple(array[rows] for array in data.train)


def thrifty(work: Work, *, given: bool = False) -> dict[str, Any]:
    """Train the same by thrifty: SQLite, checkpoints on disk, one worker."""
    configs = work.sizes.configs
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        study = th.Study(
            Tuning(work, given=given),
            th.Space(
                lr=th.Choice(list(dict.fromkeys(c["lr"] for c in configs))),
                decay=th.Choice(list(dict.fromkeys(c["decay"] for c in configs))),
            ),
            algorithm=th.GridSearch(max_epochs=work.sizes.epochs),
            metric="accuracy",
            storage=f"sqlite:///{folder}/bench.db",
            name="heads",
            seed=SEED,
        )
        study.run(executor=th.Local(workers=1, threads=1), progress=False)
        seconds = time.perf_counter() - began
        found = {(t.config["lr"], t.config["decay"]): t.value for t in study.trials}
        return {
            "seconds": seconds,
            "accuracies": [found[c["lr"], c["decay"]] for c in configs],
            "checks_s": study.savings.seconds_checks,
            "epochs": study.savings.unique_epochs,
        }


def features_alone(work: Work) -> dict[str, Any]:
    """Compute the features of all windows once."""
    reader = work.reader()
    x, _, x_valid, _ = work.data()
    began = time.perf_counter()
    for each in (x, x_valid):
        features(reader, each, opened=work.opened)
    return {"seconds": time.perf_counter() - began}


class CountTrunk(TorchDispatchMode):
    """A mode that counts the matrix products with one frozen weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.num = 0
        self._address = storage_address(weight)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if "mm" in func.name():
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            self.num += any(storage_address(each) == self._address for each in tensors)
        return func(*args, **(kwargs or {}))


def passes(work: Work) -> dict[str, Any]:
    """Count how often a step of all trials goes through the trunk, in the first epochs."""
    _products.MIN_MULTIPLICATIONS = 2**62  # those of oneDNN are computed in several parts
    backend = FusedBackend(Tuning(work), block=BlockOptions(size=len(work.sizes.configs)))
    for slot, config in enumerate(work.sizes.configs):
        backend.put(slot, Member(values=config, seed=SEED))
    weight = dict(backend.model(0).named_parameters())["base.blocks.0.attend.weight"]
    out = []
    for epoch in range(3):
        num = backend.start({
            slot: EpochPlan(epoch=epoch, values=config)
            for slot, config in enumerate(work.sizes.configs)
        })
        with CountTrunk(weight) as count:
            for step in range(num):
                backend.one_step()
                if not (epoch or step):
                    count.num = 0  # the first step records
        out.append(count.num / (num - (not epoch)))
    if not out[0]:
        raise RuntimeError("no product with the trunk's weight was seen")
    return {"passes": out}


METHODS: dict[str, Callable[[Work], dict[str, Any]]] = {
    "pretrain": pretrain,
    "optuna": optuna,
    "optuna, features": partial(optuna, given=True),
    "thrifty": thrifty,
    "thrifty, features": partial(thrifty, given=True),
    "features": features_alone,
    "passes": passes,
    "highest": highest,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--text", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--double", action="store_true", help="compute in double precision")
    args = parser.parse_args()
    torch.set_num_threads(1)
    work = Work(
        case=args.case,
        sizes=Sizes.of(quick=args.quick),
        text=args.text,
        folder=args.folder,
        double=args.double,
    )
    windows(work.text, work.sizes)
    say_result(METHODS[args.method](work))


if __name__ == "__main__":
    main()
