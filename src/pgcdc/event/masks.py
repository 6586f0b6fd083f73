"""Values that are hidden: a whole column at once, from text to text. NULL stays NULL."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgcdc.core.errors import ConfigError

REDACTED = "***REDACTED***"
DEFAULT_KEY_VARIABLE = "PGCDC_MASK_KEY"
MINIMUM_KEY_BYTES = 16
_BLOCK = 64

_DATE, _TIME = r"[0-9]{4,7}-[0-9]{2}-[0-9]{2}", r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
_OFFSET, _BC, _HEX = r"[+-][0-9]{2}(?::[0-9]{2}){0,2}", r"(?: BC)?", "[0-9a-fA-F]"
_COUNT = r"[+-]?[0-9]+(?:\.[0-9]+)?"
LOOKS: tuple[tuple[str, str], ...] = tuple(
    (rf"\A(?:{look})\z", zero_text)
    for look, zero_text in (
        (r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|NaN|-?Infinity", "0"),
        ("[tf]", "f"),
        (rf"{_DATE}{_BC}|-?infinity", "1970-01-01"),
        (rf"{_DATE} {_TIME}{_BC}", "1970-01-01 00:00:00"),
        (rf"{_DATE} {_TIME}{_OFFSET}{_BC}", "1970-01-01 00:00:00+00"),
        (_TIME, "00:00:00"),
        (rf"{_TIME}{_OFFSET}", "00:00:00+00"),
        (f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}", "00000000-0000-0000-0000-000000000000"),
        (rf"P(?:{_COUNT}[YMWD])*T(?:{_COUNT}[HMS])+|P(?:{_COUNT}[YMWD])+", "PT0S"),
        (rf"\\x(?:{_HEX}{_HEX})*", r"\x"),
        (r"\{[\s\S]*\}", "{}"),
        (r"\[[\s\S]*\]", "[]"),
    )
)
r"""What a value looks like (a regular expression for RE2) and the zero of that look.

Events carry PostgreSQL's text and not its type, so that the look decides. What looks like none of these becomes empty.
"""


def zero(values: pa.Array) -> pa.Array:
    """For each text the zero of its look."""
    look_of = np.zeros(len(values), np.int32)
    left = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    for number, (look, _) in enumerate(LOOKS, 1):
        if not len(left):
            break
        found = pc.match_substring_regex(values.take(pa.array(left)), look).to_numpy(zero_copy_only=False)
        look_of[left[found]] = number
        left = left[~found]
    return _pick(["", *(text for _, text in LOOKS)], look_of, values)


def redact(values: pa.Array) -> pa.Array:
    """The same mark for all."""
    return _pick([REDACTED], np.zeros(len(values), np.int32), values)


def _pick(texts: list[str], number_of: np.ndarray[tuple[int], np.dtype[np.int32]], values: pa.Array) -> pa.Array:
    mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return pa.array(texts, pa.string()).take(pa.array(number_of, mask=mask))


def hmac_texts(values: pa.Array, key: bytes) -> pa.Array:
    """HMAC-SHA256 of each text under `key`, in hexadecimal: the same value has the same one in every column.

    The two halves of an HMAC begin with a block that the key makes: it is hashed once, and not for each value.
    """
    block = (hashlib.sha256(key).digest() if len(key) > _BLOCK else key).ljust(_BLOCK, b"\0")
    inner, outer = (hashlib.sha256(bytes(byte ^ pad for byte in block)).copy for pad in (0x36, 0x5C))
    digests: list[str | None] = []
    for value in values.view(pa.binary()).to_pylist():
        if value is None:
            digests.append(None)
            continue
        message, digest = inner(), outer()
        message.update(value)
        digest.update(message.digest())
        digests.append(digest.hexdigest())
    return pa.array(digests, pa.string())


def read_key(key_env: str | None, key_file: str | None) -> bytes:
    """The key of a hash, of this host's environment or file. ConfigError if it is missing or too short to be one."""
    if key_file:
        try:
            key = Path(key_file).expanduser().read_bytes().strip()
        except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in it; RuntimeError: ~ of nobody
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"the key of a mask cannot be read: {key_file!r}: {reason}",
                "Give key_file a file that pgcdc can read, on the driver and on every executor",
            ) from error
        where = f"the file {key_file}"
    else:
        name = key_env or DEFAULT_KEY_VARIABLE
        key = os.environ.get(name, "").strip().encode()
        where = f"the variable {name}"
        if not key:
            raise ConfigError(
                f"mask with mode hash needs a key, and {where} is not set",
                "Set it for pgcdc and for Spark's executors (for example to the output of: openssl rand -hex 32), or give "
                "key_file",
            )
    if len(key) < MINIMUM_KEY_BYTES:
        raise ConfigError(
            f"the key of a mask in {where} has {len(key)} bytes, and can be guessed",
            f"Give it {MINIMUM_KEY_BYTES} bytes or more, for example the output of: openssl rand -hex 32",
        )
    return key
