"""Tokens as the two APIs show them in log probabilities: text and bytes."""

import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """Return the alphabet of byte-level tokenizers: printable Latin-1 for itself, other bytes from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class TokenTexts:
    """Texts of single tokens of a `tokenizers.Tokenizer`, including special tokens.

    Attributes:
      longest: characters of the longest token, as written in the vocabulary.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._letters = _byte_letters()
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.of = lru_cache(maxsize=65536)(self._of)

    def _of(self, token: int) -> tuple[str, bytes]:
        """Return a token's text with its leading space, and its bytes, which may be incomplete characters."""
        once, twice = (self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
        # Some decoders drop the space at the start of a text, so read the second of two tokens.
        text: str = twice[len(once) :] if twice.startswith(once) and len(twice) > len(once) else once
        name: str = self._tokenizer.id_to_token(token) or ""
        if "\ufffd" not in text or "\ufffd" in name:
            return text, text.encode()
        if found := _BYTE.fullmatch(name):
            return text, bytes([int(found[1], 16)])
        if all(letter in self._letters for letter in name):
            return text, bytes(self._letters[letter] for letter in name)
        return text, text.encode()

    def key(self, token: int) -> str:
        r"""Return the key of a token in `top_logprobs` of completions: its text, or `bytes:\xe2\x80` if incomplete."""
        text, raw = self.of(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw != text.encode() else text
