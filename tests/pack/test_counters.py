import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thrifty as th
from tests.devices import here
from tests.pack._drive import Trial, together
from thrifty.pack import BlockOptions, ConcatenatedBackend, FusedBackend, SoloBackend, unpack_state


pytestmark = pytest.mark.usefixtures("device")


class Counting(nn.Module):
    step_counters = ("seen",)

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        # The result depends on the step, and the module is called twice in each step.
        return x * (1 + self.seen % 3)


class Task(th.Task):
    optimizer = th.SGD(lr="lr")
    batch_size = 4

    def data(self, hp):
        x = torch.linspace(-1, 1, 30).reshape(10, 3)
        return th.ArrayData(train=(x, x.sum(1, keepdim=True)), valid=(x, x.sum(1, keepdim=True)))

    def model(self, hp):
        counting = Counting()
        return nn.Sequential(nn.Linear(3, 4), counting, nn.Linear(4, 1), counting)

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model, batch):
        return {"error": self.loss(model, batch)}


BACKENDS = {
    "solo": SoloBackend,
    "concatenated": ConcatenatedBackend,
    "fused": lambda task: FusedBackend(task, device=here(), block=BlockOptions(size=4)),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_each_step_counts_once_whoever_trains(name):
    """Each step counts once, in every back-end.

    Ten rows in batches of four make three steps an epoch. The trials, of 1, 2 and 3 epochs, leave
    one after the other, and the last one moves into the gap.
    """
    trials = [Trial(config={"lr": 0.01}, seed=k, epochs=k + 1) for k in range(3)]
    if name == "solo":
        found = [together(SoloBackend(Task(), device=here()), [trial])[0] for trial in trials]
    else:
        found = together(BACKENDS[name](Task()), trials)
    seen = [int(unpack_state(each.state)["model"]["1.seen"]) for each in found]
    assert seen == [3, 6, 9]
    wanted = [together(SoloBackend(Task(), device=here()), [trial])[0] for trial in trials]
    for one, other in zip(found, wanted, strict=True):
        assert one.metrics[-1]["error"] == pytest.approx(other.metrics[-1]["error"], rel=1e-4)


def test_packed_alone():
    torch.manual_seed(0)
    models = [Task().model(None) for _ in range(3)]
    packed = th.pack(models, loss=Task().loss, optimizer=th.SGD(lr=0.01))
    x = torch.ones(2, 3)
    for _ in range(5):
        packed.step((x, x[:, :1]))
    assert packed.fused
    assert [int(model[1].seen) for model in packed.models] == [5, 5, 5]


def test_one_after_the_other():
    models = [
        nn.Sequential(nn.Linear(3, width), Counting(), nn.Linear(width, 1)) for width in (2, 3)
    ]
    packed = th.pack(models, loss=Task().loss, optimizer=th.SGD(lr=0.01))
    for _ in range(5):
        packed.step((torch.ones(2, 3), torch.ones(2, 1)))
    assert not packed.fused
    assert [int(model[1].seen) for model in models] == [5, 5]
