"""``python -m moc`` is the command ``moc``."""

from __future__ import annotations

import sys

from moc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
