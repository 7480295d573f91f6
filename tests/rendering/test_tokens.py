"""Text and ids: guarded text brings no special tokens, and streams say whole characters."""

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


def decode_by_windows(vocabulary, token_ids):
    """The slow and obvious stream: each token is decoded behind the last group of tokens; one text per token."""

    def decode(ids):
        return vocabulary.backend.decode([i for i in ids if 0 <= i < vocabulary.size], skip_special_tokens=False)

    said, held = [], []
    for token_id in token_ids:
        held.append(token_id)
        text = decode([*said, *held])
        if text.endswith("\ufffd") and len(held) < 8:
            yield ""
        else:
            yield text[len(decode(said)) :]
            said, held = held, []
    yield decode([*said, *held])[len(decode(said)) :] if held else ""


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


@pytest.mark.parametrize("create", [create_byte_level, create_sentence_piece])
@given(ids=ids)
def test_streams_say_what_decoding_says(create, ids):
    """Ids one by one, at once and in any chunks give one text; ids that do not exist give none."""
    vocabulary = create()

    assert vocabulary.decode(ids) == stream(vocabulary, *([i] for i in ids)) == stream(vocabulary, ids[:7], ids[7:])


@pytest.mark.parametrize("name", DECODERS)
@given(ids=st.lists(st.sampled_from([-1, 0, 1, 0xC4, 0xAA, 0xF1, 258, *range(260, 271), 900]), max_size=30))
def test_tokens_with_pieces_say_what_windows_say(name, ids):
    """Where a token is looked up instead of decoded beside its neighbours, each delta is the same, whatever decodes."""
    vocabulary = VOCABULARIES[name]
    detokenizer = vocabulary.open_detokenizer()
    deltas = [*(detokenizer.feed([token_id]) for token_id in ids), detokenizer.finish()]
    windows = list(decode_by_windows(vocabulary, ids))

    assert windows == deltas
    assert "".join(windows) == vocabulary.decode(ids) == stream(vocabulary, ids[:5], ids[5:])


def test_usual_answers_are_looked_up():
    """Behind the first token, words of a SentencePiece vocabulary are decoded no more once they are known."""
    vocabulary = create_sentence_piece()
    vocabulary.decode([257, 257, 259])

    assert {257: " hello", 259: "x"} == dict(vocabulary._pieces)


@given(ids=ids)
def test_byte_level_decoding_is_the_tokenizer_s(ids):
    """Our decoding of bytes, which is incremental, is the tokenizer's own."""
    vocabulary = create_byte_level()
    known = [i for i in ids if 0 <= i < vocabulary.size]

    assert vocabulary.backend.decode(known, skip_special_tokens=False) == vocabulary.decode(ids)


@pytest.mark.parametrize("create", [create_byte_level, create_sentence_piece])
@pytest.mark.parametrize("text", ["hello hello", "😀😀é", "x€", "日本語 hello"])
def test_characters_come_whole(create, text):
    """No half characters, and no spaces lost between tokens."""
    vocabulary = create()
    detokenizer = vocabulary.open_detokenizer()
    pieces = [detokenizer.feed([token_id]) for token_id in vocabulary.encode(text)]

    assert text == "".join(pieces)
    assert "\ufffd" not in "".join(pieces)


def test_garbage_does_not_wait_for_ever():
    """Bytes that never become a character are said as replacement characters, a few tokens later."""
    vocabulary = create_sentence_piece()
    detokenizer = vocabulary.open_detokenizer()

    assert "\ufffd" in detokenizer.feed([0xFF + 1] * 20)


def test_vocabularies_may_have_holes():
    """Ids that stand for nothing are left out."""
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
def test_a_long_text_has_the_ids_that_it_would_have_at_once(texts, length, is_raw, is_start):
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
