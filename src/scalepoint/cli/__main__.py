"""Entry point of `python -m scalepoint.cli`."""

from scalepoint.cli import main

main()
