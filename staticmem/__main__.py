"""`python -m staticmem`."""

import sys

from staticmem.cli.main import main

sys.exit(main())
