"""Standard output for people: each paragraph is taken for the event whose position stands in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pgcdc.position import Position
from pgcdc.sink.stdout import StdoutSink
from targets.base import BaseTarget
from targets.events import line

__all__ = ["PrettyStdout"]

_POSITION = re.compile(r" position=([0-9A-F]{16}/[0-9A-F]{12}(?:\.[0-9A-F]{8})?) ")


class PrettyStdout(BaseTarget):
    """`pgcdc listen --stdout-format pretty > file`."""

    type, repeats, before_ack, large = "stdout", True, "stdout.before_ack", 4_000

    def __init__(self, folder: Path) -> None:
        self.acks, self._path = folder, folder / "stdout"
        self.stdout = str(self._path)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def options(self) -> Mapping[str, Any]:
        return {"format": "pretty"}

    def sink(self) -> StdoutSink:
        return StdoutSink(self.acks, self.name or self.type, descriptor=self._descriptor, format="pretty")

    def lines(self) -> list[str]:
        found = [_POSITION.search(text) for text in self._path.read_text().splitlines()]
        return [line(Position.parse(one[1])) if one else "?" for one in found]

    def wrong_options(self) -> Sequence[tuple[Mapping[str, Any], str]]:
        return [({"format": "xml"}, "format"), ({"colour": "red"}, "colour is not known")]

    def close(self) -> None:
        os.close(self._descriptor)
