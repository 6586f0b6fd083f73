"""Durations and sizes: what is read, what is refused, and that every setting of time takes units."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pgcdc.config import Config
from pgcdc.config.adapters import FLAT_KEYS
from pgcdc.core.settings import format_bytes, format_seconds, parse_bytes, parse_seconds, unit_of
from pgcdc.sink.spec import ADAPTERS, DeliveryOptions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1048576", 1 << 20),
        ("0", 0),
        ("512MB", 512 << 20),
        ("512 mb", 512 << 20),
        ("512M", 512 << 20),
        ("1GiB", 1 << 30),
        (" 1 GiB ", 1 << 30),
        ("1.5kb", 1536),
        ("2T", 2 << 40),
        ("100B", 100),
    ],
)
def test_bytes_are_read_with_their_unit(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", " ", "MB", "lots", "1 2", "1PB", "MB1", "0x10", "nan", "1,5GB", "1GBB"])
def test_bytes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5", 5), ("0", 0), ("1.5", 1.5), ("100ms", 0.1), ("90s", 90), ("30 m", 1800), (" 6H ", 21600), ("1d", 86400)],
)
def test_durations_are_read_with_their_unit(text: str, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "s", "soon", "1 2", "1w", "-5s", "1e3", "inf", "nan", "1,5s", "1h30m", "5us"]
)
def test_durations_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_seconds(text)


@given(st.integers(0, 10**9))
def test_what_is_shown_of_a_duration_is_read_as_the_same(ms: int) -> None:
    assert parse_seconds(format_seconds(ms / 1000)) == pytest.approx(ms / 1000, rel=1e-12)


@given(st.integers(0, 10**15 - 1))
def test_what_is_shown_of_a_size_is_read_as_the_same(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


def test_every_setting_that_is_a_time_or_a_size_takes_units() -> None:
    models: list[type[BaseModel]] = [Config, DeliveryOptions, *ADAPTERS.values()]
    name = re.compile(r"(timeout|delay|interval|backoff|reset|hold_limit|keep$|max_size|spool_limit)")
    fields = {
        f"{model.__name__}.{key}": field
        for model in models
        for key, field in model.model_fields.items()
        if key not in FLAT_KEYS
    }
    timed = {key: field for key, field in fields.items() if name.search(key)}
    assert len(timed) >= 8
    assert [key for key, field in timed.items() if unit_of(field) is None] == []
