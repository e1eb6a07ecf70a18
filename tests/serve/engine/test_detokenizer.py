"""Incremental text equals the decoded whole, and ends before stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jlora.cli.demo import DEMO
from jlora.serve.engine.detokenizer import Detokenizer, silent_tokens


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer of words with a leading space, which the first word of a text loses."""
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
UNKNOWN = 2  # ids beyond the tokenizer's, as in a padded vocabulary


def pieces(tokenizer, tokens, stop=()):
    silent = () if tokenizer is None else silent_tokens(tokenizer, tokenizer.get_vocab_size() + UNKNOWN)
    decoding = Detokenizer(tokenizer, stop, silent)
    found = [decoding.add(token) for token in tokens]
    return [*found, decoding.finish()], decoding.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_join_to_the_decoded_whole(name, data):
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + UNKNOWN - 1), max_size=30))
    found, stopped = pieces(tokenizer, tokens)
    assert "".join(found) == tokenizer.decode(tokens)
    assert not stopped


@given(st.text(max_size=12))
def test_pieces_have_no_half_characters(text):
    tokenizer = TOKENIZERS["bytes"]
    found, _ = pieces(tokenizer, tokenizer.encode(text).ids)
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found if "\ufffd" not in text)


class Measured:
    """A tokenizer that counts the tokens that it decodes, and those of its longest list."""

    def __init__(self, name):
        self.tokenizer, self.decoded, self.longest = TOKENIZERS[name], 0, 0

    def decode(self, tokens):
        self.decoded += len(tokens)
        self.longest = max(self.longest, len(tokens))
        return self.tokenizer.decode(tokens)


def test_invalid_bytes_are_decoded_in_linear_time():
    (first, _), letters = TOKENIZERS["bytes"].encode("é").ids, TOKENIZERS["bytes"].encode("abc" * 400).ids
    measured = Measured("bytes")
    decoding = Detokenizer(measured)
    shown = [decoding.add(token) for token in [*letters[:3], *[first] * 2000, *letters]]
    assert measured.decoded < 25 * len(shown)  # one after the other would be 2,000,000
    assert shown[:3] == ["a", "b", "c"]
    assert "".join(shown[:2300]).startswith("abc" + 2000 * "\ufffd" + "abc")  # at most an eighth late
    assert shown[-1] == "c"
    assert "".join(shown) + decoding.finish() == measured.decode([*letters[:3], *[first] * 2000, *letters])


def cut(text, stop):
    """Cut at the stop string that is complete first, and among those at the one that begins first."""
    for end in range(len(text) + 1):
        begins = [text[:end].find(one) for one in stop if one in text[:end]]
        if begins:
            return text[: min(begins)], True
    return text, False


def test_edges_of_an_answer():
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer.encode("aé").ids
    assert pieces(tokenizer, tokens[:-1]) == (["a", "", "\ufffd"], False)
    assert pieces(tokenizer, tokens[1:], ["é"]) == (["", "", ""], True)
    assert pieces(None, [1, 2, 3]) == (["", "", "", ""], False)


@given(st.text("abé", max_size=20), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_stop_strings_end_the_text_before_them(text, stop):
    tokenizer = TOKENIZERS["bytes"]
    want, stops = cut(text, stop)
    decoding, shown = Detokenizer(tokenizer, stop), ""
    for token in tokenizer.encode(text).ids:
        shown += decoding.add(token)
        assert want.startswith(shown)  # text is never taken back
    assert (shown + decoding.finish(), decoding.stopped) == (want, stops)


def test_tokens_without_text_are_not_decoded_repeatedly():
    tokenizer = TOKENIZERS["words"]
    recorded, size = Measured("words"), tokenizer.get_vocab_size()
    decoding = Detokenizer(recorded, (), silent_tokens(tokenizer, size + UNKNOWN))
    the, silent = tokenizer.token_to_id("▁the"), [size, tokenizer.token_to_id("<s>")] * 500
    found = [decoding.add(token) for token in (the, *silent, the)]
    assert found == ["the", *[""] * 1000, " the"]
    assert decoding.finish() == ""
    assert recorded.longest == 2


@pytest.mark.parametrize(
    ("name", "tokens", "lengths"),
    [
        ("bytes", "aé b", [0, 1, 1, 2, 3]),  # é is two of them
        ("words", ["▁the", "▁cat", "s", "<s>", "▁é", ".."], [0, 3, 7, 8, 8, 10]),  # the first loses its space
    ],
)
@pytest.mark.parametrize("stop", [(), ("é c", "s éx")])
def test_length_of_the_text_before_each_token(name, tokens, lengths, stop):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(tokens).ids if name == "bytes" else [tokenizer.token_to_id(word) for word in tokens]
    decoding, found = Detokenizer(tokenizer, stop, silent_tokens(tokenizer, tokenizer.get_vocab_size())), []
    for token in ids:
        found.append(decoding.length)
        decoding.add(token)
    assert found == lengths
    whole = tokenizer.decode(ids)
    for token, at in zip(ids, found, strict=True):
        if "\ufffd" not in (text := tokenizer.decode([token])):
            assert whole[at:].lstrip().startswith(text.strip())
