"""Runs the command line: ``python -m lbbsp_core`` is the command ``lbbsp``."""

from lbbsp_core.cli import main

if __name__ == "__main__":
    main()
