"""The task of ``legacy.sql``, a database of an older version. Do not edit the class."""

from __future__ import annotations

from thrifty.pack import SGD
from thrifty.search import GridSearch
from thrifty.space import Choice, Constant, Space, Step
from thrifty.study import Storage, Study
from thrifty.testing import LineTask


class Legacy(LineTask):
    """A line, as it was."""

    optimizer = SGD(lr="lr", momentum=0.5)

    def __init__(self, *, shift: float = 0.0) -> None:
        self.shift = shift

    def loss(self, model, batch):
        return super().loss(model, batch) + self.shift


def legacy_study(folder, *, name: str = "done", shift: float = 0.0) -> Study:
    return Study(
        Legacy(shift=shift),
        Space(lr=Choice([Constant(0.1), Step(0.1, [2]), Constant(0.05)])),
        algorithm=GridSearch(max_epochs=4),
        metric="mse",
        mode="min",
        storage=Storage(url=f"sqlite:///{folder}/legacy.db"),
        name=name,
        seed=int(name == "stopped"),
    )
