"""``python -m thrifty.cli``."""

from thrifty.cli import main


main()
