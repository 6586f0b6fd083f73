"""Which version of pgoutput's protocol, and which of its options, a server gets.

The version follows from the server: 14 and later stream transactions while they run (protocol 2), 15 can decode two-phase
commits (3), 16 tells more about what it rolled back (4). What a server does not have is refused by
`WireOptions.check_server`, before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence

from pgcdc.postgres.database import quote_identifier, quote_literal
from pgcdc.source.postgres.options import WireOptions


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
