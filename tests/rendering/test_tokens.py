"""Text and ids: guarded text brings no special tokens, and streams say whole characters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rendering.conversations import hostile_texts, renderer_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from areal_actors.domain import ChatMessage
from areal_actors.models.built_in import SPECIAL_TOKENS, create_tiny_tokenizer
from areal_actors.rendering.tokens import LongText, Vocabulary, deferring_long_texts
from areal_actors_testing.families import FAMILIES

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
def test_streamed_text_equals_decoded_text(create, ids):
    """Ids one by one, at once and in any chunks give one text; ids that do not exist give none."""
    vocabulary = create()

    assert vocabulary.decode(ids) == stream(vocabulary, *([i] for i in ids)) == stream(vocabulary, ids[:7], ids[7:])


@pytest.mark.parametrize("name", DECODERS)
@given(ids=st.lists(st.sampled_from([-1, 0, 1, 0xC4, 0xAA, 0xF1, 258, *range(260, 271), 900]), max_size=30))
def test_piecewise_decoding_equals_windowed_decoding(name, ids):
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


@pytest.mark.parametrize("name", ["bytes", "sentence piece", "llama", "gemma", "metaspace"])
@given(
    texts=st.lists(st.sampled_from(["▁hello", "▁", "x", "é", "<s>"]) | st.characters(codec="utf-8"), max_size=9),
    cut=st.integers(0, 20),
)
def test_bytes_of_tokens_join_to_the_text(name, texts, cut):
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
def test_characters_come_whole(create, text):
    """No half characters, and no spaces lost between tokens."""
    vocabulary = create()
    detokenizer = vocabulary.open_detokenizer()
    pieces = [detokenizer.feed([token_id]) for token_id in vocabulary.encode(text)]

    assert text == "".join(pieces)
    assert "\ufffd" not in "".join(pieces)


def test_invalid_bytes_are_not_held_back_forever():
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


# --------------------------------------------------------------------------------------------------- shared segments


def create_tokenizer(name) -> Vocabulary:
    """A byte-level tokenizer whose added tokens, or what it does to a text, are as the name says."""
    backend = create_tiny_tokenizer().backend_tokenizer
    added = {
        "lstrip": AddedToken("<x>", special=True, lstrip=True),
        "rstrip": AddedToken("<x>", special=True, rstrip=True),
        "word": AddedToken("<x>", special=True, single_word=True),
        "normalized": AddedToken("<x>", special=True, normalized=True),
        "longer": AddedToken("a<|im_end|>", special=True),
        "space": AddedToken("\n\n", special=False, normalized=False),
    }
    if name in added:
        backend.add_special_tokens([added[name]]) if added[name].special else backend.add_tokens([added[name]])
    if name in ("metaspace", "prefix"):
        words = {"▁": 0, "a": 1, "▁a": 2, "<": 3, "x": 4, ">": 5, "?": 6}
        model = models.WordLevel(words, unk_token="?") if name == "metaspace" else backend.model
        tokens = [str(token.content) for token in backend.get_added_tokens_decoder().values()]
        backend = Tokenizer(model)
        backend.add_special_tokens(tokens)
        backend.pre_tokenizer = (
            pre_tokenizers.Metaspace(prepend_scheme="first")
            if name == "metaspace"
            else pre_tokenizers.ByteLevel(add_prefix_space=True)
        )
    if name == "lower":
        backend.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Lowercase()]
        )
    special = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
    return Vocabulary.create(backend, special=special)


TOKENIZERS = {
    name: create_tokenizer(name)
    for name in ("plain", "lstrip", "rstrip", "word", "normalized", "longer", "space", "metaspace", "prefix", "lower")
}
PARTS = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<x>", "a", " ", "\n\n", "é", "\u0301", "'s", "12", "\udc00", "a " * 90, "\n b" * 60]
)


@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(st.lists(PARTS, max_size=12), min_size=1, max_size=4))
def test_shared_segments_have_the_ids_that_they_would_have_in_place(name, texts):
    """Whatever the added tokens do to the white space and the words around them, and whatever was asked before."""
    vocabulary = TOKENIZERS[name]
    for text in map("".join, (*texts, *texts)):
        assert vocabulary.encode(text) == vocabulary.encode_prompt(text).tolist()


@given(st.sampled_from(sorted(FAMILIES)), hostile_texts, st.integers(1, 100))
def test_shared_segments_of_every_family_have_their_ids(name, text, length):
    """As their templates write conversations, with foreign text in them."""
    renderer = FAMILIES[name].create_renderer()
    message = ChatMessage(role="user", content=text * length)
    prompt = renderer.formatter.format([message], options={})

    assert renderer.vocabulary.encode(prompt) == renderer.render([message]).tolist()


def test_shared_segment_is_tokenised_once():
    """The second conversation with the same instructions tokenises its question only, at once."""
    vocabulary = create_tokenizer("plain")
    instructions = f"<|im_start|>system\n{'You are an agent. ' * 2_000}<|im_end|>\n"
    prompts = [f"{instructions}<|im_start|>user\nquestion {number}<|im_end|>\n" for number in range(2)]
    encoded = {}
    with deferring_long_texts(encoded):
        with pytest.raises(LongText) as first:
            vocabulary.encode_prompt(prompts[0])
        encoded[first.value.key] = first.value.encode()

        ids = [vocabulary.encode_prompt(prompt).tolist() for prompt in prompts]

    assert ids == [vocabulary.encode(prompt) for prompt in prompts]


def test_segments_are_forgotten_by_the_time_of_their_use():
    """At most 16 MiB are kept, those that were used last."""
    vocabulary = create_tokenizer("metaspace")
    prompts = ["<|im_start|>" + f"{number:02}" * 2**19 for number in range(24)]
    for prompt in prompts:
        vocabulary.encode_prompt(prompts[0])
        vocabulary.encode_prompt(prompt)
    known = []
    with deferring_long_texts({}):
        for prompt in prompts:
            try:
                vocabulary.encode_prompt(prompt)
            except LongText:
                known.append(False)
            else:
                known.append(True)

    assert known[0]
    assert known[1:] == [False] * known[1:].count(False) + [True] * known[1:].count(True)
    assert 0 < sum(known) < len(prompts)


def test_threads_share_segments():
    """Each thread has the right ids, whichever of them tokenises a segment first."""
    vocabulary = create_tokenizer("plain")
    prompts = [f"<|im_start|>{number % 5} {'word ' * 200}<|im_end|>{number}" for number in range(60)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(vocabulary.encode_prompt, prompts))

    assert [ids.tolist() for ids in found] == [vocabulary.encode(prompt) for prompt in prompts]
