"""``python -m bcnet`` is the command line."""

from bcnet.cli.console import main

main()
