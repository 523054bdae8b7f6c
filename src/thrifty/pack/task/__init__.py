"""What users write: tasks, hyper-parameters, optimizers, metrics and data."""
