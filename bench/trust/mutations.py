"""Mutation test of identity: random edits of a small project, and what they do to its digests."""

from __future__ import annotations

import ast
import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from thrifty.pack import Task, TaskIdentity, task_identity
from thrifty.pack.identity import asking_legacy


# Each line has a mark for what it belongs to: T training, E evaluation, U nothing that is used.
PROJECT = {
    "task": '''
"""The task."""
import functools
import torch
import losses
import scores
import thrifty as th
from layers import Net, make_head
from settings import BETAS, Mode, Options
from thrifty.testing import LineTask


class Mine(LineTask):
    """A line that is a little more than a line."""

    optimizer = th.AdamW(lr="lr", weight_decay=0.01, betas=BETAS, clip_norm=2.0)  # T
    batch_size = 16  # T
    eval_batch_size = 512  # E
    margin = 0.125  # T
    names = ("left", "right")  # T
    ks = [1, 5]  # E
    unit = "percent"  # E

    def __init__(self, threshold=0.5, *, table=None, options=Options(0.25)):  # T
        self.threshold = threshold * 2  # T
        self.table = table
        self.options = options
        self.smooth = losses.smooth(3.0)  # T
        self.part = functools.partial(losses.power, exponent=1.5)  # T
        self.digits = 3

    def model(self, hp):
        """A network."""
        net = Net(hp.get("width", 8), depth=2)  # T
        net.head.register_forward_hook(make_head(0.75))  # T
        return net

    def loss(self, model, batch):
        """The mean error."""
        x, y = batch
        out = model(x) + self.shift(0.5)  # T
        if self.options.mode is Mode.FAST and out.numel() > 100:  # T
            out = out * 1.5  # T
        return self.smooth(losses.error(out, y)) + self.part(self.margin) * self.table[0]  # T

    def shift(self, by):
        return by * self.threshold - len(self.names[0])  # T

    @property
    def rate(self):
        return 0.3 + self.margin  # T

    @staticmethod
    def nobody_calls_this(x):
        return x + 17  # T

    def metrics(self, model, batch):
        """Two of them."""
        x, y = batch
        out = model(x)
        found = {"mse": losses.error(out, y) * 1.0, "top": self.score(out, y) + 0.0}  # E
        return {f"{name} {self.unit}": value for name, value in found.items()}

    def score(self, out, y):
        """Only for metrics."""
        return scores.within(out, y, 0.1) * self.ks[0] + self.digits * 2.5  # E


task = Mine(0.4, table=torch.tensor([1.0, 2.0]), options=Options(0.5, mode=Mode.FAST))  # T
task.digits = 4  # E
''',
    "layers": '''
"""The model."""
import torch
from settings import WIDTHS, ACTIVATION


class Scaled(torch.nn.Module):
    """Multiplies."""

    factor = 1.25  # T

    def forward(self, x):
        return x * self.factor + 0.0625  # T


class Net(torch.nn.Module):
    """A few layers."""

    def __init__(self, width, *, depth=3):  # T
        super().__init__()
        sizes = [1, *[width * WIDTHS["inner"] for _ in range(depth)]]  # T
        pairs = zip(sizes, sizes[1:])  # T
        self.body = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairs)
        self.drop = torch.nn.Dropout(0.1)  # T
        self.head = torch.nn.Linear(sizes[-1], 1)  # T
        self.scaled = Scaled()

    def forward(self, x):
        """Through all of them."""
        for layer in self.body:
            x = ACTIVATION(layer(x) / 2.0)  # T
        return self.scaled(self.head(self.drop(x)))


class Unused(torch.nn.Module):
    rate = 4.0  # U

    def forward(self, x):
        return x + 1  # U


def make_head(gain, *, offset=0.5):  # T
    def hook(module, inputs, output):
        return output * gain + offset - 0.25  # T

    return hook
''',
    "losses": '''
"""Errors."""
import functools
import settings


def traced(function):
    """Counts nothing."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs) * 1.0  # T

    return inner


@traced
def error(out, y, eps=1e-6):  # T
    return ((out - y).abs() + eps).pow(settings.POWER).mean()  # T


def smooth(weight, steps=2):  # T
    total = weight + 0.5  # T

    def inner(x):
        return x * total + sum(range(steps))  # T

    return inner


def power(x, exponent=2.0):  # T
    from helpers.deep import curve

    return curve(x) ** exponent + 0.125  # T


def unused(x):
    return x * 3 + settings.UNUSED  # U
''',
    "scores": '''
"""What is measured."""
import settings

LIMIT = 0.9  # E
LEVELS = {"low": 0.1, "high": 0.9}  # E


def within(out, y, tolerance, *, scale=1.5):  # E
    """The share of what is near."""
    near = (out - y).abs() < tolerance * scale + settings.SLACK  # E
    return clipped(near.float().mean() - LEVELS["low"])  # E


def clipped(x):
    return min(x, LIMIT) - 0.5  # E
''',
    "settings": '''
"""Numbers."""
import enum
import torch
from dataclasses import dataclass, field

POWER = 2.0  # T
BETAS = (0.9, 0.95)  # T
WIDTHS = {"inner": 2, "outer": [1, 3]}  # T
ACTIVATION = torch.relu
SLACK = 0.01  # E
UNUSED = 5  # U
OTHER = {"a": 1}  # U


class Mode(enum.Enum):
    """Of what."""

    FAST = "fast"  # T
    SLOW = "slow"  # T


@dataclass
class Options:
    """Of the task."""

    rate: float
    mode: Mode = Mode.SLOW
    depth: int = 3  # T
    parts: list = field(default_factory=lambda: [1, 2])  # T

    def double(self):
        return self.rate * 2  # T
''',
    "helpers/deep": '''
"""Further below."""
from . import table

LOW, HIGH = -1.5, 2.5  # T


def curve(x, low=LOW):
    return max(low, min(x, HIGH)) + table.ROWS[0] + table.lookup("b")  # T
''',
    "helpers/table": """
ROWS = [0.5, 0.25]  # T
NAMES = {"b": 1, "c": 2}  # T
SPARE = 8  # U


def lookup(name):
    return NAMES[name] / 4  # T


def spare():
    return SPARE + 1  # U
""",
    "helpers/__init__": "",
}

KINDS = {"T": "training", "E": "evaluation", "U": "unused"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One edit: the text of a module after it, and what it belongs to."""

    module: str
    text: str
    kind: str
    what: str


def run(
    *, edits: int = 200, seed: int = 0, identify: Callable[[Task], TaskIdentity] = task_identity
) -> dict[str, object]:
    """Edit the project at random, one edit at a time, and count how the identity reacts.

    Args:
        edits: Number of edits.
        seed: Seed of the choice.
        identify: The identity that is tested.

    Returns:
        Edits by kind, ``false_reuse`` (an edit that training or evaluation depends on and whose
        digest stayed), ``needless`` (a digest that changed for an edit that it does not depend on),
        both with descriptions, and milliseconds for each identity.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {"false_reuse": [], "needless": []}
    began = time.perf_counter()
    with _Importer(identify) as importer:
        before = importer.identity(PROJECT)
        for edit in _chosen(rng, edits):
            counts[edit.kind] += 1
            after = importer.identity({**PROJECT, edit.module: edit.text})
            moved = (
                before.training_digest != after.training_digest,
                before.evaluation_digest != after.evaluation_digest,
            )
            for verdict in _judged(edit, moved):
                wrong[verdict].append(f"{edit.module}: {edit.what} ({edit.kind})")
    return {
        "edits": edits,
        **{f"{kind} edits": counts[kind] for kind in (*KINDS.values(), "neutral")},
        "false_reuse": len(wrong["false_reuse"]),
        "needless": len(wrong["needless"]),
        "wrong": [*wrong["false_reuse"], *wrong["needless"]],
        "ms_per_edit": round(1e3 * (time.perf_counter() - began) / (edits + 1), 2),
    }


def _judged(edit: Edit, moved: tuple[bool, bool]) -> Iterator[str]:
    training, evaluation = moved
    if edit.kind == "training" and not training:
        yield "false_reuse"
    if edit.kind == "evaluation" and not evaluation:
        yield "false_reuse"
    if edit.kind != "training" and training:
        yield "needless"
    if edit.kind in ("unused", "neutral") and evaluation:
        yield "needless"


def _chosen(rng: random.Random, number: int) -> Iterator[Edit]:
    """Yield random edits.

    Two of three are meaningful, with a share for evaluation, and the rest is neutral.
    """
    meant: dict[str, list[Edit]] = {kind: [] for kind in KINDS.values()}
    for module, text in PROJECT.items():
        for edit in _meaningful(module, text):
            meant[edit.kind].append(edit)
    for _ in range(number):
        kind = rng.choices([*KINDS.values(), "neutral"], weights=[9, 4, 1, 6])[0]
        yield _neutral(rng) if kind == "neutral" else rng.choice(meant[kind])


def _meaningful(module: str, text: str) -> Iterator[Edit]:
    """Yield replacements of each constant and each operator of the lines that have a mark."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.expr | ast.stmt):
            continue
        line = node.lineno
        mark = lines[line - 1].rpartition("  # ")[2]
        if mark not in KINDS or node.end_lineno != line:
            continue
        segment = ast.get_source_segment(text, node)
        for new in _replacements(node, segment):
            start, stop = node.col_offset, node.end_col_offset
            changed = lines[line - 1][:start] + new + lines[line - 1][stop:]
            edited = [*lines[: line - 1], changed, *lines[line:]]
            what = f"line {line}, {segment} becomes {new}"
            yield Edit(module=module, text="\n".join(edited) + "\n", kind=KINDS[mark], what=what)


def _replacements(node: ast.AST, segment: str) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, int | float):
            yield from (f"{node.value + 1}", f"({node.value} + 1e-3)", f"{node.value * 3 + 0.5}")
        elif isinstance(node.value, str):
            yield f"{node.value + 'x'!r}"
    elif isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        yield from (f"(({left}) % ({right}))", f"(({right}) - ({left}))")
    elif isinstance(node, ast.Compare):
        yield f"(not {segment})"


def _neutral(rng: random.Random) -> Edit:
    """Return an edit that changes nothing: comments, docstrings, layout."""
    module = rng.choice([name for name, text in PROJECT.items() if text])
    lines = PROJECT[module].splitlines()
    what, change = rng.choice(list(NEUTRAL.items()))
    edited = change(list(lines), rng)
    return Edit(module=module, text="\n".join(edited) + "\n", kind="neutral", what=what)


def _comment(lines: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(1, len(lines))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return [*lines[:at], f"{indent}# a remark {rng.random()}", *lines[at:]]


def _end_comment(lines: list[str], rng: random.Random) -> list[str]:
    at = rng.choice([n for n, line in enumerate(lines) if line.strip() and '"""' not in line])
    lines[at] += "  # noted"
    return lines


def _docstring(lines: list[str], rng: random.Random) -> list[str]:
    found = [n for n, line in enumerate(lines) if line.strip().startswith('"""')]
    if not found:
        return ['"""New."""', *lines]
    at = rng.choice(found)
    lines[at] = lines[at].replace('"""', f'"""{rng.randrange(99)} ', 1)
    return lines


def _new_docstring(lines: list[str], rng: random.Random) -> list[str]:
    found = [n for n, line in enumerate(lines) if line.lstrip().startswith("def ")]
    if not found:
        return _comment(lines, rng)
    at = rng.choice(found)
    indent = " " * (len(lines[at]) - len(lines[at].lstrip()) + 4)
    return [*lines[: at + 1], f"{indent}'New.'", *lines[at + 1 :]]


def _blank(lines: list[str], rng: random.Random) -> list[str]:
    at = rng.randrange(1, len(lines))
    return [*lines[:at], *[""] * rng.randrange(1, 4), *lines[at:]]


def _parentheses(lines: list[str], rng: random.Random) -> list[str]:
    found = [n for n, line in enumerate(lines) if line.lstrip().startswith("return ")]
    if not found:
        return _blank(lines, rng)
    at = rng.choice(found)
    head, _, value = lines[at].partition("return ")
    value, _, mark = value.partition("  # ")
    lines[at] = f"{head}return (\n{head}        {value}\n{head})" + (f"  # {mark}" if mark else "")
    return lines


def _annotated(lines: list[str], rng: random.Random) -> list[str]:
    found = [n for n, line in enumerate(lines) if line.lstrip().startswith("def ") and ")" in line]
    found = [n for n in found if not lines[n - 1].lstrip().startswith("@")]
    if not found:
        return _blank(lines, rng)
    at = rng.choice(found)
    lines[at] = lines[at].replace("):", ") -> object:")
    return lines


def _tidied(lines: list[str], rng: random.Random) -> list[str]:  # noqa: ARG001
    """Return the lines as a formatter would write them."""
    return ast.unparse(ast.parse("\n".join(lines))).splitlines()


NEUTRAL = {
    "a comment": _comment,
    "a comment at the end of a line": _end_comment,
    "a docstring": _docstring,
    "a new docstring": _new_docstring,
    "blank lines": _blank,
    "parentheses": _parentheses,
    "an annotation": _annotated,
    "another formatter": _tidied,
}


def by_source_only(task: Task) -> TaskIdentity:
    """Return the identity of older versions: the class's source, and attributes by ``repr``."""
    with asking_legacy():
        return TaskIdentity(training=dict(task.identity()), evaluation={})


class _Importer:
    """Importer of each version of the project, under the same names, from a folder of its own."""

    def __init__(self, identify: Callable[[Task], TaskIdentity]) -> None:
        self._identify = identify
        self._folder = tempfile.TemporaryDirectory()
        self._number = 0

    def __enter__(self) -> _Importer:
        self._wrote, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        return self

    def __exit__(self, *exc: object) -> None:
        sys.dont_write_bytecode = self._wrote
        self._forget()
        self._folder.cleanup()

    def identity(self, project: Mapping[str, str]) -> TaskIdentity:
        self._number += 1
        folder = Path(self._folder.name) / str(self._number)
        (folder / "helpers").mkdir(parents=True)
        for name, text in project.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        self._forget()
        with _first_on_path(str(folder)):
            return self._identify(importlib.import_module("task").task)

    def _forget(self) -> None:
        for name in PROJECT:
            module = name.replace("/", ".").removesuffix(".__init__")
            sys.modules.pop(module, None)


@contextmanager
def _first_on_path(folder: str) -> Iterator[Sequence[str]]:
    importlib.invalidate_caches()
    sys.path.insert(0, folder)
    try:
        yield sys.path
    finally:
        sys.path.remove(folder)


if __name__ == "__main__":
    for key, value in run().items():
        print(f"{key:20} {value}")
