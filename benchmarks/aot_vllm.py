"""Compile the jitted step of tpu-inference with adapters for meshes of TPUs without a TPU, and count its collectives.

    JAX_PLATFORMS=cpu PYTHONPATH=WHEEL:. python -m benchmarks.aot_vllm [--out benchmarks/results/aot_vllm.json]

WHEEL is a folder with tpu-inference 0.32.0 (pip install --no-deps --target). Of its requirements, JAX 0.11.2 and its
libtpu are installed, and the others are stubs as in the tests. The step is that of `get_flax_model` for two layers of a
model's shapes and four shards, with plain attention over its own tokens in place of the paged kernel.

A row is good if the step with adapters has jlora's kernels, and but one collective that the step without lacks: an
all-reduce of rank size, of the rows of the table's A, since the table is split by vocabulary.
"""

import argparse
import os
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from benchmarks.aot import by_kind, collectives_of, volume
from benchmarks.timing import write_rows
from jlora.integrations.vllm_jax.hooks import take_metadata
from jlora.integrations.vllm_jax.layers import PACKED_MODULES, describe_layers
from jlora.integrations.vllm_jax.worker import WorkerLoRAs
from jlora.layers.forward.batch import Layout, LoRABatch
from jlora.layers.forward.row_space import RowSlots, RowSpace
from jlora.layers.site import allocate
from jlora.layers.wrap.apply import wrap_model
from tests.integrations import vllm_stubs

vllm_stubs.install()
from tests.integrations import vllm_steps  # noqa: E402

CHIPS = {"v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
TENSOR, SLOTS, RANK, REQUESTS = 4, 8, 16, 64
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
              "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True},  # of 4B
    "Llama": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
              "intermediate_size": 14336, "vocab_size": 128256},  # of 8B
}  # fmt: skip


def mesh_of(chip: str) -> Mesh:
    devices = topologies.get_topology_desc(CHIPS[chip], platform="tpu").devices[:TENSOR]
    like = vllm_steps.make_mesh(1)
    return Mesh(
        np.array(devices).reshape([TENSOR if axis == "model" else 1 for axis in like.axis_names]), like.axis_names
    )


def compiled(chip: str, name: str, rows: int, *, lora: bool) -> str:
    """Return the text of the compiled step."""
    mesh, hf = mesh_of(chip), vllm_steps.hf_config(name, **MODELS[name])
    config = vllm_steps.vllm_config(hf, TENSOR)
    config.model_config.dtype = jnp.bfloat16
    batch: list[Any] = [None]

    def operand(shape: tuple[int, ...], dtype: Any = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, P()))

    def abstract(model_class: Any, config: Any, rng: Any, mesh: Mesh, **_: Any) -> nnx.Module:
        """Return the model as shapes with shardings, and with slots if `lora`."""
        model = nnx.eval_shape(lambda: model_class(config, jax.random.PRNGKey(0), mesh))
        state = nnx.state(model)
        specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, P))
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
            for leaf, spec in zip(jax.tree.leaves(state), specs, strict=True)
        ]
        nnx.update(model, jax.tree.unflatten(jax.tree.structure(state), leaves))
        if not lora:
            return model
        describe_layers(model, config, mesh)
        options = jlora.LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK, backend="mosaic_tpu")
        wrapped = wrap_model(model, options, PACKED_MODULES, make=lambda site: nnx.eval_shape(lambda: allocate(site)))
        take_metadata(model, WorkerLoRAs(SimpleNamespace(layers=wrapped.layers), REQUESTS))
        ids, slots = operand((REQUESTS,)), operand((rows,))
        layout = Layout(wrapped.sites, REQUESTS, wrapped.unserved.sites)
        space = RowSpace(RowSlots((ids,)), RowSlots((slots,)), stamps=(ids,))
        batch[0] = {"step": LoRABatch({"sequences": space}, layout, None)}
        return model

    vllm_steps.model_loader._get_nnx_model = abstract
    with jax.set_mesh(mesh):
        model = vllm_steps.model_loader.get_flax_model(config, None, mesh)

        @jax.jit
        def step(leaves: Any, ids: Any, metadata: Any, batch: Any) -> Any:
            caches = [None] * hf.num_hidden_layers
            args = (caches, ids, metadata, None, metadata.input_positions, (), batch, None, True, True)
            return model.model.step_fn_no_options(leaves, *args)[1]

        metadata = vllm_steps.Metadata(operand((rows,)), operand((rows,)))
        return step.lower(model.state_leaves, operand((rows,)), metadata, batch[0]).compile().as_text()


def compare(chip: str, name: str, rows: int) -> dict[str, Any]:
    texts = [compiled(chip, name, rows, lora=lora) for lora in (False, True)]
    base, lora = map(collectives_of, texts)
    kernels = texts[1].count('"tpu_custom_call"') - texts[0].count('"tpu_custom_call"')
    grown = {kind: size - volume(base)[kind] for kind, size in volume(lora).items() if size > volume(base)[kind]}
    more, of_table = by_kind(lora) - by_kind(base), {"all-reduce": rows * RANK}
    row = {"chip": chip, "model": name, "tensor": TENSOR, "rows": rows, "base": dict(by_kind(base))}
    row |= {"with_adapters": dict(by_kind(lora)), "elements_more": grown, "kernels": kernels}
    return row | {"good": more.total() <= 1 and grown in ({}, of_table) and kernels > 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 2048])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    vllm_steps.prepare_imports()
    found = []
    for chip in given.chips:
        for model in given.models:
            for rows in given.rows:
                found.append(compare(chip, model, rows))
                print(found[-1], flush=True)
    if given.out:
        about = {"jax": jax.__version__, "libtpu": version("libtpu"), "slots": SLOTS, "rank": RANK}
        write_rows(given.out, about | {"tpu_inference": "0.32.0"}, found)


if __name__ == "__main__":
    main()
