"""Every kind of layer, with its own axes and call, compared with merged weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.adapters import Adapter
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.forward.scope import use
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import (
    Holder,
    Target,
    assert_close,
    check_against_merged,
    delta,
    make_adapter,
    make_manager,
    make_module,
    normal,
    serve,
)

pytestmark = pytest.mark.device


def into(*shape, order=None):
    """Return a function from the delta [N, K] to the kernel, for the shape of its transpose and the order of axes."""
    return lambda d: d.T.reshape(shape).transpose(order or range(len(shape)))


# (layer, feature shape of the input without its [3, 2] lead, K, N, delta -> kernel)
KINDS = {
    "linear": (lambda r: nnx.Linear(6, 5, rngs=r), (6,), 6, 5, np.transpose),
    "general, two axes in": (
        lambda r: nnx.LinearGeneral((2, 3), 5, axis=(-2, -1), rngs=r), (2, 3), 6, 5, into(2, 3, 5),
    ),
    # Flax sorts the axes, so the kernel's first axis meets the input's axis 2 here too.
    "general, unsorted": (
        lambda r: nnx.LinearGeneral((3, 3), (5, 2), axis=(-1, 2), rngs=r), (3, 3), 9, 10, into(3, 3, 5, 2),
    ),
    "einsum q, bias": (
        lambda r: nnx.Einsum("BTD,NDH->BTNH", (2, 6, 4), (2, 4), bias_init=nnx.initializers.normal(1.0), rngs=r),
        (6,), 6, 8, into(6, 2, 4, order=(1, 0, 2)),
    ),
    "einsum out": (lambda r: nnx.Einsum("BTNH,NHD->BTD", (2, 4, 6), rngs=r), (2, 4), 8, 6, into(2, 4, 6)),
    "einsum, features first": (
        lambda r: nnx.Einsum("... D, N H D -> ... N H", (2, 4, 6), rngs=r), (6,), 6, 8, into(6, 2, 4, order=(1, 2, 0)),
    ),
    "einsum, in order": (
        lambda r: nnx.Einsum("BTHN,NHD->BTD", (2, 4, 6), rngs=r), (4, 2), 8, 6, into(2, 4, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_matches_merged_weights(kind):
    build, features, k, n, to_kernel = KINDS[kind]
    model = Holder(build(nnx.Rngs(1)))
    check_against_merged(model, [Target("proj", k, n, "proj.kernel", to_kernel)], normal(3, 2, *features))


def test_einsum_gemma_kv():
    """'BTD,SNDH->SBTNH': keys and values in one kernel, output features before the batch axis, two packed parts."""

    class Model(nnx.Module):
        def __init__(self):
            self.kv_einsum = nnx.Einsum("BTD,SNDH->SBTNH", (2, 2, 6, 4), rngs=nnx.Rngs(0))

        def __call__(self, x):
            k, v = self.kv_einsum(x)
            return jnp.concatenate([k, 2 * v], -1)

    kernel = into(6, 2, 4, order=(1, 0, 2))
    targets = [
        Target("v_proj", 6, 8, "kv_einsum.kernel", kernel, at=(1,)),
        Target("k_proj", 6, 8, "kv_einsum.kernel", kernel, at=(0,)),
    ]
    packed = {"kv_einsum": ("k_proj", "v_proj")}
    check_against_merged(Model(), targets, normal(3, 2, 6), packed_modules=packed)
    whole = Target("kv_einsum", 6, 16, "kv_einsum.kernel", into(6, 2, 2, 4, order=(1, 2, 0, 3)))
    check_against_merged(Model(), [whole], normal(3, 2, 6), packed_modules=packed)


def test_packed_modules_are_named_by_the_end_of_their_paths():
    """Two layers of one last name have parts of their own; the longest name wins."""

    class Model(nnx.Module):
        def __init__(self):
            self.q, self.kv = (nnx.Dict(w=nnx.Linear(6, 8, rngs=nnx.Rngs(seed))) for seed in range(2))

        def __call__(self, x):
            return jnp.concatenate([self.q["w"](x), self.kv["w"](x)], -1)

    def part(name, layer, start):
        return Target(name, 6, 4, f"{layer}.w.kernel", at=(slice(None), slice(start, start + 4)))

    targets = [part("q.first", "q", 0), part("q.second", "q", 4), part("kv.k", "kv", 0), part("kv.v", "kv", 4)]
    packed = {"w": ("first", "second"), "kv.w": ("k", "v")}
    check_against_merged(Model(), targets, normal(3, 2, 6), packed_modules=packed)


def test_groups_that_cover_several_slices_of_a_merged_projection():
    """One tensor of the checkpoint fills q, k and v, which share its A; another fills the rest."""

    def columns(name, start, size):
        return Target(name, 5, size, "proj.kernel", at=(slice(None), slice(start, start + size)))

    model = Holder(nnx.Linear(5, 12, rngs=nnx.Rngs(0)))
    model.proj.output_sizes = (4, 4, 2, 2)
    qkv, z, whole = columns("in_proj_qkv", 0, 10), columns("in_proj_z", 10, 2), Target("proj", 5, 12, "proj.kernel")
    adapters = [make_adapter("both", [qkv, z], 3), make_adapter("group", [qkv], 2), make_adapter("whole", [whole], 1)]
    packed = {"proj": {"in_proj_qkv": (4, 4, 2), "in_proj_z": 2}}
    check_against_merged(model, [qkv, z, whole], normal(3, 2, 5), adapters=adapters, packed_modules=packed)


def test_einsum_equation_of_the_call():
    """A call may pass another equation for the same kernel, by keyword or position."""

    class Model(nnx.Module):
        def __init__(self):
            self.proj = nnx.Einsum("BTD,NDH->BTNH", (2, 6, 4), rngs=nnx.Rngs(0))

        def __call__(self, x):
            first = self.proj(x, einsum_str="BTD,NDH->BNTH", out_sharding=None)
            return first.swapaxes(1, 2) - 3 * self.proj(x[:, -1], "BD,NDH->BNH")[:, None]

    target = Target("proj", 6, 8, "proj.kernel", into(6, 2, 4, order=(1, 0, 2)))
    check_against_merged(Model(), [target], normal(3, 2, 6))


def test_einsum_call_that_transposes_the_kernel_is_refused():
    model = Holder(nnx.Einsum("BTD,DF->BTF", (6, 6), rngs=nnx.Rngs(0)))
    manager = make_manager(model)

    @jax.jit
    def step(model, x, batch):
        with use(batch):
            return model.proj(x, einsum_str="BTF,DF->BTD")

    reason = "proj: called with einsum_str='BTF,DF->BTD'"
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match=reason):
        step(model, normal(3, 2, 6), batch)


class Tied(nnx.Module):
    """Embedding, one projection, logits from the same table."""

    tie_word_embeddings = True

    def __init__(self, head_name: str = "embed", rngs=None):
        self.embed = nnx.Embed(11, 6, rngs=rngs or nnx.Rngs(0))
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
        if head_name != "embed":
            setattr(self, head_name, self.embed)
        self.head_name = head_name

    def __call__(self, tokens):
        return getattr(self, self.head_name).attend(self.proj(self.embed(tokens)))


@pytest.mark.parametrize("head_name", ["embed", "lm_head"])
def test_embedding_and_tied_logits(head_name):
    """Lookup and logits share a table but not their LoRA, so the reference is float64 NumPy."""
    model = Tied(head_name)
    rng = np.random.default_rng(0)
    modules = {
        "embed": make_module(rng, 11, 6, 2, "embedding"),
        "lm_head": make_module(rng, 6, 11, 3),
        "proj": make_module(rng, 6, 6, 4),
    }
    adapters = [
        Adapter(name="all", modules=modules),
        Adapter(name="lookup", modules={"embed": make_module(rng, 11, 6, 1, "embedding")}),
        Adapter(name="logits", modules={"lm_head": modules["lm_head"]}),
    ]
    table, kernel, bias = (
        np.asarray(v[...], np.float64) for v in (model.embed.embedding, model.proj.kernel, model.proj.bias)
    )
    manager = make_manager(model, adapters)
    tokens = rng.integers(0, 11, (4, 3)).astype(np.int32)
    names = ["all", None, "lookup", "logits"]
    with manager.prepare(names) as batch:
        found = np.asarray(serve(model, tokens, batch))
    for i, name in enumerate(names):
        own = {a.name: a for a in adapters}[name].modules if name else {}
        d = {key: delta(own[key]).T if key in own else 0.0 for key in modules}
        hidden = (table + d["embed"])[tokens[i]] @ (kernel + d["proj"]) + bias
        assert_close(found[i], hidden @ (table.T + d["lm_head"]))


def test_untied_head_is_a_linear_and_attend_takes_no_adapter():
    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(11, 6, rngs=nnx.Rngs(0))
            self.lm_head = nnx.Linear(6, 11, use_bias=False, rngs=nnx.Rngs(1))

        def __call__(self, tokens):
            return self.lm_head(self.embed(tokens))

    targets = [Target("lm_head", 6, 11, "lm_head.kernel"), Target("embed", 11, 6, "embed.embedding", kind="embedding")]
    tokens = np.arange(6, dtype=np.int32).reshape(3, 2)
    manager = check_against_merged(Model(), targets, tokens)
    assert not hasattr(manager.model.embed, "jlora_attend_a")


@pytest.mark.usefixtures("unchecked_calls")
def test_a_wrong_registration_raises_with_the_reason(registered):
    class Dense(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x)

    register_layer(Dense, lambda layer: "it is quantised to 4 bits")
    model = Holder(Dense(6, 6, rngs=nnx.Rngs(0)))
    with pytest.raises(LoRAError, match=r"\['proj'\] match 'proj' \(Dense\), but it is quantised to 4 bits"):
        make_manager(model, target_modules=["proj"])
    with pytest.raises(LoRAError, match=r"takes a subclass of nnx\.Module"):
        register_layer(int, lambda layer: "no")  # type: ignore[type-var]  # the point of the test


REFUSED = {
    "convolution": (lambda r: nnx.Conv(6, 6, (1,), rngs=r), "Conv is not a linear or embedding layer that jlora knows"),
    "batched kernel": (lambda r: nnx.LinearGeneral(6, 6, batch_axis={0: 3}, rngs=r), "a kernel of its own"),
    "batched einsum": (lambda r: nnx.Einsum("BTD,BDH->BTH", (3, 6, 6), rngs=r), "of its own for each entry of B"),
    "diagonal": (lambda r: nnx.Einsum("TD,DD->TD", (6, 6), rngs=r), "takes a diagonal"),
    "sum of its own": (lambda r: nnx.Einsum("BTD,FH->BTH", (6, 6), rngs=r), "sums over D, F alone"),
    "kernel ellipsis": (lambda r: nnx.Einsum("BD,D...->B...", (6, 6), rngs=r), "has an ellipsis"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_cannot_be_wrapped_raise_with_the_reason(kind):
    build, reason = REFUSED[kind]

    class Model(nnx.Module):
        def __init__(self):
            self.proj = build(nnx.Rngs(0))
            self.good = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

    model = Model()
    cls = type(model.proj)
    manager = make_manager(model)
    assert type(model.proj) is cls
    with pytest.raises(AdapterMismatchError, match=reason):
        manager.add_adapter(make_adapter("one", [Target("proj", 6, 6, ""), Target("good", 6, 6, "")], 2))
    manager.unwrap()
    with pytest.raises(LoRAError, match=reason):
        make_manager(model, target_modules=["proj", "good"])
    assert type(model.good) is nnx.Linear
