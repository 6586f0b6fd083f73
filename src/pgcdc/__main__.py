"""`python -m pgcdc` is the command `pgcdc`."""

import sys


def run() -> None:
    """The command. Ctrl-C while its modules are loaded ends it without a traceback."""
    try:
        from pgcdc.cli.main import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
