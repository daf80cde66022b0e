"""Entry point of `python -m moefold`."""

import sys

from moefold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
