"""After Optuna's ``simple_pruning``: a linear classifier that reports after each pass."""

import optuna
import sklearn.datasets
import sklearn.linear_model
import sklearn.model_selection


def objective(trial):
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    train_x, valid_x, train_y, valid_y = sklearn.model_selection.train_test_split(
        x, y, test_size=0.25, random_state=0
    )
    alpha = trial.suggest_float("alpha", 1e-5, 1e-1, log=True)
    model = sklearn.linear_model.SGDClassifier(alpha=alpha, random_state=0)
    for step in range(27):
        model.partial_fit(train_x, train_y, classes=range(10))
        error = 1.0 - model.score(valid_x, valid_y)
        trial.report(error, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return error


if __name__ == "__main__":
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner())
    study.optimize(objective, n_trials=20)
    print(study.best_params)
