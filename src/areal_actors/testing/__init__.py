"""Tools for tests, of this library and of yours: virtual time, fakes at the plug points, contract checks, strategies.

``engines`` has an engine without a model and ``faults`` one that corrupts its answers; ``engine_contract`` and
``journal_contract`` check the contracts of engines and journals; ``strategies`` and ``journal_events`` have strategies
for Hypothesis; ``serving`` has the real proxy in front of a script, ``families`` the chat templates of many models,
``gradients`` the exact bias of an estimator. Only virtual time is imported here: the rest needs Hypothesis or
transformers.
"""

from __future__ import annotations

from areal_actors.testing.virtual_time import AutojumpLoop, virtual_backend

__all__ = ["AutojumpLoop", "virtual_backend"]
