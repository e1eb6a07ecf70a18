"""One of two processes that share a mesh: `python -m tests.models.mesh_process NUMBER PORT CHECKPOINT RESULT`.

Write the logits, the answers, the error of an engine, and for every stored tensor how often this process read
each of its values.
"""

import sys

import jax
import numpy as np

import jlora
from jlora.models import checkpoint, from_pretrained, generate
from jlora.serve import Engine
from tests.models.recording import opened


def main(number: str, port: str, folder: str, result: str) -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(number))
    auto = jax.sharding.AxisType.Auto
    by_data = from_pretrained(folder, mesh=jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(auto, auto)))
    counts = {}
    checkpoint.safe_open = opened(counts)
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(auto,))
    model = from_pretrained(folder, mesh=mesh)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 7)).astype(np.int32)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    logits = jax.jit(lambda model, tokens: model(tokens), out_shardings=whole)(model, tokens)
    answers = generate(model, tokens.tolist(), max_new_tokens=6)
    sampled = generate(by_data, tokens.tolist(), max_new_tokens=6, temperature=1.0, top_k=20)
    try:
        Engine(model, jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=4)))
        refusal = ""
    except jlora.LoRAUsageError as error:
        refusal = str(error)
    np.savez(result, logits=np.asarray(logits), answers=answers, sampled=sampled, refusal=refusal, **counts)


if __name__ == "__main__":
    main(*sys.argv[1:])
