# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Five minutes with your own model
#
# This notebook serves three LoRA adapters on a small Flax model, several of them in one batch. It runs on a CPU, a GPU
# or a TPU. Replace the model and the folders with yours. The next cell installs jlora from the checkout that contains
# this notebook (docs/install.md).

# %%
# %pip install -q ..

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora

jax.config.update(
    "jax_default_matmul_precision", "highest"
)  # for the comparison below; TPUs round to bfloat16 otherwise

# %% [markdown]
# ## 1. The model
#
# It is plain Flax NNX. Its query, key and value share one kernel, and its paths differ from those in the adapters.

# %%
VOCAB, WIDTH, HEADS, LAYERS = 64, 32, 4, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(self.qkv(x), 3, axis=-1))
        return x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


# %% [markdown]
# ## 2. Adapters
#
# An adapter is a folder that PEFT wrote: `adapter_config.json` and `adapter_model.safetensors`. This cell writes three
# with random values, of different ranks and modules.

# %%
folders = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
modules = {"legal": ["q_proj", "v_proj"], "medical": ["q_proj", "k_proj", "v_proj", "o_proj"], "code": ["o_proj"]}
for rank, (name, targets) in zip((2, 8, 4), modules.items(), strict=True):
    arrays = {
        f"model.layers.{layer}.self_attn.{target}": (
            rng.normal(0, 0.1, (rank, WIDTH)).astype(np.float32),  # A
            rng.normal(0, 0.1, (WIDTH, rank)).astype(np.float32),  # B
        )
        for layer in range(LAYERS)
        for target in targets
    }
    jlora.Adapter.from_arrays(name, arrays, alpha=16).save_pretrained(folders / name)

# %% [markdown]
# ## 3. Wrap the model
#
# `packed_modules` names the modules that one kernel holds. `name_map` maps the adapters' names to the model's paths. A
# model with the checkpoint's names needs neither.

# %%
model = Model(nnx.Rngs(0))
manager = jlora.LoRAManager(
    model,
    jlora.LoRAConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=8),
    packed_modules={"qkv": ("q_proj", "k_proj", "v_proj")},
    name_map={
        r"^model\.layers\.(\d+)\.self_attn\.o_proj$": r"blocks.\1.out",
        r"^model\.layers\.(\d+)\.self_attn\.([qkv]_proj)$": r"blocks.\1.\2",
    },
)

traces = []


def forward(model, tokens, batch):
    traces.append(tokens.shape)  # one entry for each compilation
    with jlora.use(batch):  # the wrapped layers read the batch while they are traced
        return model(tokens)


step = manager.jit(forward)

# %% [markdown]
# ## 4. Check it once
#
# `verify` serves random adapters and compares each row with merged weights. Its error names the first layer that
# differs.

# %%
report = manager.verify(step, jax.random.randint(jax.random.key(0), (4, 10), 0, VOCAB))
print(f"{len(report.checked)} layers agree with merged weights to {report.error:.0e}")

# %% [markdown]
# ## 5. Serve
#
# Each sequence of a batch names its adapter, and `None` is the base model. Two slots serve all three adapters, since
# `prepare` brings the ones of the batch into slots. The step is compiled once.

# %%
for name in modules:
    manager.add_adapter(jlora.LoRARequest(name, path=str(folders / name)))

tokens = jnp.tile(jnp.arange(10), (3, 1))  # the same prompt three times
traces.clear()
logits = {}
for names in (["legal", None, "medical"], ["code", "legal", None], [None, "medical", "code"]):
    with manager.prepare(names) as batch:
        rows = step(model, tokens, batch)
    logits |= dict(zip(names, rows, strict=True))

for name in modules:
    print(f"{name:8} differs from the base model by {jnp.abs(logits[name] - logits[None]).max():.3f}")
print(f"{manager.stats().slot_loads} adapters written into slots, {len(traces)} compilation of the step")
assert len(traces) == 1

# %% [markdown]
# ## 6. Compare with merged weights
#
# The same adapter, merged into a copy of the model in NumPy.

# %%
merged, adapter = Model(nnx.Rngs(0)), jlora.Adapter.from_pretrained(folders / "medical", name="medical")
for layer, block in enumerate(merged.blocks):
    deltas = {target: adapter.modules[f"model.layers.{layer}.self_attn.{target}"] for target in modules["medical"]}
    deltas = {target: (lora.b @ lora.a).T * lora.scaling for target, lora in deltas.items()}
    block.qkv.kernel[...] += np.concatenate([deltas[target] for target in ("q_proj", "k_proj", "v_proj")], axis=1)
    block.out.kernel[...] += deltas["o_proj"]
np.testing.assert_allclose(logits["medical"], merged(tokens)[0], atol=1e-4)
print("the served logits are those of the merged model")

# %% [markdown]
# ## Next
#
# `docs/models.md` has a row for each kind of layer, with the lines to write. `docs/loop.md` covers packed rows, warm-up
# and background loading, `docs/mesh.md` several devices, and `docs/serve.md` the HTTP server.
