"""`python -m mxep.integration` is the `mxep` command."""

from .start import main

main()
