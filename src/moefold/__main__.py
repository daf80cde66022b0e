"""`python -m moefold`: the command line without the script."""

import sys

from moefold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
