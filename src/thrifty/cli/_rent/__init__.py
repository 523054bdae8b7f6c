"""The command ``thrifty rent``."""

from ._command import rent_command as rent_command
