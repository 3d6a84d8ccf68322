"""`python -m tokentight`."""

from __future__ import annotations

from tokentight.cli.main import run

if __name__ == "__main__":
    run()
