"""Search for scikit-learn estimators."""
