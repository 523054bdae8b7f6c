"""After Optuna's ``pytorch_lightning_simple``: Lightning trains, and a callback reports."""

import logging

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import thrifty as th


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self, width, dropout):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, width),
            torch.nn.Dropout(dropout),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 10),
        )

    def training_step(self, batch, index):
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, index):
        right = self.layers(batch[0]).argmax(1) == batch[1]
        self.log("val_acc", right.float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def make_trainer(*callbacks):
    return lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
    )


@th.trainable
def objective(trial):
    lightning.seed_everything(0, verbose=False)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    train, valid = torch.utils.data.random_split(data, [1437, 360])
    model = Net(
        width=trial.suggest_int("width", 4, 64, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
    )
    for _ in trial.epochs({"model": model}):
        trainer = make_trainer()
        lightning.seed_everything(0, verbose=False)
        trainer.fit(model, DataLoader(train, 128, shuffle=True), DataLoader(valid, 360))
        yield {"accuracy": trainer.callback_metrics["val_acc"].item()}


if __name__ == "__main__":
    algorithm = th.RandomSearch(max_epochs=1, num_trials=10)
    study = th.Study(objective, algorithm=algorithm, metric="accuracy", name="with_lightning").run()
    print(study.best_trial.config)
