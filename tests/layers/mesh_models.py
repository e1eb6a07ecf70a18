"""Models with every kind of layer on a mesh, and their copies with merged weights."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from tests.layers.merging import Target, make_adapter, merge

K = 16
NAMES = ["one", None, "two", "one"]


class Opaque(nnx.Linear):
    """A layer with a product that the wrapper cannot replace."""

    def __call__(self, x):
        return jnp.einsum("...k,kn->...n", x, self.kernel[...])


class Twice(nnx.Linear):
    """A layer that doubles the output of its parent."""

    def __call__(self, x):
        return super().__call__(x) + 0


class Split(nnx.Linear):
    """A layer that returns its bias separately."""

    def __call__(self, x):
        return jnp.dot(x, self.kernel[...]), self.bias[...]


class PaddedIn(nnx.Linear):
    """A layer with input heads of 3 features and one of padding."""


class PaddedOut(nnx.Linear):
    """A layer with padded output heads and the first two features exchanged."""


REAL = [i for i in range(K) if i % 4 != 3]
SHUFFLED = [REAL[1], REAL[0], *REAL[2:]]
for cls in (Opaque, Twice, Split):
    jlora.register_layer(cls, lambda layer: jlora.LinearSpec(layer.in_features, layer.out_features))
jlora.register_layer(PaddedIn, lambda layer: jlora.LinearSpec(K, layer.out_features, in_index=REAL))
jlora.register_layer(PaddedOut, lambda layer: jlora.LinearSpec(K, K, out_index=SHUFFLED))


def shared_heads(parts: int) -> tuple[tuple[int, int], ...]:
    """Each part has its own q, copies of k (2) and v (2), and a column of padding."""
    q = 16 // parts
    return tuple(block for i in range(parts) for block in ((q * i, q), (16, 2), (18, 2), (-1, 1)))


class Zoo(nnx.Module):
    packed_modules = {
        "qkv": ("q", "k", "v"),
        "per_shard": ("own_q", "own_k", "own_v"),
        "copied": {"copied_q": 16, "copied_k": 2, "copied_v": 2},
    }

    def __init__(self, parts: int = 4):
        rngs = nnx.Rngs(0)
        self.column = nnx.Linear(K, 24, rngs=rngs)
        self.row = nnx.Linear(K, 8, rngs=rngs)
        self.both = nnx.Linear(K, 16, rngs=rngs)
        self.whole = nnx.Linear(K, 10, rngs=rngs)
        self.fsdp = nnx.Linear(K, 8, rngs=rngs)
        self.qkv = nnx.Linear(K, 32, rngs=rngs)
        self.qkv.output_sizes = (16, 12, 4)
        self.per_shard = nnx.Linear(K, 32, rngs=rngs)
        self.per_shard.output_sizes = (16, 8, 8)
        self.per_shard.output_blocks = tuple(
            block
            for i in range(parts)
            for block in ((16 // parts * i, 16 // parts), *((o + 8 // parts * i, 8 // parts) for o in (16, 24)))
        )
        blocks = shared_heads(parts)
        self.copied = nnx.Linear(K, sum(n for _, n in blocks), rngs=rngs)
        self.copied.output_blocks = blocks
        source = source_of(blocks)
        same = np.array([source.index(feature) if feature >= 0 else i for i, feature in enumerate(source)])
        self.copied.kernel.set_value(self.copied.kernel[...][:, same])  # copies are copies
        self.heads = nnx.LinearGeneral(K, (8, 3), rngs=rngs)
        self.o_proj = nnx.LinearGeneral((8, 2), 8, axis=(-2, -1), rngs=rngs)
        self.o_einsum = nnx.Einsum("BTNH,NHD->BTD", (8, 2, 8), (8,), rngs=rngs)
        self.opaque = Opaque(K, 8, use_bias=False, rngs=rngs)
        self.twice = Twice(K, 8, rngs=rngs)
        self.split = Split(K, 8, rngs=rngs)
        self.padded_in = PaddedIn(K, 8, rngs=rngs)
        self.padded_out = PaddedOut(K, K, rngs=rngs)
        self.vocab = nnx.Embed(24, K, rngs=rngs)
        self.vocab.real_vocab = 21
        self.wide = nnx.Embed(24, K, rngs=rngs)
        self.vocab.tie_word_embeddings = self.wide.tie_word_embeddings = True

    def __call__(self, inputs):
        tokens, x = inputs
        heads = x.reshape(*x.shape[:-1], 8, 2)
        out = {name: getattr(self, name)(x) for name in LINEAR}
        out["split"], bias = self.split(x)
        out["split"] += jnp.reshape(bias, (1,) * (x.ndim - 1) + (-1,))
        out["o_proj"], out["o_einsum"] = self.o_proj(heads), self.o_einsum(heads)
        for name in ("vocab", "wide"):
            table = getattr(self, name)
            out[name], out[f"{name}.attend"] = table(tokens), table.attend(x)
        return out


LINEAR = (
    *("column", "row", "both", "whole", "fsdp", "qkv", "per_shard", "copied", "heads", "opaque", "twice"),
    *("padded_in", "padded_out"),
)
# The spec of each kernel, for meshes with these axes. Other kernels are replicated.
SPECS: Mapping[str, P] = {
    "column": P(None, "t"),
    "row": P("t"),
    "both": P("u", "t"),
    "whole": P(),
    "fsdp": P("data", "t"),
    "qkv": P(None, "t"),
    "per_shard": P(None, "t"),
    "copied": P(None, "t"),
    "heads": P(None, "t"),
    "o_proj": P("t"),
    "o_einsum": P("t"),
    "opaque": P("t"),
    "twice": P("t", "u"),
    "split": P(None, "t"),
    "padded_in": P("t"),
    "padded_out": P("u", "t"),
    "vocab": P("t"),
    "wide": P(None, "t"),
}


# --- A small model, in which one layer feeds the next ---

D, H, VOCAB, LENGTH = 8, 16, 12, 3
SMALL_TARGETS = [
    Target("embed", VOCAB, D, "embed.embedding", kind="embedding"),
    Target("up", D, H, "up.kernel"),
    Target("down", H, D, "down.kernel"),
    Target("head", D, VOCAB, "head.kernel"),
]
ONE, TWO = make_adapter("one", SMALL_TARGETS, 3), make_adapter("two", SMALL_TARGETS[1:3], 2)
SMALL = {"embed": P("t"), "up": P(None, "t"), "down": P("t"), "head": P(None, "t")}


class Small(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        self.up = nnx.Linear(D, H, rngs=rngs)
        self.down = nnx.Linear(H, D, rngs=rngs)
        self.head = nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(jnp.tanh(self.up(x))))


class Written(Small):
    """A model with every sharding written out, as Explicit axes require."""

    def __call__(self, tokens):
        lead = ("data",) if tokens.ndim > 1 else (None,)
        rest = (None,) * (tokens.ndim - 1)
        x = self.embed(tokens, out_sharding=P(*lead, *rest, None))
        hidden = jnp.tanh(self.up(x, out_sharding=P(*lead, *rest, "t")))
        x = x + self.down(hidden, out_sharding=P(*lead, *rest, None))
        return self.head(x, out_sharding=P(*lead, *rest, "t"))


def tokens_of(*shape):
    return np.random.default_rng(1).integers(0, VOCAB, shape).astype(np.int32)


# --- Meshes ---


def some_devices(count: int) -> list[jax.Device]:
    """Return the first devices, or skip the test if an accelerator has fewer. A CPU has eight."""
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return jax.devices()[:count]


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> Mesh:
    devices = np.array(some_devices(int(np.prod([*axes.values()])))).reshape(*axes.values())
    return Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))


def placed(model: nnx.Module, mesh: Mesh, specs: Mapping[str, P] = SPECS) -> nnx.Module:
    """Return the model with its kernels split over a mesh and all other arrays replicated."""
    for name, layer in nnx.iter_modules(model):
        spec = specs.get(".".join(map(str, name)), P())
        for attribute, value in vars(layer).items():
            if isinstance(value, nnx.Variable):
                own = spec if attribute in ("kernel", "embedding") else P()
                value.set_value(jax.device_put(value.get_value(), NamedSharding(mesh, on(mesh, own))))
    return model


def on(mesh: Mesh, spec: P) -> P:
    """Return a spec without the axes that the mesh lacks."""

    def known(entry):
        names = tuple(name for name in (entry if isinstance(entry, tuple) else (entry,)) if name in mesh.axis_names)
        return names if len(names) > 1 else names[0] if names else None

    return P(*map(known, spec))


def rows_of(positions):
    """Return the delta of a layer with its inputs at `positions`."""

    def into(delta):
        full = np.zeros((K, delta.shape[0]))
        full[positions] = delta.T
        return full

    return into


def columns_of(source, first: int, count: int):
    """Return the delta of the features [first, first + count), for a layer with feature source[i] at i."""

    def into(delta):
        full = np.zeros((delta.shape[1], len(source)))
        for i, feature in enumerate(source):
            if first <= feature < first + count:
                full[:, i] = delta[feature - first]
        return full

    return into


def source_of(blocks):
    return [first + i if first >= 0 else -1 for first, n in blocks for i in range(n)]


def targets_of(zoo: Zoo) -> list[Target]:
    plain = ("column", "row", "both", "whole", "fsdp", "heads", "opaque", "twice", "split")
    found = [Target(name, K, getattr(zoo, name).kernel.size // K, f"{name}.kernel") for name in plain]
    found += [Target(name, K, 8, f"{name}.kernel") for name in ("o_proj", "o_einsum")]
    found += [
        Target(name, K, n, "qkv.kernel", at=(slice(None), slice(start, start + n)))
        for name, start, n in (("q", 0, 16), ("k", 16, 12), ("v", 28, 4))
    ]
    for layer, slices in (
        ("per_shard", (("own_q", 0, 16), ("own_k", 16, 8), ("own_v", 24, 8))),
        ("copied", (("copied_q", 0, 16), ("copied_k", 16, 2), ("copied_v", 18, 2))),
    ):
        source = source_of(getattr(zoo, layer).output_blocks)
        found += [Target(name, K, n, f"{layer}.kernel", into=columns_of(source, start, n)) for name, start, n in slices]
    found.append(Target("padded_in", len(REAL), 8, "padded_in.kernel", into=rows_of(REAL)))
    source = [SHUFFLED.index(i) if i in SHUFFLED else -1 for i in range(K)]
    found.append(Target("padded_out", K, len(REAL), "padded_out.kernel", into=columns_of(source, 0, len(REAL))))
    return found


def tables_of(attend: bool) -> list[Target]:
    """Return the targets of the lookups or of the logits. A merged table cannot have both."""
    pad = lambda delta: np.pad(delta, ((0, 3), (0, 0)))  # noqa: E731
    if attend:
        return [
            Target("vocab.attend", K, 21, "vocab.embedding", into=pad),
            Target("wide.attend", K, 24, "wide.embedding", into=lambda delta: delta),
        ]
    return [
        Target("vocab", 21, K, "vocab.embedding", into=lambda delta: pad(delta.T), kind="embedding"),
        Target("wide", 24, K, "wide.embedding", kind="embedding"),
    ]


def adapters_of(zoo: Zoo) -> list[jlora.Adapter]:
    """Return adapters of ranks 6, 2 and 5. The second omits layers, and slices of merged layers."""
    every = [*targets_of(zoo), *tables_of(False), *tables_of(True)]
    some = [t for i, t in enumerate(every) if i % 3]
    return [make_adapter("one", every, 6), make_adapter("two", some, 2), make_adapter("three", every, 5)]


_run = jax.jit(lambda model, inputs: model(inputs))


def expected(zoo: Zoo, adapters: Mapping[str, jlora.Adapter], names, inputs) -> dict[str, np.ndarray]:
    """Return the output of merged weights for each layer and sequence, in float32 on one device."""
    found: dict[str, np.ndarray] = {}
    for attend in (False, True):
        targets = [*targets_of(zoo), *tables_of(attend)]
        outputs = {name: _run(merge(zoo, targets, adapters[name] if name else None), inputs) for name in {*names}}
        for key in outputs[None]:
            if key not in ("vocab", "wide") if attend else not key.endswith(".attend"):
                found[key] = np.stack([np.asarray(outputs[name][key])[i] for i, name in enumerate(names)])
    return found
