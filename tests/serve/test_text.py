"""Text from tokens as they come: the same as decoding all of them, and never more than a stop string leaves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jlora.cli.demo import DEMO
from jlora.serve.text import Decoding


def byte_tokenizer() -> Tokenizer:
    """One token a byte: most characters take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def word_tokenizer() -> Tokenizer:
    """Words that begin with a space, which the first of an answer loses."""
    words = ["▁the", "▁cat", "s", "▁", "▁é", "..", "<s>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<s>"))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>"])
    return made


TOKENIZERS = {
    "demo": Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json")),
    "bytes": byte_tokenizer(),
    "words": word_tokenizer(),
}
anyone = pytest.mark.parametrize("name", TOKENIZERS)


def pieces(tokenizer, tokens, stop=()):
    decoding = Decoding(tokenizer, stop)
    found = [decoding.add(token) for token in tokens]
    return [*found, decoding.finish()], decoding.stopped


@anyone
@given(data=st.data())
def test_pieces_are_the_decoded_whole(name, data):
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    found, stopped = pieces(tokenizer, tokens)
    assert "".join(found) == tokenizer.decode(tokens)
    assert not stopped


@given(st.text(max_size=12))
def test_no_half_characters(text):
    tokenizer = TOKENIZERS["bytes"]
    found, _ = pieces(tokenizer, tokenizer.encode(text).ids)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found if "\ufffd" not in text)


def test_bytes_that_are_no_characters_come_out_in_the_end():
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer.encode("aé").ids[:-1]  # half of é
    found, _ = pieces(tokenizer, tokens)
    assert found == ["a", "", "\ufffd"]


def cut(text, stop):
    """The naive rule, for one token a character: what is complete first decides, and then what begins first."""
    for end in range(len(text) + 1):
        begins = [text[:end].find(one) for one in stop if one in text[:end]]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(st.text("abé", max_size=20), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_stop_strings_end_the_text_before_them(text, stop):
    tokenizer = TOKENIZERS["bytes"]
    want, stops = cut(text, stop)
    decoding, shown = Decoding(tokenizer, stop), ""
    for token in tokenizer.encode(text).ids:
        shown += decoding.add(token)
        assert want.startswith(shown)  # nothing that is taken back
    assert (shown + decoding.finish(), decoding.stopped) == (want, stops)


def test_a_stop_string_that_ends_with_the_answer():
    decoding = Decoding(TOKENIZERS["bytes"], ["é"])
    first, second = TOKENIZERS["bytes"].encode("é").ids
    assert (decoding.add(first), decoding.add(second), decoding.stopped) == ("", "", True)
    assert decoding.finish() == ""


def test_without_a_tokenizer_there_is_no_text():
    assert pieces(None, [1, 2, 3]) == (["", "", "", ""], False)
