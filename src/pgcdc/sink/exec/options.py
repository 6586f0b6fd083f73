"""What the adapter `exec` is told."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from pgcdc.core.settings import setting, text_or_list
from pgcdc.sink.spec import SinkOptions

if TYPE_CHECKING:
    from pgcdc.sink.contract import Sink

__all__ = ["AckMode", "ExecOptions"]

AckMode = Literal["exit", "line", "write"]


def _split_words(value: Any) -> Any:
    """A text of a flag or variable, split as a shell would; nothing else of a shell is done."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise PydanticCustomError("not_parsed", "{reason}", {"reason": f"not a list of words: {error}"}) from None


def _split_names(value: Any) -> Any:
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


_LIST = text_or_list()


class ExecOptions(SinkOptions):
    """JSON lines to the standard input of a command."""

    command: str = setting("", "the command, as text for a shell: sh -c COMMAND")
    argv: Annotated[tuple[str, ...], BeforeValidator(_split_words), _LIST] = setting(
        (), "the command and its arguments as a list, without a shell"
    )
    ack: AckMode = setting(
        "exit",
        "when an event counts as delivered: exit (one process per batch, which ends with 0), line (the "
        "command prints a line for it) or write (the command has read it)",
    )
    keep_env: Annotated[tuple[str, ...], BeforeValidator(_split_names), _LIST] = setting(
        (), "variables that the command gets although they hold secrets of pgcdc"
    )

    @model_validator(mode="after")
    def _check(self) -> ExecOptions:
        if bool(self.command.strip()) == bool(self.argv):
            raise ValueError("command or argv is needed" if not self.argv else "command and argv are both given")
        if self.argv and not self.argv[0]:
            raise ValueError("the first word of argv is the command, and it is empty")
        if "\0" in self.command or any("\0" in word for word in self.argv):
            raise ValueError("a command cannot have a NUL in it")
        return self

    @property
    def words(self) -> list[str]:
        """What is executed."""
        return list(self.argv) or ["sh", "-c", self.command]

    def make(self) -> Sink:
        from pgcdc.sink.exec.sink import ExecSink

        return ExecSink(self)

    def place(self) -> str:
        return repr((self.command, self.argv))
