"""``python -m unbroken.cli``."""

from unbroken.cli.app import main

main()
