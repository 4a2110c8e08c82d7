"""``python -m tribe``: the command line, where its script is not on the path."""

from tribe.cli import main

main()
