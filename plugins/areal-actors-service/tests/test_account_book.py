"""Who may do what now."""

from __future__ import annotations

import pytest

from areal_actors.domain import Quotas
from areal_actors.domain.accounts import KEY_PREFIX, digest_of
from areal_actors.errors import InvalidRequest, NotFound, QuotaExceeded, Unauthorized
from areal_actors_service.accounts import AccountBook, Claim, Contents

NOON = 43_200.0
DAY = 86_400.0


def opened(book: AccountBook, user: str = "ada", *, now: float = NOON, **claims):
    """A key that is in the book."""
    issued = book.issue(Claim(user=user, **claims), now)
    book.put(issued.key, issued.user)
    return issued


def test_key_is_valid_until_it_expires():
    """At the second that was named, it does not any more; the text is that of a key that never was."""
    book = AccountBook()
    issued = opened(book, expires_at=NOON + 10)

    assert book.authenticate(issued.secret, NOON + 9.9).user.name == "ada"
    texts = set()
    for secret, now in ((issued.secret, NOON + 10), (f"{KEY_PREFIX}nobody", NOON), ("\udcff", NOON)):
        with pytest.raises(Unauthorized) as error:
            book.authenticate(secret, now)
        texts.add(error.value.message)
    assert len(texts) == 1


def test_key_repr_hides_the_secret():
    """Neither a representation nor what is remembered has the key in it."""
    issued = opened(AccountBook())

    assert issued.secret not in repr(issued)
    assert repr(issued.key.digest) not in repr(issued)
    assert issued.secret.startswith(KEY_PREFIX)
    assert digest_of(issued.secret) == issued.key.digest


def test_quotas_not_named_by_a_second_key_are_kept():
    """Quotas are the user's; a new key changes what it names, for the older keys, too."""
    book = AccountBook()
    first = opened(book, experiment="e", quotas=Quotas(max_sessions=3, max_tokens_per_day=9))
    second = opened(book, trial="t", quotas=Quotas(max_sessions=5))

    described = book.describe(first.key.id, NOON).user
    assert second.user == described
    assert ("e", "t") == (described.experiment, described.trial)
    assert Quotas(max_sessions=5, max_tokens_per_day=9) == described.quotas


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\u200b", "\ud800", "x" * 201])
def test_user_name_is_printable(name: str):
    """What is empty, invisible or endless is refused."""
    with pytest.raises(InvalidRequest):
        AccountBook().issue(Claim(user=name), NOON)


def test_user_name_is_normalised():
    """``é`` as one character and as two is the same letter."""
    book = AccountBook()

    assert opened(book, "Jos\u00e9").user == opened(book, " Jose\u0301 ").user
    assert "林さん" == opened(book, "林さん").user.name


def test_key_that_is_expired_already_is_refused():
    """That would be a mistake of whoever asks for it."""
    with pytest.raises(InvalidRequest, match="expired"):
        AccountBook().issue(Claim(user="ada", expires_at=NOON), NOON)


def test_quota_counts_requests_of_all_keys_of_a_user():
    """Two keys share one minute; another user has a minute of their own."""
    book = AccountBook()
    quotas = Quotas(max_requests_per_minute=2)
    ada, bob = opened(book, quotas=quotas).user, opened(book, "bob", quotas=quotas).user
    book.admit(ada, now=NOON, monotonic=0)
    book.admit(ada, now=NOON, monotonic=10)

    with pytest.raises(QuotaExceeded) as error:
        book.admit(ada, now=NOON, monotonic=20)
    assert error.value.retry_after_seconds == 40
    book.admit(bob, now=NOON, monotonic=20)
    book.admit(ada, now=NOON, monotonic=60)


def test_quota_counts_tokens_by_day():
    """The request that crosses the line is answered; the next one waits for midnight."""
    book = AccountBook()
    user = opened(book, quotas=Quotas(max_tokens_per_day=10)).user
    book.note_sampled("ada", 9, NOON)
    book.admit(user, now=NOON, monotonic=0)
    book.note_sampled("ada", 9, NOON)

    with pytest.raises(QuotaExceeded) as error:
        book.admit(user, now=NOON + 5, monotonic=0)
    assert error.value.retry_after_seconds == DAY - NOON - 5
    book.admit(user, now=DAY, monotonic=0)


def test_saved_usage_is_counted_once():
    """Before it is written, while it is, and after the file was read again."""
    book = AccountBook()
    book.note_sampled("ada", 3, NOON)
    writing = book.unsaved
    book.note_sampled("ada", 4, NOON)

    assert book.tokens_on("ada", 0) == 7
    book.note_saved(writing)
    assert book.tokens_on("ada", 0) == 7
    assert {("ada", 0): 4} == book.unsaved
    book.load(Contents(usage={("ada", 0): 3}))
    assert book.tokens_on("ada", 0) == 7


def test_unknown_key_id_is_named():
    """Whoever revokes reads which one it was."""
    with pytest.raises(NotFound, match="key_x"):
        AccountBook().describe("key_x", NOON)
