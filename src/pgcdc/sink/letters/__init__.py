"""Dead letters: events that a target refuses for good, kept until somebody delivers them again or throws them away."""

from __future__ import annotations

from pgcdc.sink.letters.record import DeadLetter
from pgcdc.sink.letters.stores import DeadLetters, Dropped, Query, ReadableDeadLetters, StderrDeadLetters

__all__ = ["DeadLetter", "DeadLetters", "Dropped", "Query", "ReadableDeadLetters", "StderrDeadLetters"]
