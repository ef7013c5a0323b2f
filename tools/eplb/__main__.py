"""`python -m whalepod.tools.eplb`: the same as `whalepod eplb`."""

from __future__ import annotations

import sys

from whalepod.tools.cli import run_app
from whalepod.tools.eplb.commands import eplb

if __name__ == "__main__":
    sys.exit(run_app(eplb, None))
