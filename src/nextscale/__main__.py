"""`python -m nextscale`."""

from nextscale.cli import main

main()
