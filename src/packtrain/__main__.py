"""``python -m packtrain``."""

from packtrain.cli.app import main

main()
