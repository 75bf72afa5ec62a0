"""`python -m glm5_plugins`: the command `glm5-plugins`."""

import sys

from glm5_plugins.cli import main

if __name__ == "__main__":
    sys.exit(main())
