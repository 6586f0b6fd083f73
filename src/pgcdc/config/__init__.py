"""Configuration of a pipeline: one model, filled from flags, `PGCDC_*` variables and `pgcdc.yaml`."""

from pgcdc.config.layers import load_config
from pgcdc.config.model import Config

__all__ = ["Config", "load_config"]
