"""A module with settings that training functions of tests read and write."""

SCALE = 1.0
