"""Keys in the header ``Authorization``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.lib.bearer_keys import read_bearer

KEYS = st.text("abc-._~+/=019", min_size=1)
SCHEME = st.tuples(*(st.sampled_from([letter, letter.upper()]) for letter in "bearer")).map("".join)


@given(scheme=SCHEME, gap=st.text(" \t", min_size=1, max_size=3), key=KEYS, end=st.text(" \t", max_size=2))
def test_bearer_scheme_ignores_case_and_white_space(scheme, gap, key, end):
    """Servers leave the value as it was sent."""
    assert read_bearer(f"{scheme}{gap}{key}{end}") == key


@given(scheme=st.sampled_from(["", "Basic", "Bearer", "Bearerx", "Token"]), key=KEYS)
def test_bearer_key_of_other_schemes_is_empty(scheme, key):
    """Without a scheme, without a key, and with another scheme."""
    text = scheme if scheme == "Bearer" else f"{scheme} {key}"

    assert read_bearer(text) == ""
