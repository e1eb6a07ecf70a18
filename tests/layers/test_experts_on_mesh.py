"""Adapters of experts on meshes of virtual devices, for the reference decoder with both dispatches and other models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import LoRAError
from jlora.models import Decoder, DecoderConfig
from jlora.models.config import MoEConfig
from jlora.models.expert_parallel import spread_over
from tests.layers.expert_models import Gathering, Model, Ragged, Scanned, Seams
from tests.layers.merging import in_int8
from tests.layers.test_collectives import collectives_of_writes
from tests.manager.test_shared_experts import NAMES, World
from tests.models.test_mesh import collectives, make_mesh
from tests.small_device import on_small_device

pytestmark = [pytest.mark.device, pytest.mark.mesh]

EXPERTS, HIDDEN, INNER, LAYERS, LENGTH = 4, 16, 12, 1, 5
BATCHES = (["a", None, "b", "c"], ["d", "a", None, "b"], ["c", "d", "d", None])


def adapter(name, seed, rank, experts=range(EXPERTS)):
    rng = np.random.default_rng(seed)

    def pair(k, n):
        return rng.normal(size=(rank, k)).astype(np.float32), 0.3 * rng.normal(size=(n, rank)).astype(np.float32)

    arrays = {}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        arrays[f"{block}.self_attn.q_proj"] = pair(HIDDEN, HIDDEN)
        arrays[f"{block}.mlp.gate"] = pair(HIDDEN, EXPERTS)
        for e in experts:
            arrays[f"{block}.mlp.experts.{e}.gate_proj"] = pair(HIDDEN, INNER)
            arrays[f"{block}.mlp.experts.{e}.up_proj"] = pair(HIDDEN, INNER)
            arrays[f"{block}.mlp.experts.{e}.down_proj"] = pair(INNER, HIDDEN)
    return jlora.Adapter.from_arrays(name, arrays, alpha=2.0 * rank)


ADAPTERS = [adapter("a", 1, 2), adapter("b", 2, 4), adapter("c", 3, 3, experts=(1, 3)), adapter("d", 4, 1)]


class Served:
    """A decoder with a layer of experts, its manager, and a jitted forward."""

    def __init__(self, axes=None, dispatch="all_gather", staging=2**28, adapters=None, **config):
        shape = DecoderConfig(
            vocab_size=32, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=4, head_dim=4,
            moe=MoEConfig(num_experts=EXPERTS, experts_per_token=2, intermediate_size=INNER, layers=(True,) * LAYERS),
        )  # fmt: skip
        mesh = None if axes is None else make_mesh(axes)
        self.model = Decoder(shape, dtype=jnp.float32, rngs=nnx.Rngs(0), mesh=mesh, dispatch=dispatch)
        self.tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, LENGTH)))
        self.base = None if mesh is None else collectives(jax.jit(_logits).lower(self.model, self.tokens).compile())
        data = [name for name in spread_over(dispatch) if name in (axes or {})]
        sizes = {"max_loras": 3, "max_lora_rank": 4, "max_cpu_loras": 6, "data_axes": data} | config
        self.manager = on_small_device(staging, jlora.LoRAManager, self.model, jlora.LoRAConfig(**sizes))
        for one in ADAPTERS if adapters is None else adapters:
            self.manager.add_adapter(one)

        self.traces = 0  # chex would add up all functions of one name in a test

        @jax.jit
        def forward(model, tokens, batch):
            self.traces += 1
            with jlora.use(batch):
                return model(tokens)

        self.forward = forward

    def serve(self, names):
        with self.manager.prepare(names) as batch:
            return np.asarray(self.forward(self.model, self.tokens, batch))

    def answers(self):
        return np.stack([self.serve(names) for names in BATCHES])

    def collectives(self):
        with self.manager.prepare(BATCHES[0]) as batch:
            return collectives(self.forward.lower(self.model, self.tokens, batch).compile())

    def slots_of_experts(self):
        """Return path -> slot array or ranks of the products of experts."""
        state = nnx.state(self.model, jlora.SlotParam)
        return {
            path: value for path, value in nnx.to_flat_state(state) if "experts" in path and "stamps" not in path[-1]
        }


def _logits(model, tokens):
    return model(tokens)


@pytest.fixture(scope="module")
def expected():
    return Served().answers()


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


slow = pytest.mark.slow
CASES = [
    ({"expert": 4}, "all_gather", {}),
    ({"expert": 2, "tensor": 2}, "all_to_all", {"staging": 1024}),
    pytest.param({"data": 2, "expert": 2, "tensor": 2}, "all_gather", {}, marks=slow),
    pytest.param({"expert": 2, "tensor": 4}, "all_to_all", {"fully_sharded": True, "max_lora_rank": 6}, marks=slow),
]


@pytest.mark.parametrize(("axes", "dispatch", "config"), CASES, ids=str)
def test_answers_equal_one_device(expected, axes, dispatch, config):
    served = Served(axes, dispatch, **config)
    close(served.answers(), expected)
    assert served.traces == served.manager.stats().compilations == 1
    experts, tensor = axes.get("expert", 1), axes.get("tensor", 1)
    fully = tensor if config.get("fully_sharded") else 1
    arrays = served.slots_of_experts()
    assert len(arrays) == 2 * 3 * LAYERS
    for path, variable in arrays.items():
        array, (product, kind) = variable.get_value(), path[-1].removeprefix("jlora_").rsplit("_", 1)
        split = {"a": fully if product == "gate_up" else tensor, "b": tensor if product == "gate_up" else fully}
        for shard in array.addressable_shards:
            assert shard.data.size * experts * split.get(kind, 1) == array.size, path
    for one in (ADAPTERS[i] for i in (2, 3)):  # adapters that are still in slots after the last batch
        found = served.manager.export_adapter(one.name)
        assert found.modules.keys() == one.modules.keys()
        for name, module in one.modules.items():
            np.testing.assert_array_equal(found.modules[name].a, module.a)
            np.testing.assert_allclose(found.modules[name].b, module.b, rtol=1e-6)
    if not config.get("fully_sharded"):
        assert served.collectives() == served.base


@pytest.fixture(scope="module")
def expected_in_int8():
    return Served(adapters=[in_int8(one) for one in ADAPTERS]).answers()


@pytest.mark.parametrize(("axes", "dispatch", "config"), CASES[:2] + CASES[3:], ids=str)
def test_slots_of_int8_serve_the_rounded_factors(expected, expected_in_int8, axes, dispatch, config):
    served = Served(axes, dispatch, dtype="int8", **config)
    close(served.answers(), expected_in_int8)
    assert np.abs(expected_in_int8 - expected).max() > 1e-4 * np.abs(expected).max()
    assert {str(variable.get_value().dtype) for variable in served.slots_of_experts().values()} == {"int8", "float32"}


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_one_expert_is_updated_in_the_shard_that_has_it(expected, dtype):
    """In int8 as the rounded factors on one device."""
    stored = in_int8 if dtype else lambda adapter: adapter
    served, one = Served({"expert": 4}, dtype=dtype), Served(adapters=map(stored, ADAPTERS))
    other = adapter("c", 9, 3, experts=(3,))
    for world, new in ((served, other), (one, stored(other))):
        arrays = {}
        for name, module in new.modules.items():
            if ".experts.3." in name:
                arrays |= {f"{name}.lora_A.weight": module.a, f"{name}.lora_B.weight": module.b}
        world.serve(["c", None, "a", "c"])
        world.manager.update_adapter("c", arrays)
    answers = one.answers()
    assert np.abs(answers - expected)[0, 3].max() > 1e-3
    close(served.answers(), answers)


def test_slot_writes_need_no_collective():
    served = Served({"expert": 2, "tensor": 2}, fully_sharded=True)
    served.serve(["a", None, "c", None])
    assert not collectives_of_writes(served.manager)


@pytest.mark.usefixtures("unchecked_calls")
def test_a_row_map_with_taken_of_another_length_is_refused():
    """On a shard `taken` is the index of the row's input, and `source` the index of its token."""
    with pytest.raises(LoRAError, match=r"RowMap.taken must be integers \[3\]"):
        jlora.RowMap(jnp.arange(3), of="tokens", length=1, expert=jnp.arange(3), taken=jnp.arange(2))


def on_mesh(model, axes, split):
    """Return the model with the kernels of its experts split over "expert", or along one axis over "tensor"."""
    mesh = make_mesh(axes)
    for path, param in nnx.iter_graph(model):
        if not isinstance(param, nnx.Param):
            continue
        value = param.get_value()
        spec = split if "experts" in path else ()
        lead = (None,) * (value.ndim - len(spec))
        param.set_value(jax.device_put(value, NamedSharding(mesh, P(*lead, *spec))))
    return model


@pytest.mark.parametrize(
    ("make", "axes", "split"),
    [
        (lambda: Model(Gathering, nnx.Rngs(0)), {"expert": 5}, ("expert", None, None)),
        pytest.param(lambda: Model(Seams, nnx.Rngs(0)), {"tensor": 2}, (None, None, "tensor"), marks=slow),
        pytest.param(lambda: Scanned(Ragged, nnx.Rngs(0)), {"expert": 5}, ("expert", None, None), marks=slow),
    ],
    ids=["methods", "methods, N", "scanned"],
)
def test_experts_partitioned_by_the_compiler_equal_the_reference(make, axes, split):
    """One array holds the rows of all experts, and the compiler partitions it."""
    world = World(on_mesh(make(), axes, split))
    world.fill().check()
    world.check([*reversed(NAMES)])
