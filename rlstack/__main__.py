"""`python -m rlstack` is the command `rlstack`."""

import sys

from rlstack.programs.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
