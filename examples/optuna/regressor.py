"""After Optuna's ``tensorboard_simple``: a small network for regression."""

import optuna
import sklearn.datasets
import sklearn.neural_network
import sklearn.preprocessing


def objective(trial):
    x, y = sklearn.datasets.load_diabetes(return_X_y=True)
    x = sklearn.preprocessing.StandardScaler().fit_transform(x)
    y = (y - y.mean()) / y.std()
    model = sklearn.neural_network.MLPRegressor(
        hidden_layer_sizes=[trial.suggest_int("width", 4, 64, log=True)],
        activation=trial.suggest_categorical("activation", ["relu", "tanh"]),
        learning_rate_init=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        random_state=0,
    )
    for epoch in range(9):
        model.partial_fit(x[:330], y[:330])
        error = float(((model.predict(x[330:]) - y[330:]) ** 2).mean())
        trial.report(error, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return error


if __name__ == "__main__":
    study = optuna.create_study()
    study.optimize(objective, n_trials=20)
    print(study.best_params)
