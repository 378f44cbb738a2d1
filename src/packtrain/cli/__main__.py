"""``python -m packtrain.cli``: the command line where the console script is not on the path."""

from packtrain.cli.app import main

main()
