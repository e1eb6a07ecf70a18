"""Every private or undocumented name of JAX and Flax that jlora uses, once, with the versions it was seen in."""

import contextlib
import functools
import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import flax.nnx.nn.dtypes
import jax
import jax._src.config
import jax._src.core
import jax._src.distributed
import jax._src.interpreters.pxla
import jax.core
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

# flax 0.12.8 to 0.12.12: a Variable keeps its array in a slot of this name. Its accessors check traces, which a swap of
# hundreds of arrays cannot pay.
raw_value: Callable[[Any], jax.Array] = nnx.Variable._raw_value.__get__  # pyright: ignore
set_raw_value: Callable[[Any, jax.Array], None] = nnx.Variable._raw_value.__set__  # pyright: ignore

# jax 0.10 to 0.12: whether somebody chose the devices of an array; a computation may move it elsewhere if not.
is_committed: Callable[[jax.Array], bool] = operator.attrgetter("_committed")

# jax 0.10 to 0.12: whether the computation that makes an array is done; documented, but not in the type's annotations.
is_ready: Callable[[jax.Array], bool] = operator.methodcaller("is_ready")

# flax 0.12.8 to 0.12.12: how its layers bring inputs and parameters to one dtype, unless the user gives another way.
promote_dtype = cast("Callable[..., Any]", flax.nnx.nn.dtypes.promote_dtype)

# jax 0.10 to 0.12: False while any transformation (jit, grad, vmap, ...) runs the calling code.
trace_state_clean: Callable[[], bool] = jax._src.core.trace_state_clean


if TYPE_CHECKING:

    class Device:
        """`jax.Device`, as far as it is used here: jaxlib is compiled, and has no types."""

        platform: str
        process_index: int

        def addressable_memories(self) -> list[Any]: ...

        def memory_stats(self) -> dict[str, int] | None: ...

    class Coordination:
        """The client of JAX's coordination service, as far as it is used here."""

        def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

        def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

        def key_value_delete(self, key: str) -> None: ...

        def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

else:
    Device = jax.Device
    Coordination = object


def coordination() -> Coordination | None:
    """The service through which the processes of `jax.distributed.initialize` find each other; None without that.

    No public name leads to it: JAX 0.10.0 to 0.12.0.
    """
    return cast("Coordination | None", jax._src.distributed.global_state.client)


def default_device() -> Any:
    """What `jax.default_device(...)` set: a device, the name of a platform, or None.

    The setting is documented, its attribute of `jax.config` is not: JAX 0.10.0 to 0.12.0.
    """
    return getattr(jax.config, "jax_default_device", None)


_batched_device_put = cast("Callable[..., jax.Array]", jax._src.interpreters.pxla.batched_device_put)


@contextlib.contextmanager
def asked_for() -> Generator[None, None, None]:
    """Transfers in here are asked for, as those of `jax.device_put` and `jax.device_get` are: `jax.transfer_guard`,
    which a serving loop may have set to "disallow", lets them through.

    What those two functions enter, undocumented: JAX 0.10.0 to 0.12.0.
    """
    with jax._src.config.explicit_device_put_scope(), jax._src.config.explicit_device_get_scope():
        yield


def to_device(array: np.ndarray, device: Device | None = None) -> jax.Array:
    """`jax.device_put(array)`, which takes four times as long to reach the same call: JAX 0.10.0 to 0.12.0.

    On `device`, or the default one; a computation may move it elsewhere.
    """
    if device is None:
        device = default_device()
    if isinstance(device, str) or not jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(array)
    if device is None:
        device = cast("Device", jax.local_devices()[0])
    with jax._src.config.explicit_device_put_scope():  # half of `asked_for`: each new batch comes by
        return _batched_device_put(*_placing(array.shape, array.dtype, device), [array], [device], committed=False)


@functools.lru_cache(maxsize=256)
def _placing(shape: tuple[int, ...], dtype: np.dtype, device: Device) -> tuple[Any, SingleDeviceSharding]:
    """What `to_device` says of an array: to say it anew takes more than half as long as to move it."""
    return jax.core.ShapedArray(shape, dtype), SingleDeviceSharding(device)


@dataclass(frozen=True, eq=False)
class Launch:
    """A compiled program of flat arguments and results, without what `Compiled` does about it for each array at every
    call: it describes all arguments anew and looks that description up.

    The caller sees to it that every argument has the shape, the dtype and the place that the program was compiled for.

    Attributes:
      compiled: the program.
    """

    compiled: jax.stages.Compiled
    _execute: Callable[[list[jax.Array]], Any]
    _handlers: Any

    def __call__(self, arguments: list[jax.Array]) -> list[jax.Array]:
        """Launch the program; its results may still be under way."""
        return self._execute(arguments).consume_with_handlers(self._handlers)


def launch_of(compiled: jax.stages.Compiled) -> Launch:
    """How to launch a program that was lowered with `keep_unused=True`.

    `MeshExecutable.unsafe_call` and what it is made of, undocumented: JAX 0.10.0 to 0.12.0.

    Raises:
      NotImplementedError: it has effects, constants or arguments that are not used, which `Compiled` sees to.
    """
    call: Any = cast("Any", compiled)._executable.unsafe_call
    effects = call.has_unordered_effects or call.ordered_effects or call.has_host_callbacks or call.mut
    constants = cast("Any", compiled)._params.const_args
    if effects or constants or len(call.kept_var_idx) < compiled.in_tree.num_leaves:
        raise NotImplementedError(f"{call.name} has effects, constants or arguments that are not used")
    return Launch(compiled, call.xla_executable.execute_sharded, call.out_handler.handlers)


def without_graphs(platform: str) -> dict[str, Any] | None:
    """Options of `jax.jit` and `Lowered.compile` for a program whose arrays are never the same.

    XLA makes CUDA graphs of such programs, too, and to tell a graph of other addresses takes the host longer than to
    launch its kernels. Flags of XLA are undocumented: jaxlib 0.10.2 to 0.12.0.
    """
    return {"xla_gpu_graph_min_graph_size": 2**31 - 1} if platform in ("gpu", "cuda") else None


def abstract_device() -> tuple[str, str] | None:
    """(platform, device kind) that a program is being lowered for under `use_abstract_mesh`, or None.

    `AbstractMesh.abstract_device`, undocumented: JAX 0.10.0 to 0.12.0. From 0.11 on, JAX lowers Triton kernels for the
    GPU that it names where the machine has none; 0.10 takes compute capability 9.0 there and does not ask.
    """
    device: Any = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if device is None else (device.platform, device.device_kind)


def gpu_shared_memory(device: object) -> int | None:
    """Bytes of shared memory that one block of a CUDA device may ask for, or None where the device does not say.

    An attribute of PJRT's CUDA devices, undocumented: jaxlib 0.10.2 and 0.11.2.
    """
    found: Any = getattr(device, "shared_memory_per_block_optin", None)
    return found if isinstance(found, int) and found > 0 else None


def gpu_compute_capability(device: object) -> int | None:
    """90 for compute capability 9.0; 0 for a GPU that is not NVIDIA's; None where the device does not say.

    An attribute of PJRT's GPU devices, "9.0" or "gfx942", undocumented: jaxlib 0.10.2 and 0.11.2.
    """
    found: Any = getattr(device, "compute_capability", None)
    if not isinstance(found, str):
        return None
    major, _, minor = found.partition(".")
    return int(major) * 10 + int(minor) if major.isdigit() and minor.isdigit() else 0
