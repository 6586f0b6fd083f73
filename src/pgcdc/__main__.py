"""`python -m pgcdc` is the command `pgcdc`."""

from pgcdc.cli.main import main

main()
