"""Secrets come from the environment or from files, and are never displayed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pgcdc.core.errors import ConfigError

_VARIABLE = re.compile(r"\$(\$?)\{([^}]*)\}")
_NAME = re.compile(r"([A-Za-z_]\w*)(?::-(.*))?", re.DOTALL)
_SECRET_KEY = re.compile(r"(^|_)(db|url|dsn|password|secret|token|key)(_|$)")
MAX_SECRET_BYTES = 64 << 10
MAX_SHOWN = 60


def read_secret(path: Path, what: str) -> str:
    """The content of a file without the trailing newline. Its ConfigError never quotes the content."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SECRET_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", f"This file must contain {what}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", f"This file must contain {what}") from None
    except ValueError:  # the path contains a NUL
        raise ConfigError(f"{str(path)!r} is not the path of a file", f"Name the file that contains {what}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if len(raw) > MAX_SECRET_BYTES or "\n" in text:
        raise ConfigError(f"{path} has more than one line", f"This file must contain only {what}")
    if not text.strip():
        raise ConfigError(f"{path} is empty", f"This file must contain {what}")
    return text


def expand(text: str, environ: Mapping[str, str], see: Callable[[str, str], None]) -> str:
    """Replace `${NAME}` and `${NAME:-default}` in a text; `$${` means a literal `${`.

    Calls `see` with each name and value. ConfigError: a variable is unset or empty, or a name is invalid.
    """

    def replace(found: re.Match[str]) -> str:
        if found[1]:
            return "${" + found[2] + "}"
        named = _NAME.fullmatch(found[2])
        if named is None:
            raise ConfigError("${...} must contain the name of a variable", "Write ${NAME}, or $${ for a literal ${")
        value = environ.get(named[1]) or named[2]
        if value is None:
            raise ConfigError(f"the variable {named[1]} is not set", f"Set it, or write ${{{named[1]}:-default}}")
        if environ.get(named[1]):
            see(named[1], value)
        return value

    return _VARIABLE.sub(replace, text)


def literal_part(text: str) -> str:
    """The part of a text that does not come from variables. A default (`${NAME:-default}`) is literal."""
    return _VARIABLE.sub(lambda found: found[2].partition(":-")[2] if not found[1] else found[0], text)


def hide(text: str, secrets: Iterable[str] | None = None) -> str:
    """Hide these values, or all known secrets of this process, in a message. Skips very short values, which would match
    everywhere."""
    for secret in sorted(
        (one for one in (_known if secrets is None else secrets) if len(one) > 3), key=len, reverse=True
    ):
        text = text.replace(secret, "***")
    return redact_text(text)


def redact_text(text: str) -> str:
    """Hide passwords in URLs and DSNs; rather too much than too little."""
    text = re.sub(r"(\w+://[^\s:/@'\"]*):[^\s'\"]*@", r"\1:***@", text)
    return re.sub(r"(?i)\b((?:ssl)?password|passwd|secret|token)(\s*[=:]\s*)('[^']*'|[^\s&'\",]+)", r"\1\2***", text)


def is_secret_name(key: str) -> bool:
    """Whether a setting with this name may hold a secret."""
    return _SECRET_KEY.search(key) is not None


def describe_value(key: str, value: Any) -> str:
    """` (got ...)` for an error message. Empty for possible secrets; only the kind for long values."""
    if is_secret_name(key):
        return ""
    if isinstance(value, Mapping):
        return " (got a mapping)"
    if isinstance(value, (list, tuple)):
        return " (got a list)"
    text = repr(value)
    return f" (got {redact_text(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '...')})"


# --- the secrets of this process: commands started by adapters must not find them in their environment

UNLIKELY_CHARS = 16  # Too long to appear in another text by chance
PART_CHARS = 8  # Too short: may be part of another text by chance
_OF_LIBPQ = ("PGPASSWORD", "PGSSLPASSWORD")
_known: set[str] = set()  # One set per process, like the environment


def remember_secrets(secrets: Iterable[str]) -> None:
    _known.update(one for one in secrets if one)


def clean_environment(environ: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """A command's environment: without pgcdc's own variables and without values that contain a known secret."""
    secrets = {*_known, *(environ.get(name, "") for name in _OF_LIBPQ)} - {""}
    return {
        name: value
        for name, value in environ.items()
        if name in keep
        or not (name.startswith("PGCDC_") or name in _OF_LIBPQ or any(_holds(value, secret) for secret in secrets))
    }


def _holds(value: str, secret: str) -> bool:
    """Whether a variable is the secret, contains it (a URL, DSN or header), or is part of it (`${FIRST}${SECOND}`).

    A short secret may be part of many words, so it only counts as a whole word; a very short one only where a password
    stands.
    """
    forms = {secret, quote(secret, safe="")}
    if value == secret or any(f":{form}@" in value or f"password={form}" in value for form in forms):
        return True
    if len(value) >= PART_CHARS and "://" not in secret and value in secret:
        return True
    if len(secret) >= UNLIKELY_CHARS:
        return any(form in value for form in forms)
    either = "|".join(map(re.escape, forms))
    return len(secret) >= PART_CHARS and bool(re.search(rf"(?:^|[:=\s\"',;&])(?:{either})(?:$|[@\s\"',;&])", value))
