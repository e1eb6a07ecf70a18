"""Train two adapters by GRPO, with samples of the engine that serves them in the same process.

    python examples/grpo.py [--rounds 30]

The demo model copies letters. One adapter is rewarded for vowels, the other for letters from n on. Each round samples
groups of answers to the same prompts, with the log-probabilities of their tokens, moves both adapters in one step
(`LoRAManager.trainer`), and publishes their weights. Both learn in about a minute on two CPU cores.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jlora
from jlora.models import from_pretrained
from jlora.serve import Completion, Engine, EngineOptions, SamplingParams
from jlora.training import losses

BOS, EQUALS, FIRST_LETTER, LETTERS = 1, 3, 4, 26
LENGTH = 8  # letters of a prompt, and most tokens of an answer
GROUPS, GROUP = 4, 8  # prompts of an adapter in a round, and answers to each
TEMPERATURE = 2.0
BETA = 0.01  # weight of the divergence from the reference policy
VOWELS = FIRST_LETTER + np.array([ord(letter) - ord("a") for letter in "aeiou"])


def vowels(tokens: Sequence[int]) -> float:
    """Return the share of vowels."""
    return float(np.isin(tokens, VOWELS).mean())


def late(tokens: Sequence[int]) -> float:
    """Return the share of letters from n on."""
    return float((np.asarray(tokens) >= FIRST_LETTER + LETTERS // 2).mean())


REWARDS: dict[str, Callable[[Sequence[int]], float]] = {"vowels": vowels, "late": late}


def loss(model, batch, tokens, mask, sampled, advantages):
    """Return the loss of GRPO of each row, of the distribution that tokens are drawn from.

    The reference policy is the model without adapters.
    """

    def logprobs(adapters):
        with jlora.use(adapters):
            logits = model(tokens[:, :-1]) / TEMPERATURE
        return losses.token_logprobs(logits, tokens[:, 1:])

    kinds = jnp.full(len(tokens), losses.LOSSES.index("grpo"))
    options = {"sampled": sampled, "advantages": advantages, "reference": logprobs(None), "beta": BETA}
    return losses.by_row(kinds, logprobs(batch), mask, **options)


def sample(engine: Engine, name: str | None, rng: np.random.Generator) -> tuple[list[list[int]], list[Completion]]:
    """Return prompts, each `GROUP` times, and an answer of an adapter to each."""
    words = FIRST_LETTER + rng.integers(0, LETTERS, (GROUPS, LENGTH))
    prompts = [[BOS, *map(int, word), EQUALS] for word in words for _ in range(GROUP)]
    params = SamplingParams(max_tokens=LENGTH, temperature=TEMPERATURE, logprobs=0)
    seeded = [dataclasses.replace(params, seed=int(seed)) for seed in rng.integers(2**32, size=len(prompts))]
    return prompts, [one.result() for one in engine.submit_all(prompts, seeded, lora=name)]


def rows(prompts: Sequence[Sequence[int]], answers: Sequence[Completion]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens [B, L], the mask [B, L - 1] of those that were sampled, and their log-probabilities."""
    start, width = LENGTH + 2, 2 * LENGTH + 2
    tokens = np.zeros((len(prompts), width), np.int32)
    mask, sampled = (np.zeros((len(prompts), width - 1), np.float32) for _ in range(2))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[i, : start + len(answer.tokens)] = [*prompt, *answer.tokens]
        own = slice(start - 1, start - 1 + len(answer.tokens))
        mask[i, own], sampled[i, own] = 1, [one.logprob for one in answer.logprobs]
    return tokens, mask, sampled


def train(rounds: int) -> dict[str, list[float]]:
    """Return the mean reward of each round, by adapter."""
    model = from_pretrained(Path(jlora.__file__).parent / "demo" / "model")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=8, max_cpu_loras=4))
    trainer = manager.trainer(loss, capacity=2)
    for name in REWARDS:
        trainer.add(name, rank=8, alpha=16)
    options = EngineOptions(max_num_seqs=32, max_model_len=2 * LENGTH + 2, logprobs_mode="processed_logprobs")
    engine, rng = Engine(model, manager, options=options), np.random.default_rng(0)
    engine.start()
    means: dict[str, list[float]] = {name: [] for name in REWARDS}
    batch = trainer.prepare([name for name in REWARDS for _ in range(GROUPS * GROUP)])
    for i in range(rounds):
        parts, advantages = [], []
        for name, reward in REWARDS.items():
            prompts, answers = sample(engine, name if i else None, rng)  # a new adapter has no effect yet
            rewards = np.array([reward(answer.tokens) for answer in answers], np.float32)
            means[name].append(float(rewards.mean()))
            advantages.append(losses.group_advantages(rewards.reshape(GROUPS, GROUP)).reshape(-1, 1))
            parts.append(rows(prompts, answers))
        inputs = [np.concatenate(part) for part in zip(*parts, strict=True)]
        trainer.step(batch, *inputs, np.concatenate(advantages), learning_rate=3e-3, max_norm=1.0)
        for name in REWARDS:
            trainer.publish(name)
        if i % 5 == 0 or i == rounds - 1:
            print(i, {name: round(rewards[-1], 3) for name, rewards in means.items()})
    engine.close()
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    train(parser.parse_args().rounds)
