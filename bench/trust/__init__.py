"""User code that tries to break the promise that sharing never changes the answer."""
