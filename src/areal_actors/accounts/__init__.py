"""Users, their keys and their quotas: quota windows, the in-memory account book, and the file that stores it."""

from __future__ import annotations

from areal_actors.accounts.book import AccountBook, Claim
from areal_actors.accounts.keys import KEY_PREFIX, create_key, digest_of, is_user_key
from areal_actors.accounts.store import AccountStore, Contents
from areal_actors.accounts.windows import RateWindow, day_of, seconds_to_midnight

__all__ = [
    "KEY_PREFIX",
    "AccountBook",
    "AccountStore",
    "Claim",
    "Contents",
    "RateWindow",
    "create_key",
    "day_of",
    "digest_of",
    "is_user_key",
    "seconds_to_midnight",
]
