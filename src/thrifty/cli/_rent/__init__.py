"""The command ``thrifty rent``."""

from ._command import command as command
