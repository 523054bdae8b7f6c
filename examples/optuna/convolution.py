"""After Optuna's ``pytorch_ignite_simple``: a convolutional network with pruning."""

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class Net(nn.Module):
    def __init__(self, trial):
        super().__init__()
        filters = trial.suggest_int("filters", 4, 16, log=True)
        self.convolution = nn.Conv2d(1, filters, 3)
        self.dropout = nn.Dropout(trial.suggest_float("dropout", 0.0, 0.5))
        self.linear = nn.Linear(filters * 9, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.convolution(x), 2))
        return self.linear(self.dropout(x.flatten(1)))


def objective(trial):
    torch.manual_seed(0)
    model = Net(trial)
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)
    for epoch in range(9):
        torch.manual_seed(epoch)
        model.train()
        for rows in torch.randperm(1437).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(x[1437:]).argmax(1) == y[1437:]).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=20)
    print(study.best_params)
