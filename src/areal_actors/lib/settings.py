"""Marks on the fields of configuration classes: settings that most runs need, and fields that are no settings.

``config`` reads the marks. A configuration class is also the parameters of a component, so it may have limits that a
test or an embedding program changes, and that no user could choose well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address
from typing import Any, TypeVar

import attrs

T = TypeVar("T")

COMMON: Mapping[str, Any] = {"areal_actors.setting": "common"}
"""Metadata of a setting that ``areal-actors settings`` prints without ``--all``."""
_CONSTANT: Mapping[str, Any] = {"areal_actors.setting": "constant"}


def constant(default: T) -> T:
    """Declare a field that keeps its default in every configuration, and is no setting of a file."""
    value: T = attrs.field(default=default, metadata=_CONSTANT)
    return value


def check_host(_: Any, __: attrs.Attribute[str], host: str) -> None:
    """Validate an address to listen on: a name, or numbers that are an address. Raises ``ValueError``."""
    try:
        if re.fullmatch(r"[0-9.]+", host):
            IPv4Address(host)
    except ValueError as error:
        raise ValueError(f"must be a name or an address, such as 127.0.0.1: {error}") from None


def is_common(setting: attrs.Attribute[Any]) -> bool:
    """Return whether most runs need the setting."""
    return setting.metadata.get("areal_actors.setting") == "common"


def is_constant(setting: attrs.Attribute[Any]) -> bool:
    """Return whether a field is no setting."""
    return setting.metadata.get("areal_actors.setting") == "constant"
