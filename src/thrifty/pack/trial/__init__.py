"""One trial: its steps, its evaluation, and checks of its state and its data."""
