"""Module names without the prefixes that wrappers of PyTorch modules leave in them."""

import functools

# Attributes in which wrappers keep the module that they wrap: torch.compile, activation checkpointing, FSDP and its
# older forms, Lightning and Opacus. No layer of a model has such a name.
_WRAPPERS = frozenset(
    (
        "_orig_mod",
        "_checkpoint_wrapped_module",
        "_fsdp_wrapped_module",
        "_fpw_module",
        "_forward_module",
        "_module",
    )
)
WRAPPER = "|".join(sorted(_WRAPPERS))  # as a regular expression
# DistributedDataParallel and DataParallel; a PEFT model inside another.
_LEADING = ("module.", "base_model.model.")


@functools.lru_cache(maxsize=1 << 15)
def readings(name: str) -> tuple[str, ...]:
    """Return the names that a module can have without wrappers: the name itself first, then shorter ones.

    A caller takes the first one that its model has. Tinker's `unembed_tokens` is read as `lm_head` too.
    """
    parts = name.split(".")
    plain = ".".join(part for part in parts if part not in _WRAPPERS) if not _WRAPPERS.isdisjoint(parts) else name
    while (shorter := _without_leading(plain)) != plain:
        plain = shorter
    bare = ".".join(part for part in plain.split(".") if part != "module")
    tinker = "lm_head" if bare.rpartition(".")[2] == "unembed_tokens" else bare
    return tuple(dict.fromkeys(each for each in (name, plain, bare, tinker) if each))


def _without_leading(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _LEADING if name.startswith(prefix)), name)
