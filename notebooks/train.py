# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     gpuType: V5E1
#   jupytext:
#     notebook_metadata_filter: accelerator,colab
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train adapters and serve them the next minute
#
# Three adapters of the demo model learn in one batch. After each round, every adapter is sent to a running
# `jlora serve` in one call, without a file, and sampled there by name. It runs on Colab's TPU, a GPU or a CPU. The next
# cell installs jlora from the checkout that contains this notebook (docs/install.md).

# %%
# %pip install -q "..[serve,train]"

# %%
import json
import os
import secrets
import subprocess
import sys
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

import jlora
from jlora.models import from_pretrained
from jlora.serve import push

MODEL = Path(jlora.__file__).parent / "demo" / "model"

# %% [markdown]
# ## 1. A server
#
# It has no adapter yet. A TPU serves one process at a time, and the trainer has it, so the server runs on the CPU here.
# Yours runs on another machine: `push` takes its address.

# %%
KEY = secrets.token_hex(16)
command = [sys.executable, "-m", "jlora", "serve", str(MODEL), "--served-model-name", "demo", "--port", "0"]
command += ["--dtype", "float32", "--max-loras", "4", "--max-lora-rank", "8", "--max-model-len", "32"]
environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JLORA_ADMIN_API_KEY": KEY}
server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
url = server.stdout.readline().split()[-1]
print("jlora serves the demo model at", url)


def sample(name: str, prompt: str) -> str:
    body = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 10}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["text"]


print("The base model copies:", sample("demo", "planet="))

# %% [markdown]
# ## 2. What the adapters learn
#
# The prompt is a word, and the answer follows "=". Each adapter has a rank, targets and a learning rate of its own.
# PEFT starts with B = 0, and so do these.

# %%
TASKS = {"first": lambda word: word[:1], "last": lambda word: word[-1:], "ends": lambda word: word[0] + word[-1]}
RANKS = {"first": 2, "last": 4, "ends": 8}
ROWS, LENGTH, STEPS, ROUNDS = 16, 20, 30, 3

tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
eos = tokenizer.token_to_id("<eos>")


def rows(task, rng):
    """Return tokens [ROWS, LENGTH], and a mask of the positions whose next token belongs to the answer."""
    tokens, mask = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.float32)
    for i in range(ROWS):
        word = "".join(rng.permutation(list("abcdefghijklmnopqrstuvwxyz"))[: rng.integers(3, 9)])
        prompt = tokenizer.encode(f"{word}=").ids
        row = [*prompt, *tokenizer.encode(task(word), add_special_tokens=False).ids, eos]
        tokens[i, : len(row)] = row
        mask[i, len(prompt) - 1 : len(row) - 1] = 1
    return tokens, mask


schedule = optax.warmup_cosine_decay_schedule(0, 1, 10, STEPS * ROUNDS)
RATES = {"first": 1e-2, "last": 1e-2, "ends": 1e-2}

# %% [markdown]
# ## 3. The trainer
#
# The loss returns two numbers for each sequence: the sum of its losses, and how many tokens it sums. On a TPU the base
# is in bfloat16. The factors that are trained are float32.

# %%
on_cpu = jax.default_backend() == "cpu"
model = from_pretrained(MODEL, jnp.float32 if on_cpu else jnp.bfloat16)
manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=3, max_lora_rank=8))


def loss(model, batch, tokens, mask):
    with jlora.use(batch):
        logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return (losses * mask[:, :-1]).sum(-1), mask[:, :-1].sum(-1)


trainer = manager.trainer(loss, capacity=3)
for name, rank in RANKS.items():
    targets = ["q_proj", "v_proj"] if name == "first" else ["q_proj", "k_proj", "v_proj", "o_proj"]
    trainer.add(name, rank=rank, alpha=2 * rank, target_modules=targets)

# %% [markdown]
# ## 4. Train, push, sample
#
# `push` returns when new requests are answered with the new weights. Answers that were begun before end with the old
# ones.

# %%
rng = np.random.default_rng(1)
answers = {}
for round_ in range(ROUNDS):
    for i in range(STEPS):
        batch = trainer.prepare([name for name in TASKS for _ in range(ROWS)])
        inputs = map(np.concatenate, zip(*[rows(task, rng) for task in TASKS.values()], strict=True))
        rates = {name: rate * float(schedule(round_ * STEPS + i)) for name, rate in RATES.items()}
        losses = trainer.step(batch, *inputs, learning_rate=rates, max_norm=1.0).losses
    for name in TASKS:
        push(url, trainer.adapter(name), admin_key=KEY)
    answers = {name: sample(name, "planet=") for name in TASKS}
    for name, answer in answers.items():
        print(f"round {round_}: {name:5} loss {float(losses[name]):.3f}  planet={answer}")

# %%
server.terminate()
server.wait()
assert answers == {name: task("planet") for name, task in TASKS.items()}, answers
print("each adapter answers as it was taught")

# %% [markdown]
# ## Next
#
# `trainer.publish(name)` gives the weights to the manager of this process, to sample here. A checkpoint keeps
# `trainer.state`, and `trainer.adapter(name).save_pretrained(folder)` writes a folder for PEFT (docs/training.md).
