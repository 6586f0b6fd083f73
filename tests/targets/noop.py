"""Nowhere: what it has is what its ack covers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pgcdc.core.position import Position
from targets.base import BaseTarget
from targets.events import WHOLE, up_to


class NoopTarget(BaseTarget):
    """What it has is what its ack covers."""

    type, before_ack, keeps = "noop", "sink.before_ack", False

    def __init__(self, folder: Path) -> None:
        self.acks = folder

    def lines(self) -> list[str]:
        try:
            ack = json.loads((self.acks / f"{self.name or self.type}.json").read_text())
            return up_to(Position.parse(ack["position"]))
        except FileNotFoundError:
            return []
        except ValueError:  # a test damaged it
            return WHOLE

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        return [({"path": "x"}, "unknown key path")]


TARGETS = {"noop": NoopTarget}
