"""`python -m lifecycle` is the command `lifecycle`."""

from __future__ import annotations

from lifecycle.cli import main

if __name__ == "__main__":
    main()
