"""A loop of the kind that wins speed-runs on CIFAR, in thrifty."""

import torch.nn.functional as F
from models import EPOCHS, conv_net, digits

import thrifty as th


class SpeedRun(th.Task):
    batch_size = 64
    optimizer = th.SGD(
        lr="lr",
        momentum=0.85,
        nesterov=True,
        weight_decay=5e-4,
        groups={"*bias": {"lr": th.times("lr", 8.0), "weight_decay": 0.0}},
    )
    average = th.EMA(0.9)

    def data(self, hp):
        train, valid = digits(batch_size=self.batch_size)
        return th.ArrayData(train=train, valid=valid)

    def model(self, hp):
        return conv_net()

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, label_smoothing=0.2)

    def metrics(self, model, batch):
        x, y = batch
        logits = model(x)
        accuracy = (logits.argmax(1) == y).float().mean()
        return {"accuracy": accuracy, "valid_loss": F.cross_entropy(logits, y)}


up = th.Linear(0.02, floor=0.1)
study = th.Study(
    SpeedRun(),
    th.Space(lr=up.then(th.Linear(0.1, floor=th.Choice([0.0, 0.01])), at=1)),
    algorithm=th.GridSearch(max_epochs=EPOCHS),
    metric="ema_valid_loss",
    mode="min",
    storage="sqlite:///port.db",
    name="speedrun",
)

if __name__ == "__main__":
    study.run()
    for trial in study.trials:
        print(trial.config["lr"], trial.values)
