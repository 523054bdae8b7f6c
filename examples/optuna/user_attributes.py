"""After Optuna's tutorial on user attributes: facts about a trial besides its value."""

import sklearn.datasets
import sklearn.model_selection
import sklearn.svm


def objective(trial):
    x, y = sklearn.datasets.load_iris(return_X_y=True)
    c = trial.suggest_float("c", 1e-7, 1e3, log=True)
    kernel = trial.suggest_categorical("kernel", ["linear", "poly", "rbf"])
    train_x, valid_x, train_y, valid_y = sklearn.model_selection.train_test_split(
        x, y, random_state=0
    )
    model = sklearn.svm.SVC(C=c, kernel=kernel)
    model.fit(train_x, train_y)
    trial.set_user_attr("support_vectors", int(model.n_support_.sum()))
    return 1.0 - model.score(valid_x, valid_y)


if __name__ == "__main__":
    import optuna

    study = optuna.create_study()
    study.optimize(objective, n_trials=20)
    print(study.best_trial.user_attrs)
