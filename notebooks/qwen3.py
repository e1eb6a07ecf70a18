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
# # A public model, public adapters, PEFT beside it
#
# Qwen3-0.6B and two adapters of Hugging Face's hub answer in one batch, and PEFT answers the same prompts one model
# at a time. The greedy answers are equal. It needs the network, 3 GB of disk and some minutes of a CPU; a GPU or a TPU
# works too. The next cell installs jlora from the checkout that contains this notebook (docs/install.md).

# %%
# %pip install -q .. torch transformers peft

# %%
import os
import time

import jax.numpy as jnp
import peft
import torch
import transformers
from huggingface_hub import snapshot_download

import jlora
from jlora.models import from_pretrained, generate

# Folders, or names on the hub.
MODEL = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
DEFAULT = "Nishef/Qwen3-0.6B-Full_KTO_20251225_102050,llm-semantic-router/qwen3_generative_classifier_r16"
ADAPTERS = {f"adapter {i}": name for i, name in enumerate(os.environ.get("ADAPTERS", DEFAULT).split(","))}
NEW_TOKENS = 64

# %% [markdown]
# ## 1. The model and its adapters
#
# `from_pretrained` reads the checkpoint into a Flax model, and a request names an adapter and its place. All weights
# are float32 here, so that the answers can be compared token by token. Serve in bfloat16.

# %%
folder = MODEL if os.path.isdir(MODEL) else snapshot_download(MODEL)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = from_pretrained(folder, jnp.float32)
manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=64))
for name, place in ADAPTERS.items():
    info = manager.add_adapter(jlora.LoRARequest(name, path=place))
print(manager.list_adapters())

# %% [markdown]
# ## 2. One batch
#
# Every prompt is answered by the base model and by both adapters: six sequences, three models, one program.

# %%
PROMPTS = ["Three facts about the sea:", "The contract is void if"]
names = [None, *ADAPTERS]
rows = [(name, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS for name in names]


def answers(rows):
    with manager.prepare([name for name, _ in rows]) as batch:
        return generate(model, [tokens for _, tokens in rows], batch=batch, max_new_tokens=NEW_TOKENS)


found = answers(rows)
for (name, tokens), new in zip(rows, found, strict=True):
    print(f"{name or 'base model'}: {tokenizer.decode(tokens)}{tokenizer.decode(new)}\n")

# %% [markdown]
# ## 3. PEFT
#
# The same prompts, one at a time, with one adapter at a time.

# %%
reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
reference.generation_config.eos_token_id = None  # every answer has all its tokens


def greedy(model, tokens):
    with torch.no_grad():
        out = model.generate(torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out[0, len(tokens) :].tolist()


for name in names:
    each = peft.PeftModel.from_pretrained(reference, ADAPTERS[name]).eval() if name else reference
    for (row, tokens), new in zip(rows, found, strict=True):
        if row == name:
            assert new == greedy(each, tokens), (name, tokenizer.decode(tokens))
    if name:
        reference = each.unload()
assert len({tuple(new) for new in found[: len(names)]}) == len(names)  # the adapters differ
print(f"{len(rows)} answers of {NEW_TOKENS} tokens are PEFT's")

# %% [markdown]
# ## 4. Tokens a second
#
# The second call of a shape, with the base model alone and with mixed adapters.

# %%
for label, mix in (("the base model", [None] * 8), ("mixed adapters", [*names, *names, *names][:8])):
    batch = [(name, tokenizer(PROMPTS[0])["input_ids"]) for name in mix]
    answers(batch)
    start = time.perf_counter()
    answers(batch)
    print(f"{label}: {len(batch) * NEW_TOKENS / (time.perf_counter() - start):.0f} tokens a second")
