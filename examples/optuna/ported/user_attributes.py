"""After Optuna's tutorial on user attributes: facts about a trial besides its value."""

import sklearn.datasets
import sklearn.model_selection
import sklearn.svm

import thrifty as th


@th.trainable
def objective(trial):
    x, y = sklearn.datasets.load_iris(return_X_y=True)
    c = trial.suggest_float("c", 1e-7, 1e3, log=True)
    kernel = trial.suggest_categorical("kernel", ["linear", "poly", "rbf"])
    train_x, valid_x, train_y, valid_y = sklearn.model_selection.train_test_split(
        x, y, random_state=0
    )
    model = sklearn.svm.SVC(C=c, kernel=kernel)
    for _ in trial.epochs({"model": model}):
        model.fit(train_x, train_y)
        error = 1.0 - model.score(valid_x, valid_y)
        yield {"error": error, "support_vectors": int(model.n_support_.sum())}


if __name__ == "__main__":
    algorithm = th.RandomSearch(max_epochs=1, num_trials=20)
    study = th.Study(objective, algorithm=algorithm, metric="error", mode="min", name="svc").run()
    print(study.best_trial)
