"""Chat templates, their sources and their limits, and texts of tokens for log probabilities."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from jlora.errors import LoRAError, LoRAUsageError
from jlora.serve.http.responses import TokenTexts
from jlora.serve.http.template import ChatTemplate, load_template
from tests.serve.engine.test_detokenizer import byte_tokenizer

HI = [{"role": "user", "content": "hi"}]
CHATML = (
    "{% for m in messages %}\n    {{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source, messages=HI, tokens={}, **variables):  # noqa: B006 - read only
    return ChatTemplate(source, tokens, max_text=100_000).render(messages, variables)


def test_blocks_leave_no_empty_lines():
    """As in transformers, a block drops the line end after it and the spaces before it."""
    text = render(CHATML, [{"role": "system", "content": "s"}, *HI], add_generation_prompt=True)
    expected = "    <|im_start|>system\ns<|im_end|>\n\n    <|im_start|>user\nhi<|im_end|>\n\n<|im_start|>assistant\n"
    assert text == expected


def test_features_that_templates_use():
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", tokens={"bos_token": "B"}) == "Bhi"
    assert render("{% for m in messages %}{% break %}x{% endfor %}") == ""
    assert render("{% generation %}{{ messages[0]['content'] | trim }}{% endgeneration %}") == "hi"
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if tools is none and thinking %}y{% endif %}", thinking=True) == "y"
    assert (
        render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "1"
    )


def test_request_cannot_set_messages_or_tokens():
    for name in ("bos_token", "messages", "tools"):
        with pytest.raises(LoRAUsageError, match=f"{name} of its own"):
            ChatTemplate("x", {"bos_token": "B"}).render(HI, {"thinking": True, name: "X"})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('not like this') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__()[0] }}",
        "{{ 'a' * 10000000 }}",
        "{% for i in range(1000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_hostile_templates_are_refused(source):
    with pytest.raises(LoRAUsageError, match="chat template"):
        render(source)


def test_default_limit_of_text_is_4_mi_characters():
    assert len(ChatTemplate("{{ 'a' * 4194304 }}").render(HI, {})) == 2**22
    with pytest.raises(LoRAUsageError, match="4194304"):
        ChatTemplate("{{ 'a' * 4194304 }}b").render(HI, {})


def write(folder, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def loaded(folder, *given, **files):
    """Return the text of the template that a folder has after these files are written."""
    found = load_template(write(folder, **files), *given)
    return None if found is None else found.render(HI, {})


def test_sources_of_the_template(tmp_path):
    assert loaded(tmp_path) is None
    with pytest.raises(LoRAError, match="cannot be read"):
        load_template(tmp_path, tmp_path / "missing")
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    assert loaded(tmp_path, tokenizer_config__json={"bos_token": "<s>"}) is None
    assert loaded(tmp_path, tokenizer_config__json=config) == "<s></s>"
    without = {**config, "bos_token": None}
    special = {"bos_token": "<b>"}
    assert loaded(tmp_path, tokenizer_config__json=without, special_tokens_map__json=special) == "<b></s>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    assert loaded(tmp_path, tokenizer_config__json={"chat_template": named}) == "hi"
    with pytest.raises(LoRAError, match="default"):
        loaded(tmp_path, tokenizer_config__json={"chat_template": named[:1]})
    # A file of its own comes before the configuration, and that of the operator before both.
    config = {"chat_template": "one", "bos_token": "B"}
    assert loaded(tmp_path, tokenizer_config__json=config, chat_template__jinja="{{ bos_token }}2") == "B2"
    assert loaded(tmp_path, tmp_path / "mine", mine="three") == "three"


@pytest.mark.parametrize("config", ["{", "[]", '{"chat_template": 3}', '{"chat_template": "{% for %}"}'])
def test_malformed_template_config_is_refused(tmp_path, config):
    with pytest.raises(LoRAError):
        load_template(write(tmp_path, tokenizer_config__json=config))


def test_token_bytes_of_byte_level_tokens():
    """The bytes of tokens join to the text, although a token may be part of a character."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<eos>"])
    texts = TokenTexts(tokenizer)
    text = "a é 😀\n"
    ids = tokenizer.encode(text).ids
    assert b"".join(texts.of(token)[1] for token in ids).decode() == text
    assert texts.key(ids[0]) == "a"
    assert texts.key(ids[2]) == r"bytes:\xc3"
    assert texts.of(ids[1]) == (" ", b" ")
    assert texts.key(tokenizer.token_to_id("<eos>")) == "<eos>"


def test_token_bytes_of_sentencepiece_tokens():
    vocabulary = {"▁hello": 0, "hello": 1, "<0xC3>": 2, "<0xA9>": 3, "▁": 4, "�": 5}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    texts = TokenTexts(tokenizer)
    assert texts.of(0) == (" hello", b" hello")
    assert texts.of(1) == ("hello", b"hello")
    assert texts.of(2)[1] + texts.of(3)[1] == "é".encode()
    assert texts.key(2) == r"bytes:\xc3"
    assert texts.of(5) == ("�", "�".encode())
