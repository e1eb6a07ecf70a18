"""Collectives of compiled programs, compared with those of the unwrapped model."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jlora
from tests.layers.merging import Target, make_adapter, make_manager, run, serve
from tests.layers.mesh_models import LENGTH, NAMES, ONE, SMALL, Small, mesh_of, placed, tokens_of
from tests.records import write_programs

pytestmark = [pytest.mark.mesh, pytest.mark.usefixtures("as_users_compile")]

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast"
RANK = 6  # four shards do not divide it
ROWS = len(NAMES) * LENGTH


def collectives(text: str) -> Counter[tuple[str, int]]:
    """Count the collectives of a program by kind and number of values that a device receives."""
    found: Counter[tuple[str, int]] = Counter()
    for shapes, kind in re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", text):
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):
            found[kind, int(np.prod([int(n) for n in dims.split(",") if n]))] += 1
    return found


def collectives_of_writes(manager: jlora.LoRAManager) -> Counter[tuple[str, int]]:
    """Return the collectives of the programs that write slots."""
    programs = write_programs(manager)
    assert len(programs) > 3
    return sum((collectives(program.as_text()) for program in programs), Counter())


def programs(make, mesh, specs, adapter, **config):
    """Return the collectives of the unwrapped and of the wrapped program."""

    inputs = jax.device_put(make.inputs(), jax.NamedSharding(mesh, P()))
    base = run.lower(placed(make(), mesh, specs), inputs).compile().as_text()
    model = placed(make(), mesh, specs)
    manager = make_manager(model, [adapter], max_lora_rank=RANK, **config)
    with manager.prepare(["one" if name else None for name in NAMES]) as batch:
        text = serve.lower(model, inputs, batch).compile().as_text()
        without = serve.lower(model, inputs, None).compile().as_text()
    assert collectives(without) == collectives(base)
    return collectives(base), collectives(text)


class Chain(Small):
    def __init__(self):
        super().__init__()
        del self.embed
        rngs = nnx.Rngs(1)
        self.heads = nnx.LinearGeneral(8, (4, 4), rngs=rngs)
        self.o_proj = nnx.LinearGeneral((4, 4), 8, axis=(-2, -1), rngs=rngs)
        self.out = nnx.Einsum("BTNH,NHD->BTD", (4, 4, 8), rngs=rngs)

    @staticmethod
    def inputs():
        return np.ones((len(NAMES), LENGTH, 8), np.float32)

    def __call__(self, x):
        x = x + self.down(jnp.tanh(self.up(x)))
        heads = self.heads(x)
        return self.head(x + self.o_proj(heads) + self.out(jnp.tanh(heads)))


CHAIN = SMALL | {"heads": P(None, "t"), "o_proj": P("t"), "out": P("t")}
CHAIN_TARGETS = [
    *(Target(name, 8, 16, "") for name in ("up", "heads")),
    *(Target(name, 16, 8, "") for name in ("down", "o_proj", "out")),
    Target("head", 8, 12, ""),
]


def test_flax_projections_add_no_collective():
    base, found = programs(Chain, mesh_of(t=4), CHAIN, make_adapter("one", CHAIN_TARGETS, RANK))
    assert base
    assert found == base


def test_fully_sharded_adds_one_collective_of_rank_size_for_each_projection():
    """x A^T is gathered for column-parallel layers and summed for row-parallel ones, 3 of each here."""
    base, found = programs(Chain, mesh_of(t=4), CHAIN, make_adapter("one", CHAIN_TARGETS, RANK), fully_sharded=True)
    more = found - base
    assert not base - found
    assert more == Counter({("all-gather", ROWS * 8): 3, ("all-reduce", ROWS * RANK): 3})  # 6 ranks in 4 parts: 8


# --- Slot arrays ------------------------------------------------------------------------------------------------------

# Shapes (R, K) of A [S, n, R, K] and (R, N) of B [S, R, N] on each of 4 shards.
LOCAL = {
    False: {"embed": ((6, 3), (6, 8)), "up": ((6, 8), (6, 4)), "down": ((6, 4), (6, 8)), "head": ((6, 8), (6, 3))},
    True: {"embed": ((6, 3), (6, 2)), "up": ((2, 8), (6, 4)), "down": ((6, 4), (6, 2)), "head": ((2, 8), (6, 3))},
}


@pytest.mark.parametrize("fully", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_slot_array_is_whole_on_a_device(fully):
    """Before and after a load, a swap, a step and an update. Slot writes contain no collective."""
    mesh = mesh_of(t=4)
    model = placed(Small(), mesh, SMALL)
    manager = make_manager(model, [ONE], max_lora_rank=RANK, max_loras=1, fully_sharded=fully)

    def check():
        for name, (of_a, of_b) in LOCAL[fully].items():
            layer = getattr(model, name)
            for attribute, local in (("jlora_a", (1, 1, *of_a)), ("jlora_b", (1, *of_b))):
                shards = getattr(layer, attribute)[...].addressable_shards
                assert len(shards) == 4
                assert {shard.data.shape for shard in shards} == {local}, (name, attribute)

    check()
    with manager.prepare(["one"] * 4) as batch:
        check()
        serve(model, tokens_of(4, LENGTH), batch)
        check()
    other = make_adapter("two", [Target("down", 16, 8, "")], 5)
    manager.add_adapter(other)
    with manager.prepare(["two"] * 4):
        check()
    manager.update_adapter("two", {"base_model.model.down.lora_A.weight": jnp.ones((5, 16))})
    with manager.prepare(["two"] * 4):
        check()
    assert not collectives_of_writes(manager)
