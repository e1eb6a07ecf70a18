"""Run the command line as `python -m jlora`."""

import sys

from jlora.cli import main

sys.exit(main())
