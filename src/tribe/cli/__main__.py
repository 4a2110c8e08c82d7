"""``python -m tribe.cli`` is ``tribe``."""

from tribe.cli import main

main()
