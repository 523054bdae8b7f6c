"""The workers of a job: who is present, how fast each is, how they talk."""
