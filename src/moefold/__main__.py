"""`python -m moefold`: the command line for launchers that start a module, such as torchrun."""

import sys

from moefold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
