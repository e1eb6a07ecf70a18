"""Compile whole steps for meshes of TPUs without a TPU, and check collectives and slot memory of a wrapped model.

    JAX_PLATFORMS=cpu python -m benchmarks.aot [--chips v6e] [--models llama-3-8b] [--layers decoder] [--steps decode]
        [--meshes tensor=8] [--out benchmarks/results/aot_mesh.json] [--more]

Two layers of a model's shapes are compiled with and without adapters, and the two programs of one device are compared.
Decode has 64 sequences over a cache of `CONTEXT` positions. Prefill has 4096 tokens in eight sequences, or in as many
as an axis has shards.

A row is good under three conditions:

1. The step with adapters has no more collectives than the step without, and those of each kind return no more elements
   in total.
2. The bytes of slots on a device equal those of the rules (`jlora.sharding.rules`), which are computed here from the
   sizes of the model.
3. The program has no array of the full shape of a slot array that the rules split.

Two kinds of models may have more collectives, each of at most rank-r size. Layers whose product is not accessible
("opaque") may have an all-reduce for each row-parallel projection. Fully sharded slots may have the same, and an
all-gather for each column-parallel projection. With both, each row-parallel projection also gathers the columns of its
output, which the base model has already reduced.

The counts for a model with all its layers follow from those with two layers and with none. `--more` adds to the rows of
an earlier run. Needs the `libtpu` wheel (group `test`).
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

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu is only the compiler, without a machine
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from benchmarks.decode_step import CONTEXT, base_step, decode, prefill
from benchmarks.mesh import PROJECTIONS, SHAPES
from benchmarks.timing import write_rows
from jlora.layers.forward.batch import Layout, LoRABatch
from jlora.layers.forward.row_space import RowSlots, RowSpace
from jlora.layers.site import allocate
from jlora.layers.wrap.apply import wrap_model
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.models import Decoder, DecoderConfig
from jlora.models.expert_parallel import spread_over
from jlora.models.partition import Dispatch
from jlora.pallas import gpus

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
    """A program that is compiled with and without adapters.

    Attributes:
      chip: Key of `TOPOLOGIES`.
      model: Key of `LAYERS`.
      kind: "decoder", or two MLPs of its sizes, made of "nnx.Linear" layers or of "opaque" ones.
      mesh: Axis -> size.
      step: "decode" or "prefill".
      dispatch: How tokens reach experts on other devices.
      fully: True if slots are fully sharded.
    """

    chip: str
    model: str
    kind: str
    mesh: dict[str, int]
    step: str
    dispatch: Dispatch = "all_gather"
    fully: bool = False


class Opaque(nnx.Module):
    """A linear layer with its own product, unknown to jlora."""

    def __init__(self, inputs: int, outputs: int, kernel: nnx.Param[jax.Array]):
        self.inputs, self.outputs, self.kernel = inputs, outputs, kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


jlora.register_layer(Opaque, lambda layer: jlora.LinearSpec(layer.inputs, layer.outputs))


class Blocks(nnx.Module):
    """For each layer, a column-parallel and a row-parallel projection, added to its input."""

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
    sizes = tuple(case.mesh.values())
    return Mesh(devices(case.chip).ravel()[: math.prod(sizes)].reshape(sizes), tuple(case.mesh))


def model_of(case: Case, config: DecoderConfig) -> nnx.Module:
    """Return the model as shapes with shardings."""
    mesh, layers = mesh_of(case), config.num_hidden_layers
    if case.kind != "decoder":
        return nnx.eval_shape(lambda: Blocks(config, layers, mesh, case.kind))
    options: dict[str, Any] = {"mesh": mesh, "dispatch": case.dispatch}
    return nnx.eval_shape(lambda: Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options))


def wrapped_of(case: Case, model: nnx.Module, rank: int = RANK) -> WrappedModel:
    """Wrap `model` with slots for adapters, also as shapes."""
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
    """Return the step, its number of sequences, and its operands beside the model and the batch."""
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
    return _decoded, sequences, (tokens, tokens, kept)


def _decoded(*args: Any) -> Any:
    """Run `decode`, without its cache in the result."""
    return decode(*args)[0]


def _call(model: Any, x: jax.Array, batch: LoRABatch | None) -> jax.Array:
    with jlora.use(batch):
        return model(x)


class Program(NamedTuple):
    """Properties of a compiled step.

    Attributes:
      collectives: Number of collectives of each (kind, dtype, number of elements).
      argument_bytes: Bytes of the arguments on one device.
      kernels: Number of calls of Pallas kernels.
      whole: Arrays of the full shapes of slot arrays that the rules split, which no device should have.
    """

    collectives: collections.Counter[tuple[str, str, int]]
    argument_bytes: int
    kernels: int
    whole: tuple[str, ...]


def compile_step(case: Case, model: nnx.Module, wrapped: WrappedModel | None) -> jax.stages.Compiled:
    run, sequences, given = operands_of(case, model)
    batch = None
    if wrapped is not None:
        ids = _shape((sequences,), "int32", NamedSharding(mesh_of(case), P()))
        space = RowSpace(RowSlots((ids,)), stamps=(ids,))
        batch = LoRABatch({"sequences": space}, Layout(wrapped.sites, sequences, wrapped.unserved.sites), None)
    step, values = base_step(model, run)
    return step.lower(values, *given, batch).compile()


def compiled(case: Case, model: nnx.Module, wrapped: WrappedModel | None) -> Program:
    program = compile_step(case, model, wrapped)
    text, memory = program.as_text(), program.memory_analysis()
    split = () if wrapped is None else sorted(shape for shape in split_shapes(wrapped) if shape in text)
    return Program(collectives_of(text), memory.argument_size_in_bytes, text.count('"tpu_custom_call"'), tuple(split))


def collectives_of(text: str) -> collections.Counter[tuple[str, str, int]]:
    """Count the collectives in the text of a program.

    An asynchronous collective is counted at its start. One that overlaps a product is split into three fusions of the
    same chain, and is counted once.
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
            shapes = shapes[len(shapes) // 2 :]  # skip its operands, which come first
        found[kind, shapes[0][0], sum(math.prod(map(int, filter(None, dims.split(",")))) for _, dims in shapes)] += 1
    return found


def split_shapes(wrapped: WrappedModel) -> set[str]:
    """Return the full shapes of split slot arrays in a program's notation, also with slots and experts merged."""
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
    """Return the elements that the collectives of each kind return.

    The sum is compared, because one collective of several values may replace one for each value.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for (kind, _, size), count in found.items():
        sizes[kind] += size * count
    return sizes


def slot_bytes(wrapped: WrappedModel) -> int:
    """Return the bytes of A, B, ranks and scales on one device."""
    total = 0
    for site, layer in wrapped.modules.items():
        for name in site.attributes:
            held: Any = vars(layer)[name].get_value()
            total += math.prod(held.sharding.shard_shape(held.shape)) * held.dtype.itemsize
    return total


def slot_bytes_by_rule(case: Case, layers: int, rank: int = RANK) -> int:
    """Compute `slot_bytes` from the table of `jlora.sharding.rules` and the sizes of the model.

    Column-parallel projections split B over tensor, row-parallel ones A. Fully sharded slots split the other factor
    too.
    """
    config = SHAPES[case.model][0](layers)
    t, e = case.mesh.get("tensor", 1), case.mesh.get("expert", 1)
    other = t if case.fully else 1
    hidden, inner, experts = config.hidden_size, config.intermediate_size, 1
    # (slices, K, N, experts on a device), column-parallel and row-parallel
    q = config.num_attention_heads * config.head_dim
    kv = max(config.num_key_value_heads, t) * config.head_dim  # heads are copied if there are fewer than shards
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
    return layers * SLOTS * (2 * values + 8 * ranks)


def allowed(case: Case, layers: int) -> collections.Counter[str]:
    """Return the collectives that the step with adapters may have in addition."""
    if case.mesh.get("tensor", 1) == 1:
        return collections.Counter()
    projections = layers if case.kind != "decoder" else 2 * layers  # column-parallel ones, as many row-parallel ones
    if case.fully:
        gathers = projections * (2 if case.kind == "opaque" else 1)
        return collections.Counter({"all-gather": gathers, "all-reduce": projections})
    return collections.Counter({"all-reduce": projections} if case.kind == "opaque" else {})


def most_elements(case: Case, rank: int = RANK) -> int:
    """Return the largest size of an allowed collective: x A^T with three slices, or the output where it is gathered."""
    config = SHAPES[case.model][0](2)
    tokens = BATCH if case.step == "decode" else 4096
    if case.kind == "opaque" and case.fully:
        return tokens * config.hidden_size
    return 3 * tokens * rank * (1 if config.moe is None else config.moe.experts_per_token)


def compare(case: Case, layers: int = 2) -> dict[str, Any]:
    """Compile both programs of a case, and return their properties and whether they are good."""
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
        held <= row["argument_bytes_more"] <= 1.05 * held + (1 << 20),  # with stamps, and the padding of small arrays
        not lora.whole,
        row["kernels"] > 0,  # else "auto" chose other kernels than on a TPU
    )
    row["good"] = all(checks)
    return row


@cache
def _base(key: str, layers: int) -> Program:
    """Compile the program without adapters, which fully sharded and other slots share."""
    case = Case(*json.loads(key))
    return compiled(case, model_of(case, SHAPES[case.model][0](layers)), None)


def scaled(case: Case, row: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the collectives of a model with all its layers, with and without adapters."""
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
    """Yield the cases of each model.

    Dense models are split by tensor over all devices, and by data 2 x tensor. Models with experts are split by expert
    over all devices, and by expert x tensor 2.
    """
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
    """Make "auto" choose the kernels that it chooses on a TPU."""
    gpus.platform = lambda: "tpu"


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
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
    parser.add_argument("--meshes", nargs="+", help="meshes to compile for, as tensor=8 or expert=4,tensor=2")
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
