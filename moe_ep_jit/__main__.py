"""``python -m moe_ep_jit``: the command line, where its script is not on the path."""

import sys

from moe_ep_jit.cli import main

if __name__ == "__main__":
    sys.exit(main())
