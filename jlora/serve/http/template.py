"""The model's chat template: messages to the text of a prompt.

Templates are trusted as the weights beside them are. They run in Jinja2's immutable sandbox, with a bound on the length
of the output, and without a bound on time.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jlora.errors import LoRAError, LoRAUsageError

_FILE, _CONFIG, _TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
_MAX_FILE = 2**24  # bytes
_MAX_TEXT = 2**22  # characters of a prompt


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
        try:
            self._template = _environment().from_string(source)
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


class _Generation(Extension):
    """`{% generation %}`, which marks responses for training. The content is written as usual."""

    tags = {"generation"}  # noqa: RUF012 - required by Jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(functions)
    return environment


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> None:
    raise TemplateError(str(message)[:500])


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Encode JSON without HTML escapes, which do not belong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
