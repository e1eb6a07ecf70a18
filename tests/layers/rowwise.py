"""Three adapters of one projection, and the expected output of each row by the oracle."""

import jax
import numpy as np
from flax import nnx

from tests import oracle
from tests.layers.merging import Target, make_adapter, make_manager

K, N = 6, 5
NAMES = ["one", None, "two"]  # adapters of a batch of three


class Layers(nnx.Module):
    """Two projections and a lookup, which tests call separately."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, K, rngs=rngs)
        self.proj = nnx.Linear(K, N, rngs=rngs)
        self.other = nnx.Linear(K, N, rngs=rngs)

    def __call__(self, x):
        return self.proj(x)


PROJ, OTHER = Target("proj", K, N, "proj.kernel"), Target("other", K, N, "other.kernel")
LOOKUP = Target("embed", 11, K, "embed.embedding", kind="embedding")
ADAPTERS = [make_adapter("one", [PROJ], 3), make_adapter("two", [PROJ, LOOKUP], 2), make_adapter("odd", [OTHER], 2)]


class World:
    """A wrapped model, its unwrapped copy, and its manager with all adapters in slots."""

    def __init__(self):
        self.model = Layers()
        self.bare = nnx.clone(self.model)
        self.manager = make_manager(self.model, ADAPTERS)
        with self.manager.prepare(["one", "two", "odd"]):
            pass  # all in slots from here on

    def expected(self, x, adapters, layer="proj") -> np.ndarray:
        """Return row m of `x` [M, K] through a layer with adapters[m]."""
        factors = {a.name: a.modules[layer] for a in ADAPTERS if layer in a.modules}
        names = list(factors)
        a, b = np.zeros((len(names), 1, 3, x.shape[-1])), np.zeros((len(names), 3, N))
        for i, lora in enumerate(factors.values()):
            a[i, 0, : lora.rank], b[i, : lora.rank] = lora.a, lora.scaling * lora.b.T
        weights = getattr(self.bare, layer)
        base = np.asarray(x, np.float64) @ np.asarray(weights.kernel[...], np.float64) + np.asarray(weights.bias[...])
        return oracle.add_lora(base, x, [names.index(n) if n in names else -1 for n in adapters], a, b)


def base_of(layer, x):
    return np.asarray(jax.jit(lambda layer, x: layer(x))(layer, x))


def bits(x):
    return np.asarray(x).view(np.int32)
