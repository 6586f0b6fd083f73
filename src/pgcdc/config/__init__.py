"""Configuration of a pipeline: one model, filled from flags, `PGCDC_*` variables and `pgcdc.yaml`."""

from __future__ import annotations

from pgcdc.config.layers import load_config
from pgcdc.config.model import TYPED_KEYS, Config

__all__ = ["TYPED_KEYS", "Config", "load_config"]
