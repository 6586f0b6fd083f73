import sys

from pgcdc.run.verify.beside import run_child

sys.exit(run_child())
