"""Command-line flags, generated from the configuration's model.

They are built only when a command needs them, so that `pgcdc --help` and small commands do not load the model.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand

from pgcdc.core.state import StateDir

CONFIG_OPTION = typer.Option(help="Configuration file. (default: pgcdc.yaml, if it exists)")
File = Annotated[Path | None, CONFIG_OPTION]
State = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="The state directory. (default: that of the configuration file, else .pgcdc)",
        envvar="PGCDC_STATE_DIR",
        metavar="PATH",
    ),
]
EPILOG = (
    "Every adapter also accepts these delivery settings: --ADAPTER-timeout, -max-retries, -backoff-base, -backoff-cap, "
    "-cb-max-failures, -cb-reset, -rate-limit, -rate-limit-burst, -on-exhausted, -on-drift and -dead-letter-limit. "
    "See docs/configuration.md."
)

TWO_WAY = ("streaming",)  # Switches whose default is neither on nor off


def find_state(given: Path | None, file: Path | None) -> StateDir:
    """The state directory that was given, or that of the configuration file, of which nothing else is read."""
    if given is None and (file or Path("pgcdc.yaml").exists()):  # else the model is not loaded: it takes half a second
        from pgcdc.config.layers import read_state_dir

        given = read_state_dir(file)
    return StateDir(given or Path(".pgcdc"))


class SettingsCommand(TyperCommand):
    """A command that accepts every setting as a flag, in addition to those of its function."""

    left_out: tuple[str, ...] = ()  # Settings that it does not accept
    taken: tuple[str, ...] = ()  # If set, it accepts only these

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "epilog": None if self.taken else EPILOG})
        self._own: list[str] | None = None

    def get_params(self, ctx: Any) -> list[Any]:
        """The settings, followed by the function's own flags."""
        if self._own is None:
            self._own = [param.name or "" for param in self.params]
            settings = [one for one in _make_params() if one.name not in self.left_out]
            settings = [one for one in settings if not self.taken or one.name in self.taken]
            self.params = [*settings, *self.params]
        return super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Adds advice for flags of the manual that do not exist here."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            from pgcdc.config.explain import advise

            advice = advise(str(getattr(error, "option_name", "")).lstrip("-"))
            if advice and hasattr(error, "message"):
                error.message, error.possibilities = f"No such option: {error.option_name}. {advice}", None  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Call the function with its own flags; it reads the settings with `given_flags`."""
        assert self.callback is not None
        return ctx.invoke(self.callback, **{name: ctx.params[name] for name in self._own or []})


def given_flags(ctx: typer.Context) -> dict[str, Any]:
    """The settings that were given as flags."""
    from pgcdc.config import Config

    given = {name: value for name, value in ctx.params.items() if name in Config.model_fields}
    return {name: value for name, value in given.items() if value is not None and value not in ((), [])}


@cache
def _make_params() -> list[Any]:
    from pgcdc.config.adapters import ENTRIES, FLAT_KEYS, shown_default
    from pgcdc.config.model import FIELDS, GROUPS
    from pgcdc.core.settings import is_switch

    parameters = []
    for name, field, setting in sorted(FIELDS, key=lambda one: (GROUPS.index(one[2].group), one[0] in FLAT_KEYS)):
        if setting.flag is None:
            continue
        adapter, option = FLAT_KEYS.get(name, ("", ""))
        own = ENTRIES[adapter].model_fields[option] if adapter else field
        switch, text = is_switch(field.annotation), field.description or ""
        kind: Any = bool | None if switch else list[str] | None if setting.is_repeated else str | None
        can_deny = switch and (own.default is True or name in TWO_WAY)
        flag = typer.Option(
            f"--{setting.flag}/--no-{setting.flag}" if can_deny else f"--{setting.flag}",
            *(f"--{adapter}-{alias}".replace("_", "-") for alias in setting.aliases),
            help=text if "(default" in text else text + shown_default(field),
            metavar=None if switch else setting.metavar or _choices(field.annotation),
            rich_help_panel=setting.group,
            hidden=setting.is_hidden,
            show_default=False,
        )
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, flag])
        )

    def settings(**given: Any) -> None:
        pass

    settings.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    settings.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(settings)
    return list(typer.main.get_command(app).params)


def _choices(annotation: Any) -> str:
    """The placeholder for the value in the help: its choices, if there are any."""
    parts = (annotation, *get_args(annotation))
    found = [one for part in parts for one in get_args(part) if isinstance(one, str)]
    return "|".join(dict.fromkeys(found)) or "TEXT"
