"""The model's chat template: messages to the text of a prompt.

Templates come with models and are not trusted. They run in Jinja2's immutable sandbox, with bounds on the length of the
output, on strings and lists made by multiplication or concatenation, on powers and on time. Filters such as `replace`
have no bounds of their own, but their output counts once it is written.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.compiler import Frame as CompilerFrame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jlora.errors import LoRAError, LoRAUsageError

_FILE, _CONFIG, _TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_MAX_FILE = 2**24  # bytes
_MAX_TEXT = 2**22  # characters of a prompt, and of strings made by multiplication and concatenation
_MAX_SECONDS = 2.0


class ChatTemplate:
    """A compiled template with its special tokens.

    Args:
      source: The template in Jinja's language.
      tokens: {"bos_token": "<s>", ...}.
      max_text: The most characters of a prompt.

    Raises:
      LoRAError: the source is not a valid template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] = {}, *, max_text: int = _MAX_TEXT):
        self._max = max_text
        environment = _Sandbox(max_text)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise LoRAError(f"the chat template is not one that Jinja2 reads: {error}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> str:
        """Render the prompt of a chat.

        Args:
          messages: Role and content of each, with an optional name.
          variables: Further template variables: `add_generation_prompt`, and those of the request.

        Raises:
          LoRAUsageError: the template refuses the messages, fails, or exceeds its bounds; or a variable has a reserved
            name: messages, tools or a special token.
        """
        given = {**self._tokens, "messages": [dict(message) for message in messages], "tools": None}
        if taken := sorted(given.keys() & variables.keys()):
            raise LoRAUsageError(f"the chat template has a {taken[0]} of its own; leave it out")
        given |= variables
        parts: list[str] = []
        left = self._max
        with _Deadline(_MAX_SECONDS):
            try:
                for part in self._template.generate(given):
                    left -= len(part)
                    if left < 0:
                        raise LoRAUsageError(f"the chat template writes more than {self._max} characters")
                    parts.append(part)
            except LoRAError:
                raise
            except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise LoRAUsageError(f"the chat template cannot write these messages: {error}") from error
            except (RecursionError, MemoryError) as error:
                raise LoRAUsageError(f"the chat template goes beyond its bounds: {type(error).__name__}") from error
        return "".join(parts)


def load_template(folder: Path, own: Path | None = None) -> ChatTemplate | None:
    """Load the chat template of a model folder: `own`, else chat_template.jinja, else tokenizer_config.json.

    Returns:
      The template; None if there is none.

    Raises:
      LoRAError: a file is malformed, or a list of templates has none named "default".
    """
    config = _read_object(folder / _CONFIG)
    tokens: dict[str, str] = {}
    for name, value in (*_read_object(folder / _TOKENS).items(), *config.items()):
        text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    file = own or folder / _FILE
    if own is not None or file.is_file():
        return ChatTemplate(_read(file), tokens)
    source: Any = config.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in cast("list[Any]", source) if isinstance(one, dict)}
        source = named.get("default")
        if source is None:
            raise LoRAError(f"{folder / _CONFIG}: chat_template is a list without one named default")
    if source is not None and not isinstance(source, str):
        raise LoRAError(f"{folder / _CONFIG}: chat_template must be a text or a list of named ones")
    return None if source is None else ChatTemplate(source, tokens)


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_FILE:
            raise LoRAError(f"{file} is longer than {_MAX_FILE} bytes")
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoRAError(f"{file} cannot be read: {error}") from error


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise LoRAError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise LoRAError(f"{file} must hold a JSON object")
    return cast("dict[str, Any]", found)


# --- bounds -----------------------------------------------------------------------------------------------------------


class _Deadline:
    """Stops a template that takes too long, by tracing its lines. Also covers loops that write no output."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        self._end = time.monotonic() + self._seconds
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename == "<template>" else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > self._end:
            raise LoRAUsageError(f"the chat template took longer than {self._seconds:g} seconds")
        return self._line


class _Joins(CodeGenerator):
    """Routes `a ~ b` through the sandbox."""

    def visit_Concat(self, node: nodes.Concat, frame: CompilerFrame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}`, which marks responses for training. The content is written as usual."""

    tags = {"generation"}  # noqa: RUF012 - required by Jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Joins
    intercepted_binops = frozenset(["*", "**", "+"])

    def __init__(self, longest: int):
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._longest = longest
        self.filters["tojson"] = _tojson
        functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
        self.globals.update(functions)

    def joined(self, parts: Sequence[Any]) -> str:
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > self._longest:
            raise SecurityError(f"a text of more than {self._longest} characters")
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= 2**16 and abs(right) <= 64):
            raise SecurityError(f"{left!r:.40} ** {right!r:.40}")
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                counted = isinstance(one, str | list | tuple) and isinstance(times, int)
                if counted and len(cast(Sized, one)) * cast(int, times) > self._longest:
                    raise SecurityError(f"a text or list of more than {self._longest} items")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > 4096:
                raise SecurityError("a number of more than 4096 bits")
        if operator == "+" and isinstance(left, str | list | tuple) and len(cast(Sized, left)) > self._longest:
            raise SecurityError(f"a text or list of more than {self._longest} items")
        return super().call_binop(context, operator, left, right)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise TemplateError(str(message)[:500])


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Encode JSON without HTML escapes, which do not belong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
