"""A renderer is made from the files of a model."""

from __future__ import annotations

import json
from unittest.mock import patch

import pytest
from tests.rendering.conversations import TOOL, sample, say, write_call
from transformers import AutoTokenizer, ByT5Tokenizer

from areal_actors.errors import ConfigError, ModelError
from areal_actors.models.built_in import CHATML, create_tiny, create_tiny_tokenizer
from areal_actors.rendering import RendererConfig, create_renderer, load_renderer


def test_saved_model_is_loaded(tmp_path):
    """Template, special tokens and the end tokens of the generation config survive the disk."""
    create_tiny_tokenizer(more_special=("<|eot|>",)).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 384]}))
    renderer = load_renderer(tmp_path)
    made = create_renderer(create_tiny_tokenizer(more_special=("<|eot|>",)))

    assert (2, 384) == renderer.stop_token_ids
    assert made.render([say("user", "hi")]).tolist() == renderer.render([say("user", "hi")]).tolist()
    assert "hi" == renderer.parse([*renderer.vocabulary.encode("hi"), 384]).content


def test_tokenizer_of_a_built_in_model_is_the_one_that_transformers_chooses(tmp_path):
    """It is loaded without transformers, which takes long to import, and is equal to what that loads."""
    model = create_tiny(tmp_path)
    with patch.object(AutoTokenizer, "from_pretrained", side_effect=AssertionError):
        renderer = load_renderer(model)
    expected = create_renderer(AutoTokenizer.from_pretrained(model))
    found, chosen = renderer.vocabulary, expected.vocabulary

    assert chosen.special == found.special
    assert expected.stop_token_ids == renderer.stop_token_ids
    assert expected.tokenizer.to_str() == renderer.tokenizer.to_str()
    assert expected.render([say("user", "hi")]).tolist() == renderer.render([say("user", "hi")]).tolist()
    for text in ("", "a\nü 12", "<|im_start|>user\n <tool_call>{}</tool_call><|im_end|>", "\u2009\U0001f600"):
        assert chosen.encode(text) == found.encode(text)


@pytest.mark.parametrize("declared", [{"model_type": "qwen2"}, {}, [], {"model_type": "llama"}])
def test_other_tokenizers_are_chosen_by_transformers(tmp_path, declared):
    """For other types of models, transformers replaces some classes that a tokenizer was saved with."""
    create_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(declared))
    chosen = create_tiny_tokenizer()
    with patch.object(AutoTokenizer, "from_pretrained", return_value=chosen) as asked:
        load_renderer(tmp_path)

    assert (declared != {"model_type": "llama"}) == asked.called


@pytest.mark.parametrize(
    "settings", [{"add_bos_token": True}, {"eos_token": "<|other|>"}, {"extra_special_tokens": ["<|x|>"]}]
)
def test_tokenizer_that_its_settings_change_is_loaded_by_transformers(tmp_path, settings):
    """Its tokenizer.json alone would be another one."""
    model = create_tiny(tmp_path)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    expected = create_renderer(AutoTokenizer.from_pretrained(model))

    renderer = load_renderer(model)

    assert expected.vocabulary.special == renderer.vocabulary.special
    assert expected.stop_token_ids == renderer.stop_token_ids
    assert expected.tokenizer.to_str() == renderer.tokenizer.to_str()


def test_slow_tokenizers_are_refused(tmp_path):
    """Ids must come from one place; a tokenizer in Python has no backend to take over."""
    ByT5Tokenizer().save_pretrained(tmp_path)

    with pytest.raises(ModelError, match="no fast tokenizer"):
        load_renderer(tmp_path)


def test_models_that_cannot_be_loaded(tmp_path):
    """The message says what is missing, and where."""
    with pytest.raises(ModelError, match="No tokenizer can be loaded from"):
        load_renderer(tmp_path)
    tokenizer = create_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        create_renderer(tokenizer)
    create_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        load_renderer(tmp_path)


def test_settings_replace_what_is_recognised():
    """A template, a format, or none of it, by name."""
    replaced = create_renderer(create_tiny_tokenizer(template="{{ x"), config=RendererConfig(chat_template=CHATML))
    silent = create_renderer(
        create_tiny_tokenizer(), config=RendererConfig(tool_format="none", reasoning_format="think")
    )
    ids = sample(silent, f"<think>hm</think>{write_call({})}")

    assert "<|im_start|>user\nx<|im_end|>" in replaced.decode(replaced.render([say("user", "x")]))
    assert ("hm", write_call({}), ()) == (
        silent.parse(ids, tools=[TOOL]).reasoning,
        silent.parse(ids, tools=[TOOL]).content,
        silent.parse(ids, tools=[TOOL]).tool_calls,
    )


def test_unknown_formats_are_named():
    """With the nearest name that exists."""
    with pytest.raises(ConfigError, match=r"tool_format: no format is called 'hermse'.*did you mean hermes\?"):
        create_renderer(create_tiny_tokenizer(), config=RendererConfig(tool_format="hermse"))
