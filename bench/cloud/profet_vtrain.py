"""Step times predicted for held-out networks on other GPUs and language models split three ways.

Networks on other GPUs are PROFET's table, and language models are vTrain's. For PROFET's nine
repetitions the median counts, because some are off by half. vTrain's were measured once.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.cloud.prediction import OURS, one_thread, percentage
from bench.cloud.step_time_models import Ernest, Pollux
from bench.common.harness import data_file
from thrifty.cloud import ACCELERATORS
from thrifty.perf.steptime import OtherDevice, PairedSteps, Setup, StepTimeModel
from thrifty.perf.steptime._model import relative_fit


SEED = 10
"""Seed that draws random rows."""


def boosted(known: np.ndarray, step_s: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Predict with scikit-learn's gradient boosting at its defaults, on logarithms."""
    from sklearn.ensemble import GradientBoostingRegressor  # noqa: PLC0415

    learner = GradientBoostingRegressor(random_state=0)
    learner.fit(np.log(known), np.log(step_s))
    out: np.ndarray = np.exp(learner.predict(np.log(asked)))
    return out


# -- PROFET: other GPUs ----------------------------------------------------------------------


GPUS = {"p3.2xlarge": "V100", "g4dn.xlarge": "T4", "p2.xlarge": "K80", "g3s.xlarge": "M60"}
PAIRS = (("V100", "T4"), ("V100", "K80"), ("V100", "M60"), ("T4", "V100"))
"""The GPU at hand, and the GPU to predict."""

Times = Mapping[tuple[str, str], Mapping[tuple[int, int], float]]
"""Seconds by GPU and network, then by batch and pixels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network to predict: what is known of it and of other networks, and what to predict."""

    split: str
    pair: tuple[str, str]
    probes: PairedSteps
    others: tuple[PairedSteps, ...]
    asked: PairedSteps


def profet_times() -> tuple[Times, dict[str, float]]:
    """Return the medians, and the mean deviation of a repetition from them, in %."""
    runs: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    path = data_file("systems", "profet", "profet_target_latency.csv")
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            setup = int(row["batchsize"]), int(row["pixels"].removesuffix("dataset"))
            network = GPUS[row["instance_name"]], row["model"]
            runs[network][setup].append(float(row["batch_latency"]))
    times = {
        network: {setup: median(each) for setup, each in sorted(found.items())}
        for network, found in sorted(runs.items())
    }
    noise: dict[str, list[float]] = defaultdict(list)
    for network, found in runs.items():
        for setup, each in found.items():
            noise[network[0]].append(percentage(np.array(each), times[network][setup]))
    return times, {gpu: fmean(each) for gpu, each in noise.items()}


def on_both(times: Times, network: str, pair: tuple[str, str]) -> PairedSteps:
    """Return the steps that fit into the memory of both GPUs."""
    here, there = (times[gpu, network] for gpu in pair)
    setups = sorted(here.keys() & there.keys())
    return PairedSteps(
        setups=np.array(setups, float),
        here_s=np.array([here[each] for each in setups]),
        there_s=np.array([there[each] for each in setups]),
    )


def part(steps: PairedSteps, chosen: np.ndarray) -> PairedSteps:
    """Return the steps of a mask."""
    return PairedSteps(
        setups=steps.setups[chosen], here_s=steps.here_s[chosen], there_s=steps.there_s[chosen]
    )


def probed(steps: PairedSteps, num: int) -> np.ndarray:
    """Return a mask of the probes: the shortest, the middle and the longest step here.

    With ``num`` = 1, only the middle one.
    """
    order = np.argsort(steps.here_s)
    last = len(order) - 1
    places = [0, last // 2, last] if num == 3 else [last // 2]
    out = np.zeros(len(order), bool)
    out[order[places]] = True
    return out


def cases(times: Times, pair: tuple[str, str], networks: Sequence[str]) -> list[Case]:
    """Return all splits of one pair of GPUs."""
    rng = np.random.default_rng(SEED)
    both = {each: on_both(times, each, pair) for each in sorted({name for _, name in times})}
    all_of = {each: np.ones(len(steps.here_s), bool) for each, steps in both.items()}
    rows = {each: rng.random(len(mask)) >= 0.2 for each, mask in all_of.items()}
    one, three = ({each: probed(both[each], num) for each in both} for num in (1, 3))
    splits = {
        "random rows (leaky)": (rows, rows),
        "network, 3 probes": (three, all_of),
        "network, 1 probe": (one, all_of),
        "GPU, 3 probes of each network": (three, three),
    }
    return [
        Case(
            split=split,
            pair=pair,
            probes=part(both[network], mine[network]),
            others=tuple(part(both[each], of[each]) for each in both if each != network),
            asked=part(both[network], ~mine[network]),
        )
        for split, (mine, of) in splits.items()
        for network in networks
    ]


def by_data_sheet(case: Case) -> np.ndarray:
    """Predict by the speeds in the data sheets."""
    here, there = (ACCELERATORS[gpu].speed for gpu in case.pair)
    return case.asked.here_s * here / there


def by_ratio(case: Case) -> np.ndarray:
    """Scale times here by the geometric mean of the probes' ratios."""
    return case.asked.here_s * math.exp(case.probes.ratios.mean())


def by_law(make: Callable[[], StepTimeModel]) -> Callable[[Case], np.ndarray]:
    """Return a predictor that fits a law of one device's batch.

    Images of all sizes count by their pixels; otherwise three probes would be too few.
    """

    def forecast(case: Case) -> np.ndarray:
        model = make()
        model.fit(_pixels(case.probes), list(case.probes.there_s))
        return model.predict(_pixels(case.asked))

    return forecast


def _pixels(steps: PairedSteps) -> list[Setup]:
    return [
        Setup(placement=(1,), batch=float(batch * side**2 / 32**2)) for batch, side in steps.setups
    ]


def by_trees(case: Case) -> np.ndarray:
    """Predict the time there from the time here, batch and pixels.

    All networks' steps count alike.
    """
    known = [*case.others, case.probes]
    columns = [np.column_stack([each.here_s, each.setups]) for each in (*known, case.asked)]
    there_s = np.concatenate([each.there_s for each in known])
    return boosted(np.concatenate(columns[:-1]), there_s, columns[-1])


PROFET: Mapping[str, Callable[[Case], np.ndarray]] = {
    "data sheets": by_data_sheet,
    "one ratio": by_ratio,
    "Ernest": by_law(Ernest),
    "Pollux": by_law(Pollux),
    "boosting": by_trees,
}


def of_case(case: Case) -> dict[str, Any]:
    """Evaluate all models on one network, and the coverage of our interval."""
    true = case.asked.there_s
    row: dict[str, Any] = {"split": case.split, "pair": " -> ".join(case.pair), "held": len(true)}
    for name, forecast in PROFET.items():
        row[name] = percentage(forecast(case), true)
    model = OtherDevice(case.others)
    model.fit(case.probes)
    asked = case.asked.setups, case.asked.here_s
    row[OURS] = percentage(model.predict(*asked), true)
    low, high = model.interval(*asked, coverage=0.9)
    row["covered"] = 100 * float(np.mean((low <= true) & (true <= high)))
    row["width"] = 100 * (float(np.mean(np.sqrt(high / low))) - 1)
    return row


def profet(*, quick: bool) -> dict[str, Any]:
    """Return the errors of all splits as means over networks and pairs of GPUs.

    Unseen networks also get errors for each pair.
    """
    times, noise = profet_times()
    networks = sorted({name for _, name in times})
    if quick:
        networks = networks[::5]
    jobs = [each for pair in PAIRS[: 1 if quick else None] for each in cases(times, pair, networks)]
    with ProcessPoolExecutor(2, initializer=one_thread) as pool:
        found = list(pool.map(of_case, jobs))
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        groups[row["split"]].append(row)
    for row in found:
        if row["split"] == "network, 3 probes":
            groups[f"... {row['pair']}"].append(row)
    rows = [_profet_line(name, mine) for name, mine in groups.items()]
    return {"rows": rows, "noise_floor": noise, "networks": found}


def _profet_line(name: str, mine: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    line = _line(name, mine, PROFET)
    line["networks"] = len(mine)
    held = np.array([row["held"] for row in mine], float)
    for column, figure in (("in the 90 % interval", "covered"), ("half its width", "width")):
        line[column] = float(np.average([row[figure] for row in mine], weights=held))
    return line


def _line(
    name: str, mine: Sequence[Mapping[str, Any]], models: Mapping[str, Any]
) -> dict[str, Any]:
    line: dict[str, Any] = {"held out": name}
    for model in (*models, OURS):
        line[model] = fmean(row[model] for row in mine)
    line["median"] = median(row[OURS] for row in mine)
    return line


# -- vTrain: language models, split by tensors, data and layers ------------------------------


WORDS = 51_200
"""Size of the vocabulary, as Megatron pads it."""

MACHINE = 8
"""GPUs in one machine."""


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Iterations of Megatron on A100, [plans] each; attributes are the files' columns."""

    gpus: np.ndarray
    batch: np.ndarray
    micro: np.ndarray
    hidden: np.ndarray
    layers: np.ndarray
    length: np.ndarray
    tensor: np.ndarray
    data: np.ndarray
    pipeline: np.ndarray
    seconds: np.ndarray

    @classmethod
    def read(cls, name: str) -> Plans:
        """Read one of the files."""
        path = data_file("systems", "vtrain", f"ground_truth_{name}.csv")
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))

        def column(title: str) -> np.ndarray:
            return np.array([float(row[title]) for row in rows])

        return cls(
            gpus=column("# GPUs"),
            batch=column("global batch"),
            micro=column("micro batch"),
            hidden=column("hidden size"),
            layers=column("# layers"),
            length=column("sequence length"),
            tensor=column("tensor parallelism"),
            data=column("data parallelism"),
            pipeline=column("pipeline parallelism"),
            seconds=column("iteration time (ms)") / 1000,
        )

    def part(self, chosen: np.ndarray) -> Plans:
        """Return the plans of a mask."""
        return Plans(**{name: column[chosen] for name, column in vars(self).items()})

    @property
    def columns(self) -> np.ndarray:
        """Return all columns but the measured time, and the rounds, [plans, columns]."""
        found = [column for name, column in vars(self).items() if name != "seconds"]
        return np.column_stack([*found, self.rounds])

    @property
    def rounds(self) -> np.ndarray:
        """Return the micro batches that go through each pipeline."""
        return self.batch / self.data / self.micro

    @property
    def parameters(self) -> np.ndarray:
        """Return the parameters of the layers and the vocabulary."""
        return 12 * self.layers * self.hidden**2 + WORDS * self.hidden

    @property
    def tflops(self) -> np.ndarray:
        """Return the arithmetic of an iteration for each GPU.

        The formula is that of Narayanan et al. (SC 2021), without recomputation.
        """
        per_token = 6 * self.parameters + 12 * self.layers * self.hidden * self.length
        return self.batch * self.length * per_token / self.gpus / 1e12


def by_perfection(known: Plans, asked: Plans) -> np.ndarray:
    """Scale the most similar plan's time by the arithmetic for each GPU."""
    near = np.log2(asked.columns)[:, None] - np.log2(known.columns)
    at = (near**2).sum(axis=2).argmin(axis=1)
    return known.seconds[at] * asked.tflops / known.tflops[at]


def by_ernest(known: Plans, asked: Plans) -> np.ndarray:
    """Predict by Ernest's four terms of arithmetic and GPUs."""
    model = Ernest()
    model.fit(_scales(known), list(known.seconds))
    return model.predict(_scales(asked))


def _scales(plans: Plans) -> list[Setup]:
    return [
        Setup(placement=(int(gpus),), batch=float(tflops))
        for gpus, tflops in zip(plans.gpus, plans.tflops, strict=True)
    ]


def by_bubble(known: Plans, asked: Plans) -> np.ndarray:
    """Predict by arithmetic and the pipeline's idle slots."""
    return _bubble(asked) @ relative_fit(_bubble(known), known.seconds)


def _bubble(plans: Plans) -> np.ndarray:
    idle = (plans.pipeline - 1) / plans.rounds
    return np.column_stack([plans.tflops, plans.tflops * idle])


def by_boosting(known: Plans, asked: Plans) -> np.ndarray:
    """Predict by gradient boosting on all columns."""
    return boosted(known.columns, known.seconds, asked.columns)


def by_physics(known: Plans, asked: Plans) -> np.ndarray:
    """Predict by the fitted cost of each resource."""
    return physics(asked) @ relative_fit(physics(known), known.seconds)


def ours(known: Plans, asked: Plans) -> np.ndarray:
    """Predict by that physics, with trees for the residuals."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415

    weights = relative_fit(physics(known), known.seconds)
    base, at = physics(known) @ weights, physics(asked) @ weights
    trees = HistGradientBoostingRegressor(
        loss="absolute_error", min_samples_leaf=5, early_stopping=False, random_state=0
    )
    trees.fit(np.log(known.columns), np.log(known.seconds / base))
    out: np.ndarray = at * np.exp(trees.predict(np.log(asked.columns)))
    return out


def physics(plans: Plans) -> np.ndarray:
    """Return what an iteration may wait for, without coefficients, [plans, terms].

    A pipeline is as slow as its slots: each takes one micro batch through a share of the layers. In
    a slot there is arithmetic, launches, memory traffic that tensor parallelism divides or does
    not, and sums of activations, inside a machine or between machines. At the end come sums of
    gradients, and the optimizer.
    """
    slots = plans.rounds + plans.pipeline - 1
    depth = plans.layers / plans.pipeline * slots
    tokens = plans.micro * plans.length * plans.hidden / 1e9 * depth
    ring = (plans.tensor - 1) / plans.tensor
    inside = plans.tensor <= MACHINE
    shard = plans.parameters / plans.tensor / plans.pipeline / 1e9
    exchanged = shard * (plans.data - 1) / plans.data
    near = plans.tensor * plans.data <= MACHINE
    sent = plans.micro * plans.length * plans.hidden / 1e9 * slots * (plans.pipeline > 1)
    return np.column_stack([
        plans.tflops * slots / plans.rounds,
        depth / 1e3,
        tokens,
        tokens / plans.tensor,
        tokens * ring * inside,
        tokens * ring * ~inside,
        depth / 1e3 * (plans.tensor > 1),
        sent,
        exchanged * near,
        exchanged * ~near,
        shard,
    ])


VTRAIN: Mapping[str, Callable[[Plans, Plans], np.ndarray]] = {
    "perfect scaling": by_perfection,
    "Ernest": by_ernest,
    "pipeline bubble": by_bubble,
    "boosting": by_boosting,
    "physics alone": by_physics,
}


def held_out(name: str, plans: Plans, most: int) -> list[tuple[str, np.ndarray]]:
    """Return the splits and what each holds out."""
    rng = np.random.default_rng(SEED)
    fold = rng.integers(5, size=len(plans.gpus))
    found = [("random rows (leaky)", fold == each) for each in range(5)]
    found.append((f"<= {most} GPUs -> more", plans.gpus > most))
    sizes = plans.parameters if name == "multi" else plans.hidden
    found += [("model size", sizes == size) for size in np.unique(sizes)]
    return [(f"{name}: {split}", held) for split, held in found]


def vtrain(*, quick: bool) -> dict[str, Any]:
    """Return the errors of all splits, as means over what is held out in turn."""
    found: list[dict[str, Any]] = []
    for name, most in (("single", 4), ("multi", 64))[1 if quick else 0 :]:
        plans = Plans.read(name)
        for split, held in held_out(name, plans, most):
            known, asked = plans.part(~held), plans.part(held)
            row: dict[str, Any] = {"split": split, "held": int(held.sum())}
            for model, forecast in {**VTRAIN, OURS: ours}.items():
                row[model] = percentage(forecast(known, asked), asked.seconds)
            found.append(row)
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        groups[row["split"]].append(row)
    rows = [
        {**_line(name, mine, VTRAIN), "plans": sum(row["held"] for row in mine)}
        for name, mine in groups.items()
    ]
    return {"rows": rows, "parts": found}
