"""Which version of pgoutput's protocol, and which of its options, a server gets.

The version follows from the server: 14 and later stream transactions while they run (protocol 2), 15 can decode two-phase
commits (3), 16 tells more about what it rolled back (4). What a server does not have is refused here, with the version
that has it, before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pgcdc.core.errors import ConfigError, SourceError
from pgcdc.postgres.database import quote_identifier, quote_literal

__all__ = ["MIN_SERVER", "WireOptions", "plugin_options", "protocol_version", "streaming_mode"]

MIN_SERVER = 12

_SINCE = {"messages": 14, "binary": 14, "two_phase": 15, "origin": 16}
_ORIGINS = ("any", "none")


@dataclass(frozen=True, slots=True)
class WireOptions:
    """What the server is asked for beside the rows of committed transactions."""

    streaming: bool | None = None
    """Large transactions come while they run, where the server can do that; they are handed out at their commit.

    None: yes, unless `messages` are wanted. The server does not say to which subtransaction a message in such a
    transaction belongs: one that was rolled back to a savepoint cannot be told from one that was committed.
    """
    messages: bool = False
    """Also logical messages (`pg_logical_emit_message`)."""
    two_phase: bool = False
    """Prepared transactions come at PREPARE TRANSACTION, and are handed out at COMMIT PREPARED."""
    origin: str = "any"
    """`none`: leave out what was replicated to the server from elsewhere."""
    binary: bool = False
    """Values travel in binary form where their type has one; they are handed out as text all the same."""

    @property
    def streams(self) -> bool:
        """Whether large transactions are asked for while they run."""
        return not self.messages if self.streaming is None else self.streaming

    def check(self, server_version: int) -> None:
        """Raise unless a server of this version (as `server_version_num`) can do that."""
        if self.origin not in _ORIGINS:
            raise ConfigError(f"origin {self.origin!r} is not known", f"Use one of: {', '.join(_ORIGINS)}")
        major = server_version // 10000
        if major < MIN_SERVER:
            raise SourceError(f"PostgreSQL {major} is too old", f"Use PostgreSQL {MIN_SERVER} or later")
        wanted = {
            "messages": self.messages,
            "binary": self.binary,
            "two_phase": self.two_phase,
            "origin": self.origin != "any",
        }
        for name, since in _SINCE.items():
            if wanted[name] and major < since:
                raise SourceError(
                    f"the option {name} needs PostgreSQL {since}, and this server is {major}",
                    f"Leave {name} out, or upgrade the server",
                )

    def check_slot(self, name: str, two_phase: bool) -> None:
        """Raise unless a slot that exists (`two_phase`: and decodes prepared transactions) can do that."""
        if self.two_phase and not two_phase:
            raise SourceError(
                f"slot {name!r} was made without two-phase decoding (pg_replication_slots.two_phase)",
                "Leave two_phase out, or use a new slot that is created with two_phase",
            )


def protocol_version(server_version: int, options: WireOptions) -> int:
    """The highest version that the server has, but 1 where nothing of the others is asked for."""
    if not options.streams and not options.two_phase:
        return 1
    return {14: 2, 15: 3}.get(server_version // 10000, 4 if server_version >= 160000 else 1)


def streaming_mode(server_version: int, options: WireOptions) -> str:
    """`off`, `on`, or `parallel`: then an abort says where and when it was."""
    if not options.streams or server_version < 140000:
        return "off"
    return "parallel" if server_version >= 160000 else "on"


def plugin_options(server_version: int, publications: Sequence[str], options: WireOptions) -> list[str]:
    """The options of START_REPLICATION, for a server that passed the check."""
    names = quote_literal(",".join(quote_identifier(name) for name in publications))
    given = [f"proto_version '{protocol_version(server_version, options)}'", f"publication_names {names}"]
    mode = streaming_mode(server_version, options)
    if mode != "off":
        given.append(f"streaming '{mode}'")
    if options.messages:
        given.append("messages 'true'")
    if options.two_phase:
        given.append("two_phase 'on'")
    if options.origin != "any":
        given.append(f"origin {quote_literal(options.origin)}")
    if options.binary:
        given.append("binary 'true'")
    return given
