"""``python -m lowtide``: the command line, if its script is not on the path."""

import sys

from lowtide.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
