"""After Optuna's ``tensorboard_simple``: a small network for regression."""

import sklearn.datasets
import sklearn.neural_network
import sklearn.preprocessing

import thrifty as th


@th.trainable
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
    for _ in trial.epochs({"model": model}):
        model.partial_fit(x[:330], y[:330])
        error = float(((model.predict(x[330:]) - y[330:]) ** 2).mean())
        yield {"error": error}


if __name__ == "__main__":
    algorithm = th.ASHA(max_epochs=9, num_trials=20)
    study = th.Study(
        objective, algorithm=algorithm, metric="error", mode="min", name="regressor"
    ).run()
    print(study.best_trial.config)
