"""Secrets come from the environment or from files, and are never shown."""

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
    """A file's content without the final newline. The ConfigError never quotes it."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SECRET_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", f"This file must contain {what}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", f"This file must contain {what}") from None
    except ValueError:  # a NUL in it
        raise ConfigError(f"{str(path)!r} is not the path of a file", f"Name the file that contains {what}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if len(raw) > MAX_SECRET_BYTES or "\n" in text:
        raise ConfigError(f"{path} has more than one line", f"This file must contain only {what}")
    if not text.strip():
        raise ConfigError(f"{path} is empty", f"This file must contain {what}")
    return text


def expand(text: str, environ: Mapping[str, str], see: Callable[[str, str], None]) -> str:
    """The text with `${NAME}` and `${NAME:-default}` replaced; `$${` stands for `${`. `see` gets each name and value.
    ConfigError: a variable is unset, empty, or not a name."""

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
    """The part of a text that is not from variables; a default (`${NAME:-default}`) counts as literal."""
    return _VARIABLE.sub(lambda found: found[2].partition(":-")[2] if not found[1] else found[0], text)


def hide(text: str, secrets: Iterable[str] | None = None) -> str:
    """A message without these values, or without all known secrets of this process. Very short values are skipped: they
    would match everywhere."""
    for secret in sorted(
        (one for one in (_known if secrets is None else secrets) if len(one) > 3), key=len, reverse=True
    ):
        text = text.replace(secret, "***")
    return redact_text(text)


def redact_text(text: str) -> str:
    """Hides passwords inside URLs and DSNs; too much rather than too little."""
    text = re.sub(r"(\w+://[^\s:/@'\"]*):[^\s'\"]*@", r"\1:***@", text)
    return re.sub(r"(?i)\b((?:ssl)?password|passwd|secret|token)(\s*[=:]\s*)('[^']*'|[^\s&'\",]+)", r"\1\2***", text)


def describe_value(key: str, value: Any) -> str:
    """` (got ...)` for an error: empty for possible secrets, only the kind for long values."""
    if _SECRET_KEY.search(key):
        return ""
    if isinstance(value, Mapping):
        return " (got a mapping)"
    if isinstance(value, (list, tuple)):
        return " (got a list)"
    text = repr(value)
    return f" (got {redact_text(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + '...')})"


# --- this process's secrets: adapters' commands must not find them in their environment

UNLIKELY_CHARS = 16  # A secret this long is in no other text by chance
PART_CHARS = 8  # A shorter text is part of another by chance
_OF_LIBPQ = ("PGPASSWORD", "PGSSLPASSWORD")
_known: set[str] = set()  # One set for the whole process, as there is one environment


def remember_secrets(secrets: Iterable[str]) -> None:
    _known.update(one for one in secrets if one)


def clean_environment(environ: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """A command's environment without pgcdc's own variables and any value that holds a known secret."""
    secrets = {*_known, *(environ.get(name, "") for name in _OF_LIBPQ)} - {""}
    return {
        name: value
        for name, value in environ.items()
        if name in keep
        or not (name.startswith("PGCDC_") or name in _OF_LIBPQ or any(_holds(value, secret) for secret in secrets))
    }


def _holds(value: str, secret: str) -> bool:
    """Whether a variable is the secret, contains it (a URL, DSN or header), or is part of it (`${FIRST}${SECOND}`). A short
    secret is part of many words: it counts only as a whole one, and a very short one only in password positions."""
    forms = {secret, quote(secret, safe="")}
    if value == secret or any(f":{form}@" in value or f"password={form}" in value for form in forms):
        return True
    if len(value) >= PART_CHARS and "://" not in secret and value in secret:
        return True
    if len(secret) >= UNLIKELY_CHARS:
        return any(form in value for form in forms)
    either = "|".join(map(re.escape, forms))
    return len(secret) >= PART_CHARS and bool(re.search(rf"(?:^|[:=\s\"',;&])(?:{either})(?:$|[@\s\"',;&])", value))
