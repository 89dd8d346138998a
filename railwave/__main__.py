"""Run the command line: `python -m railwave`."""

import sys

from railwave.cli import main

if __name__ == "__main__":
    sys.exit(main())
