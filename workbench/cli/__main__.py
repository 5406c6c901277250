"""`python -m workbench.cli`, for where the script is not on the path."""

import sys

from workbench.cli import main

sys.exit(main())
