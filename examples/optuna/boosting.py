"""After Optuna's ``lightgbm_integration``: boosting that reports after some trees."""

import optuna
import sklearn.datasets
import sklearn.ensemble
import sklearn.model_selection


def objective(trial):
    x, y = sklearn.datasets.load_breast_cancer(return_X_y=True)
    train_x, valid_x, train_y, valid_y = sklearn.model_selection.train_test_split(
        x, y, test_size=0.25, random_state=0
    )
    model = sklearn.ensemble.GradientBoostingClassifier(
        learning_rate=trial.suggest_float("learning_rate", 0.01, 1.0, log=True),
        max_depth=trial.suggest_int("max_depth", 1, 5),
        subsample=trial.suggest_float("subsample", 0.5, 1.0, step=0.1),
        warm_start=True,
        random_state=0,
    )
    for step in range(9):
        model.set_params(n_estimators=2 * (step + 1))
        model.fit(train_x, train_y)
        accuracy = model.score(valid_x, valid_y)
        trial.report(accuracy, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return accuracy


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=20)
    print(study.best_params)
