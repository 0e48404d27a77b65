"""`python -m copus_lightning.cli` is `copus`."""

import sys

from copus_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
