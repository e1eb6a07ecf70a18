"""All private or undocumented names of JAX, Flax and CPython in use, with the versions in which each was verified."""

import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import functools
import importlib.util
import operator
import pkgutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import flax.nnx.nn.dtypes
import jax
import jax._src.config
import jax._src.core
import jax._src.cudnn.fused_attention_stablehlo
import jax._src.distributed
import jax._src.interpreters.pxla
import jax.core
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

# CPython 3.11 to 3.13: `signal.getsignal` and `signal.signal` without the conversion to enums, which takes 10 us at
# each use of the state lock.
get_handler: Callable[[int], object] = _signal.getsignal  # pyright: ignore
set_handler: Callable[[int, Any], object] = _signal.signal  # pyright: ignore

# flax 0.12.8 to 0.12.12: the slot of a Variable's array. The public accessors check traces, which is too slow for a
# swap of hundreds of arrays.
raw_value: Callable[[Any], jax.Array] = operator.attrgetter("_raw_value")
set_raw_value: Callable[[Any, jax.Array], None] = nnx.Variable._raw_value.__set__  # pyright: ignore

# jax 0.10 to 0.12: True if an array is committed to its devices, so that a computation cannot move it.
is_committed: Callable[[jax.Array], bool] = operator.attrgetter("_committed")

# jax 0.10 to 0.12: True if the computation of an array is done. It is documented but not annotated.
is_ready: Callable[[jax.Array], bool] = operator.methodcaller("is_ready")

# flax 0.12.8 to 0.12.12: the default promotion of a layer's inputs and parameters to one dtype.
promote_dtype = cast("Callable[..., Any]", flax.nnx.nn.dtypes.promote_dtype)

# jax 0.10 to 0.12: False while any transformation (jit, grad, vmap, ...) runs the calling code.
trace_state_clean: Callable[[], bool] = jax._src.core.trace_state_clean


if TYPE_CHECKING:

    class Device:
        """The members of `jax.Device` in use. The compiled jaxlib has no types."""

        platform: str
        process_index: int

        def addressable_memories(self) -> list[Any]: ...

        def memory_stats(self) -> dict[str, int] | None: ...

    class Coordination:
        """The members in use of the client of JAX's coordination service."""

        def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

        def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

        def key_value_delete(self, key: str) -> None: ...

        def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

else:
    Device = jax.Device
    Coordination = object


def coordination() -> Coordination | None:
    """Return the coordination service of `jax.distributed.initialize`, or None before that call.

    It has no public name. Verified with JAX 0.10.0 to 0.12.0.
    """
    return cast("Coordination | None", jax._src.distributed.global_state.client)


def default_device() -> Any:
    """Return the value of `jax.default_device(...)`, which is a device, the name of a platform, or None.

    The setting is documented, but its attribute of `jax.config` is not. Verified with JAX 0.10.0 to 0.12.0.
    """
    return getattr(jax.config, "jax_default_device", None)


_batched_device_put = cast("Callable[..., jax.Array]", jax._src.interpreters.pxla.batched_device_put)


@contextlib.contextmanager
def explicit_transfers() -> Generator[None, None, None]:
    """Mark transfers as explicit, so that `jax.transfer_guard("disallow")` of a serving loop allows them.

    These are the undocumented contexts of `jax.device_put` and `jax.device_get`. Verified with JAX 0.10.0 to 0.12.0.
    """
    with jax._src.config.explicit_device_put_scope(), jax._src.config.explicit_device_get_scope():
        yield


def to_device(array: np.ndarray, device: Device | None = None) -> jax.Array:
    """Return the array on `device` or the default device, uncommitted.

    It makes the same call as `jax.device_put(array)` in a quarter of the time. Verified with JAX 0.10.0 to 0.12.0.
    """
    if device is None:
        device = default_device()
    if isinstance(device, str) or not jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(array)
    if device is None:
        device = cast("Device", jax.local_devices()[0])
    with jax._src.config.explicit_device_put_scope():  # half of `explicit_transfers`, since each new batch runs this
        return _batched_device_put(*_placing(array.shape, array.dtype, device), [array], [device], committed=False)


@functools.lru_cache(maxsize=256)
def _placing(shape: tuple[int, ...], dtype: np.dtype, device: Device) -> tuple[Any, SingleDeviceSharding]:
    """Return the aval and sharding of an array. Making them takes more than half of the time of the transfer."""
    return jax.core.ShapedArray(shape, dtype), SingleDeviceSharding(device)


@dataclass(frozen=True, eq=False)
class Launch:
    """A compiled program with flat arguments and results that skips the argument checks of `Compiled`.

    At every call, `Compiled` builds and looks up a description of all arguments. Here the caller must pass arguments of
    the shapes, dtypes and shardings that the program was compiled for.

    Attributes:
      compiled: The compiled program.
    """

    compiled: jax.stages.Compiled
    _execute: Callable[[list[jax.Array]], Any]
    _handlers: Any

    def __call__(self, arguments: list[jax.Array]) -> list[jax.Array]:
        """Launch the program and return its results without waiting for them."""
        return self._execute(arguments).consume_with_handlers(self._handlers)


def launch_of(compiled: jax.stages.Compiled) -> Launch:
    """Return the launch of a program that was lowered with `keep_unused=True`.

    It uses `MeshExecutable.unsafe_call` and its undocumented attributes. Verified with JAX 0.10.0 to 0.12.0.

    Raises:
      NotImplementedError: The program has effects, constants or unused arguments, which only `Compiled` handles.
    """
    call: Any = cast("Any", compiled)._executable.unsafe_call
    effects = call.has_unordered_effects or call.ordered_effects or call.has_host_callbacks or call.mut
    constants = cast("Any", compiled)._params.const_args
    if effects or constants or len(call.kept_var_idx) < compiled.in_tree.num_leaves:
        raise NotImplementedError(f"{call.name} has effects, constants or arguments that are not used")
    return Launch(compiled, call.xla_executable.execute_sharded, call.out_handler.handlers)


def without_graphs(platform: str) -> dict[str, Any] | None:
    """Return options of `jax.jit` and `Lowered.compile` that disable CUDA graphs, or None on other platforms.

    They are for a program that gets arrays at new addresses at every call. Updating the addresses of a CUDA graph takes
    the host longer than launching its kernels. XLA's flags are undocumented. Verified with jaxlib 0.10.2 to 0.12.0.
    """
    return {"xla_gpu_graph_min_graph_size": 2**31 - 1} if platform in ("gpu", "cuda") else None


def side_by_side(platform: str) -> dict[str, Any] | None:
    """Return options of `jax.jit` with which independent kernels run at the same time, or None on other platforms.

    By default XLA runs the kernels of a CUDA graph one after another. XLA's flags are undocumented. Verified with
    jaxlib 0.11.2 on an H100; jaxlib 0.10.2 and 0.12.0 have the flag too.
    """
    return {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"} if platform in ("gpu", "cuda") else None


_TRITON = "jax.experimental.pallas.triton"


def triton_gap() -> str | None:
    """Return why the kernels of `jlora.pallas.triton` cannot be lowered with this JAX, or None if they can.

    All names that they use are looked up. JAX 0.10 to 0.12 have them, and JAX 0.11 announced their removal.
    """
    missing = [_TRITON]
    if importlib.util.find_spec(_TRITON) is not None:
        module = pkgutil.resolve_name(_TRITON)
        missing = [f"{_TRITON}.{name}" for name in ("CompilerParams", "load", "store") if not hasattr(module, name)]
    if not missing:
        return None
    return (
        f"needs {missing[0]}, which JAX {jax.__version__} does not have (the extra jlora[cuda] brings one that has it)"
    )


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return cuDNN's softmax attention [B, L, H, D], and the float32 logarithms [B, H, L] of the sums of exp(score).

    `jax.nn.dot_product_attention(implementation="cudnn", return_residual=True)` makes the same call and rounds the
    logarithms to the dtype of q, which is too coarse to combine two results. Verified with JAX 0.10.0 to 0.12.0.

    Args:
      q: [B, L, H, D] queries, bfloat16 or float16.
      k: [B, C, G, D] keys.
      v: [B, C, G, D] values.
      causal: True if query i sees keys 0..i only.
      window: Number of latest keys that a causal query sees; None means all.
      lengths: [B] int32 number of keys of each sequence; None means C.
    """
    library: Any = jax._src.cudnn.fused_attention_stablehlo
    kinds = library.MaskType
    batch, length = q.shape[:2]
    if lengths is None:
        kind, query_lengths = kinds.CAUSAL if causal else kinds.NO_MASK, None
    else:
        kind, query_lengths = kinds.PADDING_CAUSAL if causal else kinds.PADDING, jax.numpy.full(batch, length, "int32")
    return library.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=query_lengths,
        kv_seqlen=lengths,
        scale=q.shape[3] ** -0.5,
        mask_type=kind,
        sliding_window_length=window,
        return_residual=True,
    )


def abstract_device() -> tuple[str, str, int | None] | None:
    """Return (platform, device kind, cores or None) that `use_abstract_mesh` lowers a program for, or None.

    `AbstractMesh.abstract_device` is undocumented. Verified with JAX 0.10.0 to 0.12.0. On a machine without a GPU, JAX
    0.11 and newer lower Triton kernels for the GPU named here; 0.10 assumes compute capability 9.0.
    """
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if device is None else (device.platform, device.device_kind, getattr(device, "num_cores", None))


def gpu_shared_memory(device: object) -> int | None:
    """Return the bytes of shared memory that one block of a CUDA device can use, or None if unknown.

    It is an undocumented attribute of PJRT's CUDA devices. Verified with jaxlib 0.10.2 and 0.11.2.
    """
    found: Any = getattr(device, "shared_memory_per_block_optin", None)
    return found if isinstance(found, int) and found > 0 else None


def gpu_cores(device: object) -> int | None:
    """Return the number of multiprocessors of a GPU, or None if unknown.

    It is an undocumented attribute of PJRT's GPU devices. Verified with jaxlib 0.11.2.
    """
    found: Any = getattr(device, "core_count", None)
    return found if isinstance(found, int) and found > 0 else None


def gpu_compute_capability(device: object) -> int | None:
    """Return 90 for compute capability 9.0, 0 for a GPU of another vendor than NVIDIA, or None if unknown.

    It is an undocumented attribute of PJRT's GPU devices, "9.0" or "gfx942". Verified with jaxlib 0.10.2 and 0.11.2.
    """
    found: Any = getattr(device, "compute_capability", None)
    if not isinstance(found, str):
        return None
    major, _, minor = found.partition(".")
    return int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else 0
