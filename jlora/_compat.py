"""Every private name of JAX and Flax that jlora uses, once, with the versions in which it was found to hold.

jax 0.10.x and 0.11.x, flax 0.12.8 to 0.12.x.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax._src.core
from flax import nnx

# flax 0.12: a Variable keeps its array in a slot of this name. Its accessors check traces and cost 10 to 20 us each on
# some paths, which a swap of hundreds of arrays cannot pay; both of these are functions of C.
raw_value: Callable[[Any], jax.Array] = nnx.Variable._raw_value.__get__  # pyright: ignore
set_raw_value: Callable[[Any, jax.Array], None] = nnx.Variable._raw_value.__set__  # pyright: ignore

# jax 0.10, 0.11: whether somebody chose the devices of an array; a computation may move it elsewhere if not.
is_committed: Callable[[jax.Array], bool] = operator.attrgetter("_committed")

# jax 0.10, 0.11: False while any transformation (jit, grad, vmap, ...) runs the calling code.
trace_state_clean: Callable[[], bool] = jax._src.core.trace_state_clean
