"""Text and ids: guarded text has no special tokens, and streams consist of whole characters."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rendering.conversations import hostile_texts, renderer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal_actors.models.built_in import SPECIAL_TOKENS, create_tiny_tokenizer
from areal_actors.rendering.tokens import LongText, Vocabulary, deferring_long_texts

ids = st.lists(st.integers(-5, 500), max_size=40)


def create_byte_level() -> Vocabulary:
    """The vocabulary of the other tests."""
    return renderer_of("CHATML").vocabulary


def create_sentence_piece() -> Vocabulary:
    """A vocabulary in the manner of SentencePiece: words with a bar in front, single bytes for everything else."""
    tokens = {"<s>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁hello": 257, "▁": 258, "x": 259}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Vocabulary.create(backend, special={0: "<s>"})


PIECES = ["▁hello", "▁", "x", "", "\ufffd", "▁▁", "##y", "é"]
DECODERS = {
    "llama": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)],
    "gemma": [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    "stripped twice": [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)],
    "stripped each": [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()],
    "replaced late": [decoders.Fuse(), decoders.Replace("xx", "z")],
    "metaspace": [decoders.Metaspace()],
    "word pieces": [decoders.WordPiece()],
    "fused": [decoders.Fuse()],
    "none": [],
}


def create_vocabulary(steps) -> Vocabulary:
    """A few odd tokens, single bytes, a special token and a hole, behind a decoder."""
    tokens = {"<s>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    tokens |= {text: 260 + number for number, text in enumerate(PIECES)}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[], byte_fallback=True))
    if steps:
        backend.decoder = steps[0] if len(steps) == 1 else decoders.Sequence(steps)
    return Vocabulary.create(backend, special={0: "<s>"})


VOCABULARIES = {name: create_vocabulary(steps) for name, steps in DECODERS.items()}


def stream(vocabulary, *chunks):
    """The text of ids that come in chunks."""
    detokenizer = vocabulary.open_detokenizer()
    return "".join(map(detokenizer.feed, chunks)) + detokenizer.finish()


@given(hostile_texts | st.text(max_size=20))
def test_guarded_text_has_no_special_tokens_and_reads_the_same(text):
    """Whatever foreign text spells out, the model sees characters; a lone surrogate becomes a replacement character."""
    vocabulary = create_byte_level()
    encoded = vocabulary.encode(vocabulary.guard(text))

    assert not set(encoded) & set(vocabulary.special)
    assert text.encode("utf-8", "replace").decode().replace("?", "") == vocabulary.decode(encoded).replace(
        "\ufffd", ""
    ).replace("?", "")


def test_overlapping_special_tokens_are_all_broken():
    """Breaking one token does not complete another."""
    backend = create_tiny_tokenizer(more_special=("ab", "bc", "abab")).backend_tokenizer
    special = {backend.token_to_id(text): text for text in (*SPECIAL_TOKENS, "ab", "bc", "abab")}
    vocabulary = Vocabulary.create(backend, special=special)

    for text in ("abc", "abab", "aabbc", "ababab"):
        assert text == vocabulary.decode(encoded := vocabulary.encode(vocabulary.guard(text)))
        assert not set(encoded) & set(special)


def test_unguarded_text_has_its_special_tokens():
    """The template's own markup is markup."""
    assert [1, 2] == create_byte_level().encode("<|im_start|><|im_end|>")


@pytest.mark.parametrize("name", ["bytes", *DECODERS])
@given(ids=ids)
def test_streamed_text_equals_decoded_text(name, ids):
    """Ids one by one, at once and in any chunks give one text; ids that do not exist give none."""
    vocabulary = {"bytes": create_byte_level(), **VOCABULARIES}[name]

    assert vocabulary.decode(ids) == stream(vocabulary, *([i] for i in ids)) == stream(vocabulary, ids[:7], ids[7:])


@given(ids=ids)
def test_byte_level_decoding_is_the_tokenizer_s(ids):
    """Our decoding of bytes, which is incremental, is the tokenizer's own."""
    vocabulary = create_byte_level()
    known = [i for i in ids if 0 <= i < vocabulary.size]

    assert vocabulary.backend.decode(known, skip_special_tokens=False) == vocabulary.decode(ids)


@pytest.mark.parametrize("name", ["bytes", "sentence piece", "llama", "gemma", "metaspace"])
@given(
    texts=st.lists(st.sampled_from(["▁hello", "▁", "x", "é", "<s>"]) | st.characters(codec="utf-8"), max_size=9),
    cut=st.integers(0, 20),
)
def test_token_bytes_join_to_the_text(name, texts, cut):
    """Also where a token is a part of a character, and however the ids come in chunks."""
    vocabulary = {"bytes": create_byte_level(), "sentence piece": create_sentence_piece(), **VOCABULARIES}[name]
    sampled = []
    for text in texts:
        token_id = None if name == "bytes" else vocabulary.backend.token_to_id(text)
        of_bytes = [vocabulary.backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
        is_spelled = token_id is None and None not in of_bytes and name != "metaspace"
        sampled += of_bytes if is_spelled else vocabulary.encode(text) if token_id is None else [token_id]
    joined = vocabulary.token_bytes(sampled)

    assert b"".join(joined).decode() == vocabulary.decode(sampled)
    assert joined == vocabulary.token_bytes(sampled[:cut]) + vocabulary.token_bytes(sampled[cut:], is_start=not cut)


@pytest.mark.parametrize("create", [create_byte_level, create_sentence_piece])
@pytest.mark.parametrize("text", ["hello hello", "😀😀é", "x€", "日本語 hello"])
def test_streamed_characters_are_whole(create, text):
    """No half characters, and no spaces lost between tokens."""
    vocabulary = create()
    detokenizer = vocabulary.open_detokenizer()
    pieces = [detokenizer.feed([token_id]) for token_id in vocabulary.encode(text)]

    assert text == "".join(pieces)
    assert "\ufffd" not in "".join(pieces)


def test_invalid_bytes_are_not_held_back_forever():
    """Bytes that never become a character become replacement characters, a few tokens later."""
    vocabulary = create_sentence_piece()
    detokenizer = vocabulary.open_detokenizer()

    assert "\ufffd" in detokenizer.feed([0xFF + 1] * 20)


def test_vocabulary_may_have_holes():
    """Ids without a token are left out."""
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
    backend.decoder = decoders.ByteLevel()

    assert "ab" == Vocabulary.create(backend, special={}).decode([0, 3, 5])


def test_truncation_of_tokenizer_files_is_switched_off():
    """Some tokenizer files truncate or pad; a prompt is neither."""
    backend = create_tiny_tokenizer().backend_tokenizer
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    vocabulary = Vocabulary.create(backend, special={})

    assert len("hello world") >= len(vocabulary.encode("hello world")) > 2


@given(st.lists(hostile_texts, min_size=1, max_size=4), st.integers(12_000, 22_000), st.booleans(), st.booleans())
def test_long_text_has_the_ids_that_it_would_have_at_once(texts, length, is_raw, is_start):
    """Deferred, tokenised elsewhere and asked for again; short texts are not deferred."""
    vocabulary, repeated = create_byte_level(), "".join(texts)
    text = vocabulary.guard(repeated * (length // max(len(repeated), 1)))
    encode = partial(vocabulary.encode_raw, text, is_start=is_start) if is_raw else partial(vocabulary.encode, text)
    encoded = {}
    with deferring_long_texts(encoded):
        try:
            ids = encode()
        except LongText as long:
            encoded[long.key] = long.encode()
            ids = encode()

    assert (len(text) >= 16_384) == bool(encoded)
    assert encode() == ids
