"""Checks that vLLM and tpu-inference are releases that the plugin fits."""

import inspect
from typing import Any

import jlora

_KNOWN = "tpu-inference 0.32 and vLLM 0.32 or 0.33"


def check_parameters(owner: Any, name: str, parameters: str) -> None:
    """Raise `LoRAError` unless a function of a module or class has these parameters, separated by spaces."""
    label = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
    function = getattr(owner, name, None)
    if function is None:
        raise drift(f"{label}.{name}", "does not exist")
    found = list(inspect.signature(function).parameters)
    if found != parameters.split():
        raise drift(f"{label}.{name}", f"takes ({', '.join(found)}), not ({', '.join(parameters.split())})")


def drift(what: str, found: str) -> jlora.LoRAError:
    """Return the error for a part of vLLM or tpu-inference that is not as the plugin expects."""
    return jlora.LoRAError(
        f"{what} {found}: jlora's plugin for vLLM JAX fits {_KNOWN}. Install one of them, or report it (docs/vllm.md). "
        "VLLM_PLUGINS, the list of the plugins to load, starts vLLM without this one if jlora_vllm_jax is not in it"
    )
