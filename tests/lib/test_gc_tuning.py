"""A settled heap is one for the length of a block."""

from __future__ import annotations

import gc

import pytest

from areal_actors.lib.process_limits import tuned_gc


def test_the_collector_is_as_it_was_after_the_block():
    """What was there is permanent within, and new objects are looked at less often; an error changes nothing."""
    kept, before = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*before)
    with pytest.raises(KeyError), tuned_gc():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
        raise KeyError

    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    gc.set_threshold(*kept)


def test_a_collector_that_is_off_stays_off():
    """Whoever set its threshold to 0 meant it."""
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with tuned_gc():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
