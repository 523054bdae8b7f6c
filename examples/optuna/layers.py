"""After Optuna's ``pytorch_simple``: the depth, widths and optimizer of a network."""

import optuna
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


EPOCHS = 9


def define_model(trial):
    layers = []
    inputs = 64
    for i in range(trial.suggest_int("n_layers", 1, 3)):
        units = trial.suggest_int(f"n_units_l{i}", 4, 128)
        layers += [nn.Linear(inputs, units), nn.ReLU()]
        layers.append(nn.Dropout(trial.suggest_float(f"dropout_l{i}", 0.2, 0.5)))
        inputs = units
    return nn.Sequential(*layers, nn.Linear(inputs, 10))


def get_data():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def objective(trial):
    torch.manual_seed(0)
    model = define_model(trial)
    name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    lr = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=lr)
    (train_x, train_y), (valid_x, valid_y) = get_data()
    for epoch in range(EPOCHS):
        torch.manual_seed(epoch)
        model.train()
        for rows in torch.randperm(len(train_x)).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(valid_x).argmax(1) == valid_y
        accuracy = right.float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=20)
    print(study.best_params)
