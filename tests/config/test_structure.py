"""Structuring: strict, complete, and each mistake with its path."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen
from attrs.validators import ge, in_, le
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.config.structure import Mistakes, TypedText, create_converter
from areal_actors.errors import ConfigError


class Color(StrEnum):
    RED = "red"
    GREEN = "green"


@frozen(kw_only=True)
class Brush:
    width: int = field(default=1, validator=[ge(1), le(9)])
    color: Color = Color.RED


@frozen(kw_only=True)
class OilConfig:
    drying_days: int = 3


@frozen(kw_only=True)
class WaterColorConfig:
    wetness: float = 0.5


@frozen(kw_only=True)
class Pair:
    a: int = 1
    b: int = 2

    def __attrs_post_init__(self) -> None:
        if self.a > self.b:
            raise ConfigError(("a is too large", "b is too small"))


@frozen(kw_only=True)
class Painting:
    title: str
    brushes: tuple[Brush, ...] = ()
    medium: OilConfig | WaterColorConfig = field(factory=OilConfig)
    frame: Brush | None = None
    file: Path | None = None
    price: float = 0.0
    sold: bool = False
    finish: Literal["matt", "gloss"] = "matt"
    school: str = field(default="none", validator=in_(("none", "flemish")))
    extras: Mapping[str, Any] = field(factory=dict)
    tags: tuple[str, ...] = ()
    height: int | str = 1
    pair: Pair = field(factory=Pair)
    low: int = 0
    high: int = field(default=1)

    @high.validator
    def _above_low(self, _attribute: Any, value: int) -> None:
        if value <= self.low:
            raise ValueError(f"must be above low, which is {self.low}")


def structure(**data: Any) -> Painting:
    """A painting made of ``data``."""
    painting: Painting = create_converter(Path("/work")).structure({"title": "x", **data}, Painting)
    return painting


def mistakes(**data: Any) -> dict[str, str]:
    """What is wrong with ``data``, by path."""
    with pytest.raises(Mistakes) as caught:
        structure(**data)
    return {".".join(map(str, mistake.path)): mistake.text for mistake in caught.value.found}


def test_structure_reports_all_mistakes():
    """Wrong types, unknown keys, validators and nested sections come in one list."""
    brushes = [{"width": 0}, {"colour": "red"}, 7]

    found = mistakes(title=3, brushes=brushes, pirce=1.0, frame={"color": "rad"}, file=1, school="flemsh")

    assert found == {
        "title": "must be text, not 3; put quotes around it",
        "brushes.0.width": "must be >= 1, not 0",
        "brushes.1.colour": "is not a setting; did you mean color?",
        "brushes.2": "must be a section (width, color), not 7",
        "pirce": "is not a setting; did you mean price?",
        "frame.color": "must be one of red, green, not 'rad'; did you mean red?",
        "file": "must be a path, not 1; put quotes around it",
        "school": "must be one of none, flemish, not 'flemsh'; did you mean flemish?",
    }


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("low", True, "must be a whole number, not true"),
        ("low", "1", "must be a whole number, not '1'; leave out the quotes"),
        ("low", 1.0, "must be a whole number, not 1.0"),
        ("low", None, "must be a whole number, not null"),
        (
            "low",
            2**63,
            "must be a whole number from -9223372036854775807 to 9223372036854775807, not 9223372036854775808",
        ),
        ("price", "cheap", "must be a number, not 'cheap'"),
        ("price", False, "must be a number, not false"),
        ("price", 10**400, "must be a number that fits into a float, not 1" + "0" * 59 + "…"),
        ("sold", 1, "must be true or false, not 1"),
        ("sold", "yes", "must be true or false, not 'yes'"),
        ("finish", "silk", "must be one of matt, gloss, not 'silk'"),
        ("brushes", {"width": 1}, "must be a list of sections (width, color), not a mapping"),
        ("tags", "a", "must be a list of texts, not 'a'; write ['a']"),
        ("extras", [1], "must be a mapping, not a list of 1"),
        ("height", 1.5, "must be a whole number or text, not 1.5"),
        ("high", 0, "must be above low, which is 0"),
    ],
)
def test_structure_coerces_nothing(name, value, text):
    """A value of another type is refused, and the message shows it as it was written."""
    assert mistakes(**{name: value}) == {name: text}


def test_structure_keeps_valid_values():
    """Each kind of value in its own type; an empty section is one with its defaults."""
    painting = structure(
        brushes=[{"width": 2, "color": "green"}, None],
        price=3,
        finish="gloss",
        extras={"a": [1, {"b": TypedText("c")}]},
        height="tall",
    )

    assert painting.brushes == (Brush(width=2, color=Color.GREEN), Brush())
    assert type(painting.price) is float
    assert painting.extras == {"a": [1, {"b": "c"}]}
    assert type(painting.extras["a"][1]["b"]) is str
    assert painting.height == "tall"


def test_missing_required_setting_is_reported():
    """With what it must be."""
    with pytest.raises(Mistakes, match="is missing; it must be text"):
        create_converter(Path()).structure({}, Painting)


def test_union_is_chosen_by_keys():
    """The class that has the keys, or nearly has them, names the mistakes."""
    assert structure(medium={"wetness": 1}).medium == WaterColorConfig(wetness=1.0)
    assert structure(medium={"drying_days": 9}).medium == OilConfig(drying_days=9)
    assert mistakes(medium={"wetnes": 1}) == {"medium.wetnes": "is not a setting; did you mean wetness?"}
    assert mistakes(medium={"drying_days": "x"}) == {"medium.drying_days": "must be a whole number, not 'x'"}


def test_path_is_relative_to_its_file_or_the_working_directory():
    """A path from the file and one from the command line have different homes."""
    converter = create_converter(Path("/project/config"), typed_in=Path("/home/me"))

    assert converter.structure("a/b", Path) == Path("/project/config/a/b")
    assert converter.structure(TypedText("a/b"), Path) == Path("/home/me/a/b")
    assert converter.structure("/abs", Path) == Path("/abs")
    assert converter.structure("~/x", Path) == Path.home() / "x"


def test_mistake_of_a_whole_section_has_its_path():
    """Each problem of a ``ConfigError`` by itself, at the path of the section."""
    with pytest.raises(Mistakes) as caught:
        structure(pair={"a": 3})

    found = [(mistake.path, mistake.text) for mistake in caught.value.found]
    assert found == [(("pair",), "a is too large"), (("pair",), "b is too small")]


@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())))
def test_structure_accepts_or_refuses_any_data(data):
    """Nothing but ``Mistakes`` comes out, whatever goes in."""
    with suppress(Mistakes):
        create_converter(Path()).structure(data, Painting)
