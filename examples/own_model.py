"""Serve adapters on your own model, with its own module names.

    python examples/own_model.py

The model is plain Flax NNX, with heads as `nnx.Einsum` and paths unlike those of a Hugging Face checkpoint. Its code is
not changed. `name_map` maps the adapters' module names to its paths.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora

VOCAB, WIDTH, HEADS, HEAD = 64, 32, 4, 8


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.query = nnx.Einsum("btd,dnh->btnh", (WIDTH, HEADS, HEAD), rngs=rngs)
        self.key_value = nnx.Einsum("btd,sdnh->sbtnh", (2, WIDTH, HEADS, HEAD), rngs=rngs)
        self.out = nnx.Einsum("btnh,nhd->btd", (HEADS, HEAD, WIDTH), rngs=rngs)

    def __call__(self, x):
        q, (k, v) = self.query(x), self.key_value(x)
        return x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embedder(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedder.attend(x)


def adapter(name: str, seed: int, rank: int) -> jlora.Adapter:
    """Make a random adapter of v_proj and o_proj, in place of `jlora.Adapter.from_pretrained(folder)`."""
    rng = np.random.default_rng(seed)
    arrays = {
        f"model.layers.{layer}.self_attn.{module}": (
            rng.normal(0, 0.1, (rank, WIDTH)).astype(np.float32),
            rng.normal(0, 0.1, (WIDTH, rank)).astype(np.float32),
        )
        for layer in range(2)
        for module in ("v_proj", "o_proj")
    }
    return jlora.Adapter.from_arrays(name, arrays, alpha=16)


def forward(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


def main() -> None:
    model = Model(nnx.Rngs(0))
    tokens = jnp.tile(jnp.arange(10)[None], (3, 1))
    base = model(tokens)  # not wrapped yet

    manager = jlora.LoRAManager(
        model,
        jlora.LoRAConfig(max_loras=2, max_lora_rank=8),
        packed_modules={"key_value": ("k", "v")},
        name_map={
            r"^model\.layers\.(\d+)\.self_attn\.o_proj$": r"blocks.\1.out",
            r"^model\.layers\.(\d+)\.self_attn\.([qkv])_proj$": r"blocks.\1.\2",
        },
    )
    step = manager.jit(forward)
    report = manager.verify(step, jax.random.randint(jax.random.key(0), (4, 10), 0, VOCAB))
    print(f"{len(report.checked)} layers agree with merged weights to {report.error:.0e}")
    manager.add_adapter(adapter("legal", seed=1, rank=4))
    manager.add_adapter(adapter("medical", seed=2, rank=8))
    with manager.prepare(["legal", None, "medical"]) as batch:
        logits = step(model, tokens, batch)
    for name, change in zip(("legal", "base", "medical"), jnp.abs(logits - base).max((1, 2)), strict=True):
        print(f"{name:8s} differs from the unwrapped model by {change:.6f}")


if __name__ == "__main__":
    main()
