"""Multi-LoRA serving for JAX, with many PEFT adapters on one Flax model and one adapter for each sequence.

The public names, and JAX with them, are imported when the first of them is used. So `jlora --help` does not import JAX,
and Ctrl-C is handled while JAX is being imported.
"""

# ruff: noqa: F403, F405 - a type checker finds the names in `_public`
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jlora import models as models
    from jlora import ops as ops
    from jlora._public import *
    from jlora.integrations.linen import LinenModule as LinenModule

    __version__: str

__all__ = [
    "NOWHERE",
    "Adapter",
    "AdapterAccessError",
    "AdapterFormatError",
    "AdapterHandle",
    "AdapterInUseError",
    "AdapterInfo",
    "AdapterMismatchError",
    "AdapterNotFoundError",
    "AdapterUnavailableError",
    "BatchShape",
    "EmbedSpec",
    "ExpertsLoRA",
    "ExpertsSpec",
    "Histogram",
    "HistogramCounts",
    "Items",
    "LayerInfo",
    "LeaseInfo",
    "LinearSpec",
    "LinenModule",
    "LoRABatch",
    "LoRAConfig",
    "LoRAError",
    "LoRAManager",
    "LoRARequest",
    "LoRAUsageError",
    "LoadTimeoutError",
    "Mix",
    "ModuleLoRA",
    "NoFreeSlotError",
    "Preset",
    "ProductsSpec",
    "RowMap",
    "SavedHead",
    "SlotParam",
    "SlotRanks",
    "Stats",
    "Survey",
    "Trainer",
    "VerifyReport",
    "absorbed_delta",
    "active_from",
    "compiler_options",
    "einsum_spec",
    "expert_delta",
    "local_folder",
    "preset",
    "register_layer",
    "rows",
    "use",
]

if not TYPE_CHECKING:  # a type checker uses the imports above, and reports unknown names

    def __getattr__(name: str) -> object:
        if name == "models":
            import jlora.models

            return jlora.models
        if name == "ops":
            import jlora.ops

            return jlora.ops
        if name == "__version__":
            return _version()
        if name not in __all__:
            raise AttributeError(f"module 'jlora' has no attribute {name!r}")
        from jlora import _public

        if name == "LinenModule":
            from jlora.integrations.linen import LinenModule

            return LinenModule
        globals().update({public: getattr(_public, public) for public in __all__ if public != "LinenModule"})
        return globals()[name]


def _version() -> str:
    """Return the version of the installed package, or 0.0.0+unknown in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jlora")
    except PackageNotFoundError:
        return "0.0.0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "models", "ops"})
