"""Text from outside is escaped where it could change the output, and ordinary text stays as it is."""

import pytest

from jlora.cli.text import one_line, shown_lines
from jlora.errors import printable


@pytest.mark.parametrize(
    "text", ["plain, with spaces", "größer 漢字　かな", "नमस्ते", "👩‍👩‍👧", "می‌خواهم", "C:\\x", "1\u00a0kg"]
)
def test_ordinary_text_stays(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b\x7f\0", r"\x9b\x7f\x00"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("\udcff\ud800", r"\udcff\ud800"),
    ],
)
def test_control_and_invisible_characters_are_escaped(text, expected):
    assert printable(text) == expected


def test_lines_of_an_answer_stay_and_are_indented():
    assert shown_lines("def f():\n\treturn\r\n\x1b[2J\rx", "  ") == "def f():\n  \treturn\n  \\x1b[2J\\rx"


def test_errors_become_one_short_line():
    assert one_line(ValueError("a\n  b\x1b")) == r"a b\x1b"
    assert one_line(MemoryError()) == "MemoryError"
    assert len(one_line("x" * 10**6)) == 2000
