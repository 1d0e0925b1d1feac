"""``python -m specdist.cli``; with several ranks ``accelerate launch --module specdist.cli generate``."""

import sys

from specdist.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
