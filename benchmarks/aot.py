"""Compiles whole steps for meshes of TPUs, with none in the box: collectives and slot memory of a wrapped model.

    JAX_PLATFORMS=cpu python -m benchmarks.aot [--chips v6e] [--models llama-3-8b] [--layers decoder] [--steps decode]
        [--meshes tensor=8] [--out benchmarks/results/aot_mesh.json] [--more]

Two layers of a model's shapes, compiled with and without adapters; what is counted in the two programs is of the same
device. Decode: 64 sequences over a cache of `CONTEXT` positions; prefill: 4096 tokens as eight sequences, or as many
as an axis has shards. A row is good where the step with adapters has no collective more than the one without, and
those of a kind give no more elements in all. Two kinds are allowed some, of no more than rank-r size: layers whose
product cannot be reached ("opaque") an all-reduce for each row-parallel projection, and fully sharded slots that and
an all-gather for each column-parallel one; where both, each row-parallel projection gathers the columns of its output
too, which the base model has summed up already. And the bytes of slots on a device are those of the rules
(`jlora.sharding.rules`), worked out here from the model's sizes; no array of the shape of a slot array that they
split is in the program.

The counts of a model of all its layers follow from those of two and of none. `--more` adds to the rows of an earlier
run. Needs the `libtpu` wheel (extra `test`).
"""

import argparse
import collections
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu is used as a compiler: there is no machine to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from benchmarks.decode_step import CONTEXT, decode, flat_step, prefill
from benchmarks.mesh import PROJECTIONS, SHAPES
from benchmarks.timing import write_rows
from jlora.layers.forward.batch import Layout, LoRABatch
from jlora.layers.site import allocate
from jlora.layers.wrap.apply import wrap_model
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.models import Decoder, DecoderConfig
from jlora.models.expert_parallel import spread_over
from jlora.models.partition import Dispatch
from jlora.pallas import api, moe, tiles

TOPOLOGIES = {"v5e": "v5e:4x4", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}
LAYERS = {"llama-3-8b": 32, "llama-3-70b": 80, "qwen3-30b-a3b": 48}
KINDS = ("decoder", "nnx.Linear", "opaque")
BATCH, SLOTS, RANK = 64, 8, 16
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Case(NamedTuple):
    """One program and the same without adapters.

    Attributes:
      chip: of `TOPOLOGIES`.
      model: of `LAYERS`.
      kind: "decoder", or two MLPs of its sizes made of "nnx.Linear" or of a class of "opaque" layers.
      mesh: axis -> size.
      step: "decode" or "prefill".
      dispatch: of the experts.
      fully: whether slots are fully sharded.
    """

    chip: str
    model: str
    kind: str
    mesh: dict[str, int]
    step: str
    dispatch: Dispatch = "all_gather"
    fully: bool = False


class Opaque(nnx.Module):
    """A linear layer that multiplies in its own way."""

    def __init__(self, inputs: int, outputs: int, kernel: nnx.Param[jax.Array]):
        self.inputs, self.outputs, self.kernel = inputs, outputs, kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


jlora.register_layer(Opaque, lambda layer: jlora.LinearSpec(layer.inputs, layer.outputs))


class Blocks(nnx.Module):
    """Column-parallel, then row-parallel, added to its input, for each layer."""

    def __init__(self, config: DecoderConfig, layers: int, mesh: Mesh, kind: str):
        inner = config.intermediate_size

        def layer(inputs: int, outputs: int, *axes: str | None) -> nnx.Module:
            said = {"out_sharding": tuple(name if name in mesh.axis_names else None for name in axes), "mesh": mesh}
            if kind == "opaque":
                return Opaque(inputs, outputs, nnx.Param(jnp.zeros((inputs, outputs), jnp.bfloat16), **said))
            options: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
            return nnx.Linear(inputs, outputs, kernel_metadata=said, rngs=nnx.Rngs(0), **options)

        size = config.hidden_size
        self.up = nnx.List([layer(size, inner, None, "tensor") for _ in range(layers)])
        self.down = nnx.List([layer(inner, size, "tensor", None) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(jax.nn.silu(up(x)))
        return x


@cache
def devices(chip: str) -> np.ndarray:
    return np.array(topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices)


def mesh_of(case: Case) -> Mesh:
    return Mesh(devices(case.chip).reshape(*case.mesh.values()), tuple(case.mesh))


def model_of(case: Case, config: DecoderConfig) -> nnx.Module:
    """Of shapes alone, each with its sharding."""
    mesh, layers = mesh_of(case), config.num_hidden_layers
    if case.kind != "decoder":
        return nnx.eval_shape(lambda: Blocks(config, layers, mesh, case.kind))
    options: dict[str, Any] = {"mesh": mesh, "dispatch": case.dispatch}
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options))


def wrapped_of(case: Case, model: nnx.Module, rank: int = RANK) -> WrappedModel:
    """`model` with slots for adapters, shapes as it is itself."""
    config = jlora.LoRAConfig(
        max_loras=SLOTS,
        max_lora_rank=rank,
        dtype=jnp.bfloat16,
        target_modules=PROJECTIONS if case.kind == "decoder" else None,
        fully_sharded=case.fully,
        data_axes=[name for name in spread_over(case.dispatch) if name in case.mesh],
    )
    return wrap_model(model, config, make=lambda site: nnx.eval_shape(lambda: allocate(site)))


def _shape(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def operands_of(case: Case, model: nnx.Module) -> tuple[Any, int, tuple[Any, ...]]:
    """The step, its number of sequences, and what it takes beside the model and the batch."""
    mesh = mesh_of(case)

    def operand(shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        return _shape(shape, dtype, NamedSharding(mesh, P(*spec)))

    sequences = BATCH if case.step == "decode" else max(8, max(case.mesh.values()))
    length = 1 if case.step == "decode" else 4096 // sequences
    if not isinstance(model, Decoder):
        assert isinstance(model, Blocks)
        data = "data" if "data" in case.mesh else None
        size = SHAPES[case.model][0](2).hidden_size
        return _call, sequences, (operand((sequences, length, size), "bfloat16", data),)
    tokens = operand((sequences, length), "int32")
    if case.step == "prefill":
        return prefill, sequences, (tokens,)
    rows = model.partition.dividing(sequences, model.model.rows)
    tensor = "tensor" if "tensor" in case.mesh else None
    kept = jax.eval_shape(lambda: model.init_cache(sequences, CONTEXT))
    kept = jax.tree.map(lambda leaf: operand(leaf.shape, leaf.dtype, rows or None, None, tensor), kept)
    return decode, sequences, (tokens, tokens, kept)


def _call(model: Any, x: jax.Array, batch: LoRABatch | None) -> jax.Array:
    with jlora.use(batch):
        return model(x)


class Program(NamedTuple):
    """What a compiled step says of itself.

    Attributes:
      collectives: (kind, dtype, number of elements) of each.
      argument_bytes: on a device.
      kernels: calls of Pallas kernels.
      whole: arrays of the shapes of slot arrays that the rules split, which no device should have.
    """

    collectives: collections.Counter[tuple[str, str, int]]
    argument_bytes: int
    kernels: int
    whole: tuple[str, ...]


def compiled(case: Case, model: nnx.Module, wrapped: WrappedModel | None) -> Program:
    run, sequences, given = operands_of(case, model)
    batch = None
    if wrapped is not None:
        ids = _shape((sequences,), "int32", NamedSharding(mesh_of(case), P()))
        batch = LoRABatch(ids, None, ids, Layout(wrapped.sites, sequences, wrapped.unserved.sites), None)
    step, leaves = flat_step(model, run)
    program = step.lower(leaves, *given, batch).compile()
    text, memory = program.as_text(), program.memory_analysis()
    split = () if wrapped is None else sorted(shape for shape in split_shapes(wrapped) if shape in text)
    return Program(collectives_of(text), memory.argument_size_in_bytes, text.count('"tpu_custom_call"'), tuple(split))


def collectives_of(text: str) -> collections.Counter[tuple[str, str, int]]:
    """Those in the text of a program.

    An asynchronous one counts where it starts; one that overlaps a product is in three fusions, of the same chain.
    """
    found: collections.Counter[tuple[str, str, int]] = collections.Counter()
    seen: set[Any] = set()
    for result, kind, start, rest in re.findall(rf" = (.*?) ({'|'.join(COLLECTIVES)})(-start)?\((.*)", text):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
        if (chain := re.search(r'chain_id="(\d+)"', rest)) is not None:
            if (one := (chain[1], kind, *shapes)) in seen:
                continue
            seen.add(one)
        if start and result.startswith("("):
            shapes = shapes[len(shapes) // 2 :]  # its operands come first
        found[kind, shapes[0][0], sum(math.prod(map(int, filter(None, dims.split(",")))) for _, dims in shapes)] += 1
    return found


def split_shapes(wrapped: WrappedModel) -> set[str]:
    """Shapes of slot arrays, as the text of a program has them, that are split; also with slots and experts merged."""
    whole: set[str] = set()
    own: set[str] = set()
    for site, layer in wrapped.modules.items():
        for name in site.attributes[:2]:
            held: Any = vars(layer)[name].get_value()
            for found, shape in ((whole, held.shape), (own, held.sharding.shard_shape(held.shape))):
                found.add(f"bf16[{','.join(map(str, shape))}]")
                if site.spec.experts is not None:
                    found.add(f"bf16[{','.join(map(str, (shape[0] * shape[1], *shape[2:])))}]")
    return whole - own


def by_kind(found: collections.Counter[tuple[str, str, int]]) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for (kind, _, _), count in found.items():
        counts[kind] += count
    return counts


def volume(found: collections.Counter[tuple[str, str, int]]) -> collections.Counter[str]:
    """Elements that collectives of each kind give: one of several values may take the place of one for each."""
    sizes: collections.Counter[str] = collections.Counter()
    for (kind, _, size), count in found.items():
        sizes[kind] += size * count
    return sizes


def slot_bytes(wrapped: WrappedModel) -> int:
    """Bytes of A, B and ranks on a device."""
    total = 0
    for site, layer in wrapped.modules.items():
        for name in site.attributes:
            held: Any = vars(layer)[name].get_value()
            total += math.prod(held.sharding.shard_shape(held.shape)) * held.dtype.itemsize
    return total


def slot_bytes_by_rule(case: Case, layers: int, rank: int = RANK) -> int:
    """The same, by the table at the top of `jlora.sharding.rules` and the sizes of the model.

    Column-parallel: B over tensor. Row-parallel: A. The other factor of each too where fully sharded.
    """
    config = SHAPES[case.model][0](layers)
    t, e = case.mesh.get("tensor", 1), case.mesh.get("expert", 1)
    other = t if case.fully else 1
    hidden, inner, experts = config.hidden_size, config.intermediate_size, 1
    # (slices, K, N, experts on a device), column-parallel and row-parallel
    q = config.num_attention_heads * config.head_dim
    kv = max(config.num_key_value_heads, t) * config.head_dim  # of fewer heads than shards there are copies
    columns, rows = [(3, hidden, q + 2 * kv, 1)], [(1, q, hidden, 1)]
    if config.moe is not None:
        inner, experts = config.moe.intermediate_size, config.moe.num_experts // e
    columns.append((2, hidden, 2 * inner, experts))
    rows.append((1, inner, hidden, experts))
    if case.kind != "decoder":
        columns, rows = [(1, hidden, config.intermediate_size, 1)], [(1, config.intermediate_size, hidden, 1)]
    padded = -(-rank // t) * t if case.fully else rank
    values = sum(copies * (n * padded * k // other + rank * size // t) for n, k, size, copies in columns)
    values += sum(copies * (n * rank * k // t + rank * size // other) for n, k, size, copies in rows)
    ranks = sum(n * copies for n, _, _, copies in columns + rows)
    return layers * SLOTS * (2 * values + 4 * ranks)


def allowed(case: Case, layers: int) -> collections.Counter[str]:
    """Collectives that the step with adapters may have more than the one without."""
    if case.mesh.get("tensor", 1) == 1:
        return collections.Counter()
    projections = layers if case.kind != "decoder" else 2 * layers  # column-parallel ones, and as many row-parallel
    if case.fully:
        gathers = projections * (2 if case.kind == "opaque" else 1)
        return collections.Counter({"all-gather": gathers, "all-reduce": projections})
    return collections.Counter({"all-reduce": projections} if case.kind == "opaque" else {})


def most_elements(case: Case, rank: int = RANK) -> int:
    """Of a collective that is allowed: of x A^T with three slices; of the output, where that is gathered."""
    config = SHAPES[case.model][0](2)
    tokens = BATCH if case.step == "decode" else 4096
    if case.kind == "opaque" and case.fully:
        return tokens * config.hidden_size
    return 3 * tokens * rank * (1 if config.moe is None else config.moe.experts_per_token)


def compare(case: Case, layers: int = 2) -> dict[str, Any]:
    """What a case's two programs say, and whether that is good."""
    config = SHAPES[case.model][0](layers)
    model = model_of(case, config)
    base = _base(json.dumps(case._replace(fully=False)), layers)
    wrapped = wrapped_of(case, model)
    lora = compiled(case, model, wrapped)
    more, fewer = by_kind(lora.collectives - base.collectives), by_kind(base.collectives - lora.collectives)
    beyond = more - fewer
    grown = {kind: size - volume(base.collectives)[kind] for kind, size in volume(lora.collectives).items()}
    small = all(size <= allowed(case, layers)[kind] * most_elements(case) for kind, size in grown.items())
    held, rule = slot_bytes(wrapped), slot_bytes_by_rule(case, layers)
    row: dict[str, Any] = {
        **case._asdict(),
        "base": dict(by_kind(base.collectives)),
        "more": dict(beyond),
        "fewer": dict(fewer - more),
        "other": [f"{kind} {dtype} {size}" for kind, dtype, size in sorted(lora.collectives - base.collectives)],
        "kernels": lora.kernels - base.kernels,
        "whole": lora.whole,
        "slot_bytes_of_a_device": held,
        "slot_bytes_by_rule": rule,
        "slot_bytes_of_one_device": slot_bytes_by_rule(case._replace(mesh={}, fully=False), layers),
        "argument_bytes_more": lora.argument_bytes - base.argument_bytes,
    }
    checks = (
        not beyond - allowed(case, layers),
        small,
        held == rule,
        held <= row["argument_bytes_more"] <= 1.05 * held + (1 << 20),  # with stamps, and the padding of what is small
        not lora.whole,
        row["kernels"] > 0,  # else others were taken than would be there
    )
    row["good"] = all(checks)
    return row


@cache
def _base(key: str, layers: int) -> Program:
    """The program without adapters; slots that are fully sharded or not are beside the same one."""
    case = Case(*json.loads(key))
    return compiled(case, model_of(case, SHAPES[case.model][0](layers)), None)


def scaled(case: Case, row: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Collectives of all layers of the model, with adapters and without."""
    none = by_kind(_base(json.dumps(case._replace(fully=False)), 0).collectives)
    found = {}
    for name in ("base", "lora"):
        two = collections.Counter(row["base"])
        if name == "lora":
            two.update(row["more"])
            two.subtract(row["fewer"])
        found[name] = {kind: none[kind] + (two[kind] - none[kind]) * LAYERS[case.model] // 2 for kind in two}
    return {"of_all_layers": found}


def cases(chips: list[str], models: list[str], kinds: list[str], steps: list[str]) -> Iterator[Case]:
    """Tensor over all devices, data 2 x tensor; of experts expert over all devices, and expert x tensor 2."""
    for chip in chips:
        n = devices(chip).size
        for model in models:
            dense = [{"tensor": n}, {"data": 2, "tensor": n // 2}]
            expert = [{"expert": n}, {"expert": n // 2, "tensor": 2}]
            for kind in kinds:
                if "qwen3" in model:
                    if kind != "decoder":
                        continue
                    for step in steps:
                        for mesh in expert:
                            for dispatch in ("all_gather", "all_to_all"):
                                yield Case(chip, model, kind, mesh, step, dispatch)
                        yield Case(chip, model, kind, expert[1], step, fully=True)
                    continue
                for step in steps:
                    for mesh in dense:
                        yield Case(chip, model, kind, mesh, step)
                    yield Case(chip, model, kind, dense[0], step, fully=True)


def as_on_tpu() -> None:
    """Lets "auto" take what it would take there."""
    for module in (api, moe, tiles):
        module.platform = lambda: "tpu"


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    mesh = " x ".join(f"{name} {size}" for name, size in row["mesh"].items())
    how = ", ".join([row["dispatch"]] * ("expert" in row["mesh"]) + ["fully"] * row["fully"])

    def counts(found: dict[str, int]) -> str:
        return " ".join(f"{kind}:{count}" for kind, count in sorted(found.items())) or "-"

    held = f"{row['slot_bytes_of_a_device'] / 2**20:7.1f} of {row['slot_bytes_of_one_device'] / 2**20:6.1f}"
    about = f"{row['chip']:5} {row['model']:13} {row['kind']:10} {row['step']:7} {mesh:22} {how:17}"
    return f"{about} {counts(row['base']):34} {counts(row['more']):28} {held} {'good' if row['good'] else 'BAD'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--layers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", nargs="+", choices=["decode", "prefill"], default=["decode", "prefill"])
    parser.add_argument("--meshes", nargs="+", help="those alone, as tensor=8 or expert=4,tensor=2")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/aot_mesh.json"))
    parser.add_argument("--more", action="store_true")
    args = parser.parse_args()
    as_on_tpu()
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.more and args.out.exists() else []
    done = [{name: row[name] for name in Case._fields} for row in rows]
    about = {"versions": {package: version(package) for package in ("jax", "jaxlib", "libtpu")}}
    about |= {"layers": 2, "rank": RANK, "slots": SLOTS, "batch": BATCH, "context": CONTEXT}
    print("chip, model, layers, step, mesh, collectives of two layers, more with adapters, MiB of slots on a device")
    failed = 0
    for case in cases(args.chips, args.models, args.layers, args.steps):
        said = ",".join(f"{name}={size}" for name, size in case.mesh.items())
        if case._asdict() in done or (args.meshes and said not in args.meshes):
            continue
        start = time.perf_counter()
        row = compare(case)
        row |= scaled(case, row)
        rows.append(row)
        failed += not row["good"]
        print(line_of(row), f"{time.perf_counter() - start:.0f} s", flush=True)
        write_rows(args.out, about, rows)
    print(f"{len(rows)} steps compiled, {failed} of this run not as they should be")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
