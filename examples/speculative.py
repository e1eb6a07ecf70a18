"""Decode with drafted tokens: several adapters in one batch, and the tokens of plain decoding in fewer steps.

    python examples/speculative.py

Prompt lookup drafts the tokens that followed the last token earlier in the sequence. One step then computes the last
token and its drafts, rows [B, k + 1], and keeps the drafts that the model would have chosen itself. The rows of a
sequence take its adapter, however many they are, so jlora needs no setting for this.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jlora
from jlora.models import from_pretrained, generate

DEMO = Path(jlora.__file__).parent / "demo"
NAMES = [None, "sort", "reverse", "swap", "shift"]
DRAFTS, EOS = 4, 2


def forward(model, batch, tokens, start, cache):
    """Return the likeliest token [B, L] after each of `tokens` [B, L], whose first has position start[b]."""
    positions = start[:, None] + jnp.arange(tokens.shape[1])
    with jlora.use(batch):
        hidden, cache = model.model(tokens, positions, cache, positions[:, -1] + 1)
        return jnp.argmax(model.logits(hidden), axis=-1), cache


def drafted(tokens: list[int]) -> list[int]:
    """Return the tokens after the previous occurrence of the last token, padded to `DRAFTS`."""
    last = len(tokens) - 1
    found = next((i for i in range(last - 1, -1, -1) if tokens[i] == tokens[last]), last)
    drafts = tokens[found + 1 : found + 1 + DRAFTS]
    return drafts + [0] * (DRAFTS - len(drafts))


def decode(model, step, batch, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Return `new_tokens` tokens after each prompt, and the number of steps that each sequence took."""
    sequences = [list(prompt) for prompt in prompts]
    longest = max(map(len, prompts))
    cache = model.init_cache(len(prompts), longest + new_tokens + DRAFTS + 1)
    padded = np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts], np.int32)
    chosen, cache = step(model, batch, padded, np.zeros(len(prompts), np.int32), cache)
    for i, sequence in enumerate(sequences):
        sequence.append(int(chosen[i, len(prompts[i]) - 1]))
    steps = [1] * len(prompts)
    while any(len(s) < len(p) + new_tokens for s, p in zip(sequences, prompts, strict=True)):
        rows = np.array([[s[-1], *drafted(s)] for s in sequences], np.int32)
        # A sequence that has all its tokens goes on at its end, and what it computes there is dropped.
        start = np.array([min(len(s), len(p) + new_tokens) - 1 for s, p in zip(sequences, prompts, strict=True)])
        chosen, cache = step(model, batch, rows, start.astype(np.int32), cache)
        for i, (draft, choice) in enumerate(zip(rows[:, 1:], np.asarray(chosen), strict=True)):
            if len(sequences[i]) < len(prompts[i]) + new_tokens:
                right = int(np.cumprod(draft == choice[:-1]).sum())
                sequences[i].extend(choice[: right + 1].tolist())
                steps[i] += 1
    return [s[len(p) : len(p) + new_tokens] for s, p in zip(sequences, prompts, strict=True)], steps


def main() -> None:
    model = from_pretrained(DEMO / "model")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=4, max_lora_rank=32))
    step = manager.jit(forward, donate_argnames="cache")
    for name in NAMES[1:]:
        manager.add_adapter(jlora.LoRARequest(name, path=str(DEMO / "adapters" / name)))
    prompts = [[1, *(ord(letter) - 93 for letter in word), 3] for word in ("planet", "bead", "olive", "tiger", "crab")]
    new_tokens = 8
    with manager.prepare(NAMES) as batch:
        plain = generate(model, prompts, batch=batch, max_new_tokens=new_tokens)
        tokens, steps = decode(model, step, batch, prompts, new_tokens)
    for name, prompt, mine, theirs, count in zip(NAMES, prompts, tokens, plain, steps, strict=True):
        assert mine == theirs, (name, mine, theirs)
        answer = mine[: mine.index(EOS)] if EOS in mine else mine
        word, reply = ("".join(chr(93 + token) for token in part) for part in (prompt[1:-1], answer))
        print(f"{name or '(base)':8s} {word}={reply:8s} {len(mine)} tokens in {count} steps, equal to plain decoding")


if __name__ == "__main__":
    main()
