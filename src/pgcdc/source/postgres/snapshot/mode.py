"""What becomes of the rows that are there when a slot is made."""

from __future__ import annotations

from pgcdc.core.errors import ConfigError

__all__ = ["SNAPSHOT_MODES", "choose_snapshot_mode"]

SNAPSHOT_MODES = ("initial", "never", "always", "initial_only")


def choose_snapshot_mode(given: str | None, *, temporary_slot: bool, start_from: str | None) -> str:
    """What the user says, or the default: a new slot gets the rows that are there, if it can be known which they are."""
    if given in (None, "never"):
        return "never" if given or temporary_slot or start_from else "initial"
    if temporary_slot:
        raise ConfigError(
            f"snapshot mode {given} needs a slot that stays: a temporary one loses its place with its connection",
            "Leave --temporary-slot out, or use --snapshot-mode never",
        )
    if start_from:
        raise ConfigError(
            f"snapshot mode {given} is for a new slot: of an old one it is not known which rows it began with",
            "Leave --start-from out with a new --slot-name, or use --snapshot-mode never",
        )
    return str(given)
