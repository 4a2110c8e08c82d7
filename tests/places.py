"""Where tests find files: the repository, recorded numbers that it ships, and the shared folder beside it, if any."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent  # of the repository
DATA = TESTS / "goldens"  # recorded numbers
SHARED = ROOT.parent / "shared"  # more of them; not in a plain clone
