"""Module names without the prefixes that wrappers of PyTorch modules leave in them."""

import functools
import re

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
_LISTED = re.compile(r"\.experts\.(gate_up_proj|down_proj)s\.(?=\d+$)")
# DistributedDataParallel and DataParallel; a PEFT model inside another.
_LEADING = ("module.", "base_model.model.")


@functools.lru_cache(maxsize=1 << 15)
def readings(name: str) -> tuple[str, ...]:
    """Return the names that a module can have without wrappers: the name itself first, then shorter ones.

    A caller takes the first one that its model has. Tinker's `unembed_tokens` is read as `lm_head` too, and the lists
    of linear layers into which Unsloth divides the experts of gpt-oss as the parameters that they replace.
    """
    names = [name, ".".join(part for part in name.split(".") if part not in _WRAPPERS)]
    while (prefix := next((each for each in _LEADING if names[-1].startswith(each)), None)) is not None:
        names.append(names[-1].removeprefix(prefix))
    names.append(".".join(part for part in names[-1].split(".") if part != "module"))
    if names[-1].rpartition(".")[2] == "unembed_tokens":
        names.append("lm_head")
    names.append(_LISTED.sub(r".experts.\1.", names[-1]))
    return tuple(dict.fromkeys(reading for reading in names if reading))
