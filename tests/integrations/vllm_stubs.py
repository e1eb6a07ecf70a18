"""Import tpu-inference's wheel without its requirements: what they would bring is absent, a stub, or a small real part.

The models, the layers, the loader's jitted functions and the runner's LoRA calls are those of the wheel. Attention, the
loading of weights and all of vLLM are not.
"""

import abc
import dataclasses
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = (
    *("PIL", "cloudpickle", "compressed_tensors", "einops", "fastapi", "gcsfs", "google", "humanize", "msgspec", "zmq"),
    *("numba", "opentelemetry", "pathwaysutils", "prometheus_client", "psutil", "ray", "regex", "requests", "sympy"),
    *("runai_model_streamer", "tokamax", "torch", "torchax", "torchvision", "tpu_info", "tqdm", "transformers"),
    *("uvicorn", "vllm", "xprof", "yaml", "nixl"),
)


class _StubType(abc.ABCMeta):
    """The type of stub classes: every attribute is one, and so are unions and items."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stub(name)
        setattr(cls, name, made)
        return made

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __getitem__ = __or__

    def __iter__(cls):
        return iter(())

    def __hash__(cls) -> int:
        return id(cls)

    def __eq__(cls, other: object) -> bool:
        return cls is other


def _stub(name: str) -> Any:
    """Return a class whose instances take any call: decorators return what they decorate, and others None."""

    def anything(self: Any, first: Any = None, *_: Any, **__: Any) -> Any:
        return first

    methods = {
        "__init__": lambda self, *_, **__: None,
        "__call__": anything,
        "__getattr__": lambda self, _: lambda *_, **__: None,
    }
    return _StubType(name, (), methods)


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stub(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _StubModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@dataclasses.dataclass
class LoRARequest:
    """The fields of vLLM's request that the plugin reads."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


@dataclasses.dataclass
class LoadLoRAAdapterRequest:
    """The fields of vLLM's request over HTTP."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class LoRAAdapterNotFoundError(Exception):
    """Stands for vLLM's."""


class EngineCore:
    """The engine's call that loads an adapter in the workers."""

    model_executor: Any

    def add_lora(self, lora_request: LoRARequest) -> bool:
        return self.model_executor.add_lora(lora_request)


class Executor:
    """The call of an executor that loads an adapter in its workers."""

    collective_rpc: Any

    def add_lora(self, lora_request: LoRARequest) -> bool:
        return all(self.collective_rpc("add_lora", args=(lora_request,)))


def _gen_lora_extra_hash_keys(request: Any) -> list[Any]:
    lora = request.lora_request
    return [("lora", lora.lora_name, lora.lora_path)] if lora else []


def generate_block_hash_extra_keys(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
    """Return the keys of one block: vLLM looks up the function that an integration may have replaced."""
    kv_cache_utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
    keys = [*kv_cache_utils._gen_lora_extra_hash_keys(request), *getattr(request, "other_keys", ())]
    return tuple(keys) or None, start_mm_idx


def install() -> None:
    """Let `tpu_inference` be imported in this process."""
    sys.meta_path.append(_Finder())
    real = [
        ("vllm.lora.request", LoRARequest),
        ("vllm.entrypoints.serve.lora.protocol", LoadLoRAAdapterRequest),
        ("vllm.exceptions", LoRAAdapterNotFoundError),
        ("vllm.v1.engine.core", EngineCore),
        ("vllm.v1.executor.abstract", Executor),
        ("vllm.v1.core.kv_cache_utils", _gen_lora_extra_hash_keys),
        ("vllm.v1.core.kv_cache_utils", generate_block_hash_extra_keys),
    ]
    for name, part in real:
        setattr(importlib.import_module(name), part.__name__, part)
