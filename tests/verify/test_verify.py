"""`manager.verify`: correct models pass unchanged, and errors that no shape shows are named."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.layers.variants.dora import SCALE_COLUMNS
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import (
    Target,
    assert_close,
    expected_rows,
    make_adapter,
    make_manager,
    merge,
    normal,
    serve,
    step_of_one_trace,
)
from tests.layers.trial_variants import broken, registered
from tests.records import slot_names

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("registered")]


def tokens_of(*shape):
    return np.random.default_rng(1).integers(0, 11, shape).astype(np.int32)


class Attention(nnx.Module):
    packed_modules = {"kv": ("k", "v")}

    def __init__(self, rngs, dtype=jnp.float32):
        self.q = nnx.Einsum("BTD,NDH->BTNH", (2, 8, 4), param_dtype=dtype, rngs=rngs)
        self.kv = nnx.Einsum("BTD,SNDH->SBTNH", (2, 2, 8, 4), param_dtype=dtype, rngs=rngs)
        self.out = nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        k, v = self.kv(x)
        scores = jnp.einsum("BTNH,BSNH->BNTS", self.q(x), k)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
        return x + self.out(jnp.einsum("BNTS,BSNH->BTNH", weights, v))


class Transformer(nnx.Module):
    """A model with tied logits, merged projections, and layers under scan."""

    packed_modules = {"kv": ("k", "v")}

    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 8, param_dtype=dtype, rngs=rngs)
        self.first = Attention(rngs, dtype)
        self.blocks = nnx.vmap(lambda rngs: Attention(rngs, dtype), in_axes=0, out_axes=0)(nnx.Rngs(1).split(2))
        self.mlp = nnx.Linear(8, 8, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.first(self.embed(tokens))
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.embed.attend(self.mlp(x))


ALL = {
    "embed", "embed.attend", "mlp", "first.q", "first.kv", "first.out", "blocks.q", "blocks.kv", "blocks.out",
}  # fmt: skip


def test_a_model_that_is_served_right_passes():
    """With finishers here; without them in `test_a_step_may_donate_its_inputs`."""
    manager = make_manager(Transformer(), max_loras=1, variants=["dora"])
    report = manager.verify(serve, tokens_of(4, 3))
    assert set(report.checked) == ALL
    assert report.checked[0] == "embed"
    assert report.checked[-1] == "embed.attend"
    assert report.unserved == {}
    assert 0 < report.error < 2e-6
    assert report.tolerance == 1e-4


@pytest.mark.slow
def test_bfloat16_is_compared_with_the_float32_merge():
    manager = make_manager(Transformer(jnp.bfloat16))
    report = manager.verify(serve, tokens_of(4, 3))
    assert set(report.checked) == ALL
    assert 1e-4 < report.error < report.tolerance == 2e-2


def test_verify_keeps_slots_adapters_and_the_compiled_step():
    model = Two(nnx.Linear(6, 6, rngs=nnx.Rngs(1)))

    step = step_of_one_trace()
    target = Target("proj", 6, 6, "proj.kernel")
    adapter = make_adapter("one", [target], 2)
    twins = {"one": merge(model, [target], adapter), None: nnx.clone(model)}
    manager = make_manager(model, [adapter])
    x, names = normal(3, 3, 6), ["one", None, "one"]
    with manager.prepare(names) as batch:
        assert_close(step(model, x, batch), expected_rows(twins, names, x))
        before, slots = jax.tree.map(np.asarray, nnx.state(model)), slot_names(manager)
        manager.verify(serve, normal(4, 3, 6))
        chex.assert_trees_all_equal(nnx.state(model), before)
        assert_close(step(model, x, batch), expected_rows(twins, names, x))
    assert slot_names(manager) == slots


def test_a_step_may_donate_its_inputs():
    manager = make_manager(Transformer())
    inputs = {"tokens": jnp.asarray(tokens_of(3, 5)), "cache": jnp.ones((3, 5, 8)), "key": jax.random.key(0)}

    @manager.jit(donate_argnames="cache")
    def step(model, tokens, cache, batch):
        with jlora.use(batch):
            return model(tokens), cache + 1

    def two_steps(model, inputs, batch):
        _, cache = step(model, inputs["tokens"], inputs["cache"], batch)
        return step(model, inputs["tokens"], cache, batch)[0]

    report = manager.verify(two_steps, inputs)
    assert set(report.checked) == ALL
    assert report.unserved == {}
    assert 0 < report.error < 2e-6
    assert not inputs["cache"].is_deleted()


def test_packed_rows_and_one_row_a_sequence():
    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(11, 6, rngs=nnx.Rngs(0))
            self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
            self.lm_head = nnx.Linear(6, 11, rngs=nnx.Rngs(2))

        def __call__(self, inputs):
            tokens, last = inputs
            x = self.proj(self.embed(tokens))
            return self.lm_head(x[last]), x

    counts = [2, 5, 1, 3]
    inputs = (tokens_of(16), jnp.asarray(np.cumsum(counts) - 1))
    manager = make_manager(Model())
    report = manager.verify(serve, inputs, jlora.BatchShape(4, token_counts=counts, pad_to=16))
    assert report.checked == ("embed", "proj", "lm_head")


# --- Errors that verify names------------------------------------------------------------------------------------------


def exposed(manager, path, inputs, **options):
    """Check that verify names the layer as wrong, or as unserved if its rows fit no layout."""
    try:
        report = manager.verify(serve, inputs, **options)
    except LoRAError as error:
        message = str(error)
    else:
        assert path not in report.checked
        message = f"{path}: {report.unserved[path]}"
    assert f"verify: {path} (" in message or f"{path}: " in message, message


class Exchanged(nnx.Module):
    """A model whose layer `proj` sees two sequences, or two items, in each other's place after `exchange`."""

    def __init__(self, count):
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.order = nnx.Variable(jnp.arange(count))

    def exchange(self, i, j):
        order = np.arange(self.order.size)
        order[[i, j]] = j, i
        self.order[...] = jnp.asarray(order)

    def __call__(self, x):
        return jnp.tanh(self.proj(x[self.order[...]]))[self.order[...]]


@pytest.mark.parametrize(("count", "passes"), [(1, 1), (3, 1), pytest.param(9, 2, marks=pytest.mark.slow)])
def test_any_two_exchanged_sequences_are_exposed(count, passes):
    x, model = normal(count, 2, 6), Exchanged(count)
    manager = make_manager(model)
    assert manager.verify(serve, x).batches == passes
    pairs = [*itertools.combinations(range(count), 2)]
    for i, j in pairs[:: max(1, len(pairs) // 2)]:
        model.exchange(i, j)
        with pytest.raises(LoRAError, match=r"verify: proj \("):
            manager.verify(serve, x, seed=i + j)


class Items(nnx.Module):
    """A model that adds to each sequence the items that belong to it."""

    def __init__(self, tower, owners):
        self.tower, self.owners = tower, nnx.Variable(jnp.asarray(owners))
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(2))

    def __call__(self, inputs):
        x, items = inputs
        seen = self.tower(items).mean(1)
        mine = self.owners[...][None] == jnp.arange(x.shape[0])[:, None]
        return self.proj(x) + (mine.astype(x.dtype) @ seen)[:, None]


@pytest.mark.slow
def test_any_two_exchanged_items_are_exposed():
    """Items 0 and 1 of six belong to two sequences, and item 6 to none."""
    owners = [0, 1, 2, 3, 4, 5, None]
    inputs = normal(6, 2, 6), normal(7, 3, 6)
    of_none = [-1 if owner is None else owner for owner in owners]
    for pair in (None, (0, 1), (4, 6)):
        tower = Exchanged(7)
        if pair is not None:
            tower.exchange(*pair)
        manager = make_manager(Items(tower, of_none), row_groups={"tower": "items"})
        shape = jlora.BatchShape(6, items={"items": jlora.Items(owners)})
        if pair is None:
            assert manager.verify(serve, inputs, shape).batches == 2
            continue
        with pytest.raises(LoRAError, match=r"verify: tower\.proj \("):
            manager.verify(serve, inputs, shape)


class TimeMajor(nnx.Module):
    """A model with rows [L, B, F] inside, or throughout."""

    def __init__(self, inside=True):
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.inside = inside

    def __call__(self, x):
        if not self.inside:
            return jnp.tanh(self.proj(x))
        return jnp.tanh(self.proj(x.swapaxes(0, 1))).swapaxes(0, 1)


def test_a_time_major_model_with_as_many_tokens_as_sequences():
    exposed(make_manager(TimeMajor()), "proj", normal(3, 3, 6))
    exposed(make_manager(TimeMajor(inside=False)), "proj", normal(3, 3, 6), batch_axis=1)


class Einsum(nnx.Module):
    def __init__(self, equation, shape):
        self.equation = equation
        self.w = nnx.Param(jnp.asarray(normal(*shape)))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class Two(nnx.Module):
    """A correct layer, then one under test."""

    def __init__(self, layer):
        self.first = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.proj = layer

    def __call__(self, x):
        y = self.proj(jnp.tanh(self.first(x)))
        return y.reshape(*x.shape[:-1], -1)


def test_swapped_axes_are_exposed():
    register_layer(Einsum, lambda layer: jlora.LinearSpec(6, 6, "w", in_axes=(1,), out_axes=(0,)))
    exposed(make_manager(Two(Einsum("BTD,DF->BTF", (6, 6)))), "proj", normal(3, 4, 6))

    def rows(layer, x, y):
        return x, y.reshape(*y.shape[:2], -1), lambda flat: flat.reshape(y.shape)

    # Heads and head dims of one size, flattened in the wrong order.
    register_layer(Einsum, lambda layer: jlora.LinearSpec(6, 9, "w", in_axes=(0,), out_axes=(2, 1), rows=rows))
    exposed(make_manager(Two(Einsum("BTD,DNH->BTNH", (6, 3, 3)))), "proj", normal(4, 5, 6))


class ScalesInput(nnx.Linear):
    def __call__(self, x):
        return super().__call__(1.1 * x)


class ScalesOutput(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x) * 1.1


@pytest.mark.parametrize(("cls", "registers"), [(ScalesInput, True), (ScalesOutput, False)])
def test_an_undeclared_scale_of_a_layer_is_exposed(cls, registers):
    if registers:
        register_layer(cls, lambda layer: jlora.LinearSpec(layer.in_features, layer.out_features))
    exposed(make_manager(Two(cls(6, 6, rngs=nnx.Rngs(0)))), "proj", normal(3, 4, 6))


def test_an_embedding_with_an_undeclared_scale_is_exposed():
    class Scaled(nnx.Embed):
        def __call__(self, tokens):
            return super().__call__(tokens) * 3.0

    class Model(nnx.Module):
        def __init__(self):
            self.embed = Scaled(11, 6, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            return self.embed(tokens)

    register_layer(Scaled, lambda layer: jlora.EmbedSpec(11, 6))
    exposed(make_manager(Model()), "embed", tokens_of(3, 4))
    register_layer(Scaled, lambda layer: jlora.EmbedSpec(11, 6, scale=3.0))
    assert make_manager(Model()).verify(serve, tokens_of(3, 4)).checked == ("embed",)


def test_packed_rows_without_token_counts_are_exposed():
    manager = make_manager(TimeMajor(inside=False))
    with pytest.raises(LoRAError, match="token_counts"):
        manager.verify(serve, normal(12, 6), jlora.BatchShape(3))
    assert manager.verify(serve, normal(12, 6), jlora.BatchShape(3, token_counts=[5, 0, 7])).checked == ("proj",)


def test_the_first_layer_in_call_order_is_named():
    class Model(nnx.Module):
        def __init__(self):
            self.a = ScalesOutput(6, 6, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
            self.c = ScalesInput(6, 6, rngs=nnx.Rngs(2))

        def __call__(self, x):
            return self.a(jnp.tanh(self.b(jnp.tanh(self.c(x)))))

    with pytest.raises(LoRAError, match=r"verify: c \(ScalesInput\) is off: .* by 0\.[0-9]+, and 0.0001 is allowed"):
        make_manager(Model()).verify(serve, normal(3, 4, 6))


def test_outputs_that_cannot_be_compared_raise():
    manager = make_manager(Two(nnx.Linear(6, 6, rngs=nnx.Rngs(1))))
    with pytest.raises(LoRAUsageError, match="batch_axis"):
        manager.verify(lambda model, x, batch: serve(model, x, batch).mean(0), normal(3, 4, 6))
    with pytest.raises(LoRAUsageError, match="must return floating arrays"):
        manager.verify(lambda model, x, batch: serve(model, x, batch).argmax(-1), normal(3, 4, 6))
    with pytest.raises(LoRAError, match="change no row"):
        manager.verify(lambda model, x, batch: 0 * serve(model, x, batch), normal(3, 4, 6))
    with pytest.raises(LoRAUsageError, match="num_sequences"):
        manager.verify(serve, 3)


# --- Finishers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_finisher_that_is_wrong_is_exposed(dtype):
    """The right one passes in `test_a_model_that_is_served_right_passes`."""
    with registered(broken(SCALE_COLUMNS)), pytest.raises(LoRAError, match=r"verify: first \(Linear\) is off"):
        make_manager(Two(nnx.Linear(6, 6, rngs=nnx.Rngs(1))), variants=["dora"], dtype=dtype).verify(
            serve, normal(3, 4, 6)
        )


# --- Guessed specs -------------------------------------------------------------------------------------------------


class Gate(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x).astype(jnp.float32)


@pytest.mark.parametrize(
    "build", [lambda: Einsum("BTD,DNH->BTNH", (6, 2, 3)), lambda: nnx.LoRALinear(6, 6, lora_rank=2, rngs=nnx.Rngs(0))]
)
def test_a_guess_that_holds_takes_adapters_afterwards(build):
    model = Two(build())
    target = Target("proj", 6, 6, "proj.kernel")
    if isinstance(model.proj, Einsum):
        target = Target("proj", 6, 6, "proj.w", lambda d: d.T.reshape(6, 2, 3))
    adapter = make_adapter("one", [target], 2)
    twins = {"one": merge(model, [target], adapter), None: nnx.clone(model)}
    manager = make_manager(model)
    with pytest.raises(AdapterMismatchError, match="takes no adapter yet"):
        manager.add_adapter(adapter)
    report = manager.verify(serve, normal(3, 4, 6))
    assert report.confirmed == ("proj",)
    assert manager.verify(serve, normal(3, 4, 6)).confirmed == ("proj",)
    assert all(layer.reason is None for layer in manager.layers() if layer.wrapped)
    manager.add_adapter(adapter)
    x, names = normal(3, 4, 6), ["one", None, "one"]
    with manager.prepare(names) as batch:
        assert_close(serve(model, x, batch), expected_rows(twins, names, x))


def test_an_unseen_guess_is_not_verified():
    class Model(nnx.Module):
        def __init__(self):
            self.unseen = Gate(6, 6, rngs=nnx.Rngs(0))
            self.never = Gate(6, 6, rngs=nnx.Rngs(0))
            self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.proj(x) + 0 * self.unseen(x)

    manager = make_manager(Model())
    report = manager.verify(serve, normal(3, 4, 6))
    assert report.confirmed == ()
    assert "changes no row" in report.unserved["unseen"]
    assert "never calls" in report.unserved["never"]
    for name in ("unseen", "never"):
        with pytest.raises(AdapterMismatchError, match="takes no adapter yet"):
            manager.add_adapter(make_adapter("one", [Target(name, 6, 6, "")], 2))


# --- Values not finite -----------------------------------------------------------------------------------------------


class ExpLog(nnx.Module):
    """A linear layer of positive weights. Negative merged weights give NaN."""

    def __init__(self):
        self.w = nnx.Param(jnp.abs(jnp.asarray(normal(6, 6))) + 0.1)

    def __call__(self, x):
        return x @ jnp.exp(jnp.log(self.w[...]))


class Flipped(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x[..., ::-1])


def test_merged_weights_that_give_nan_are_a_failure():
    register_layer(ExpLog, lambda layer: jlora.LinearSpec(6, 6, "w"))
    with pytest.raises(LoRAError, match=r"verify: proj \(ExpLog\) is off: .* is not finite, as served or with merged"):
        make_manager(Two(ExpLog())).verify(serve, normal(3, 4, 6))


@pytest.mark.parametrize("flips", [True, False])
def test_a_float8_kernel_is_compared_with_its_float32_merge(flips):
    register_layer(Flipped, lambda layer: jlora.LinearSpec(6, 6))
    cls = Flipped if flips else nnx.Linear
    layer = cls(6, 6, dtype=jnp.float32, rngs=nnx.Rngs(1))
    layer.kernel.set_value(layer.kernel[...].astype(jnp.float8_e4m3fn))
    manager = make_manager(Two(layer), dtype="float32")
    if flips:
        exposed(manager, "proj", normal(3, 4, 6))
    else:
        assert manager.verify(serve, normal(3, 4, 6)).checked == ("first", "proj")


def test_a_model_that_is_not_finite_cannot_be_compared():
    model = Two(nnx.Linear(6, 6, rngs=nnx.Rngs(1)))
    model.proj.kernel[...] = model.proj.kernel[...].at[0, 0].set(jnp.nan)
    with pytest.raises(LoRAError, match=r"is not finite.* the parameter of proj is not finite"):
        make_manager(model).verify(serve, normal(3, 4, 6))

    def hides(model, x, batch):
        return serve(model, x, batch).at[..., 0].set(-jnp.inf)

    with pytest.raises(LoRAError, match="without adapters is not finite"):
        make_manager(Two(nnx.Linear(6, 6, rngs=nnx.Rngs(1)))).verify(hides, normal(3, 4, 6))


class Normed(nnx.Module):
    def __init__(self):
        self.proj = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.proj(x))


@pytest.mark.slow
def test_model_in_training_mode_is_named_as_a_cause():
    model = Normed()
    manager, x = make_manager(model), normal(5, 3, 8)
    with pytest.raises(LoRAError, match=r"proj \(Linear\) is off.*training mode: call model\.eval\(\) first"):
        manager.verify(serve, x)
    model.eval()
    assert manager.verify(serve, x).checked == ("proj",)


class Interleaved(nnx.Linear):
    def __call__(self, x):
        y = super().__call__(x)
        return jnp.concatenate([y[..., ::2], y[..., 1::2]], axis=-1)


@pytest.mark.slow
def test_a_kernel_that_is_ordered_unlike_its_output():
    def in_order(layer):
        return jnp.concatenate([layer.kernel[...][:, ::2], layer.kernel[...][:, 1::2]], axis=-1)

    for dequantize in (None, in_order):
        spec = jlora.LinearSpec(6, 6, dequantize=dequantize)
        register_layer(Interleaved, lambda layer, spec=spec: spec)
        manager = make_manager(Two(Interleaved(6, 6, use_bias=False, rngs=nnx.Rngs(1))))
        if dequantize is None:
            with pytest.raises(
                LoRAError, match=r"verify: proj \(Interleaved\) is off: .*LinearSpec\(dequantize=\) ret"
            ):
                manager.verify(serve, normal(3, 4, 6))
        else:
            assert manager.verify(serve, normal(3, 4, 6)).checked == ("first", "proj")
