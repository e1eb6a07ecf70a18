"""A tiny decoder for the training thread: one layer, 32 tokens."""

import queue
from typing import Any

import numpy as np
from flax import nnx

import jlora
from jlora.models import Decoder, DecoderConfig
from jlora.tinker.training import Computation, Example, Job, Model, Training, Update

VOCAB, SHAPES = 32, [(4, 8), (2, 16)]
CONFIG = DecoderConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=16,
)  # fmt: skip


def training(**options: Any) -> Training:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4))
    return Training(manager, SHAPES, **{"capacity": 2, "max_rank": 4} | options)


def example(seed: int, length: int, **arrays: np.ndarray) -> Example:
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, VOCAB, (2, length)).astype(np.int32)
    ones, zeros = np.ones(length, np.float32), np.zeros(length, np.float32)
    return Example(tokens, targets, **{"weights": ones, "sampled": zeros, "advantages": zeros} | arrays)


def ask(thread: Training, model: Model, work: Any) -> "queue.Queue[Any]":
    """Submit a request; the queue gets its result."""
    answers: queue.Queue[Any] = queue.Queue()
    thread.submit(model, Job(work, answers.put))
    return answers


def computed(thread: Training, model: Model, *examples: Example, loss: str = "cross_entropy", **options: Any):
    return ask(thread, model, Computation(examples, loss, **options)).get(timeout=60)


def moved(thread: Training, model: Model, **numbers: float) -> Any:
    numbers = {"learning_rate": 1e-2, "b2": 0.95, "eps": 1e-12} | numbers
    return ask(thread, model, Update(numbers)).get(timeout=60)


def created(thread: Training, name: str, **options: Any) -> Model:
    model = Model(name, **{"rank": 2, "seed": 1} | options)
    assert ask(thread, model, lambda: thread.create(model)).get(timeout=60) is None
    return model
