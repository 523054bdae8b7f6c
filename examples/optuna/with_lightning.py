"""After Optuna's ``pytorch_lightning_simple``: Lightning trains, and a callback reports."""

import logging

import lightning
import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


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


class Pruning(lightning.Callback):
    def __init__(self, trial):
        self.trial = trial

    def on_validation_end(self, trainer, module):
        self.trial.report(trainer.callback_metrics["val_acc"].item(), trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


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


def objective(trial):
    lightning.seed_everything(0, verbose=False)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    train, valid = torch.utils.data.random_split(data, [1437, 360])
    model = Net(
        width=trial.suggest_int("width", 4, 64, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
    )
    trainer = make_trainer(Pruning(trial))
    lightning.seed_everything(0, verbose=False)
    trainer.fit(model, DataLoader(train, 128, shuffle=True), DataLoader(valid, 360))
    return trainer.callback_metrics["val_acc"].item()


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=10)
    print(study.best_params)
