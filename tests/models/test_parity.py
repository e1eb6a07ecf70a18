"""Random variants of every family against transformers itself, through files that transformers wrote."""

import jax
import numpy as np
import pytest

from jlora.models import from_pretrained, generate
from tests.models import goldens
from tests.models.families import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, build

pytestmark = pytest.mark.parity

VARIANTS = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 20}),
    ("llama", {"attention_bias": True, "num_key_value_heads": 1, "rope_parameters": YARN_ROPE}),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "beta_fast": 4.0, "beta_slow": 2.0, "truncate": False}}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.4}}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.7}}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": 16, "rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16, "rope_parameters": YARN_ROPE, "rms_norm_eps": 1e-2}),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("seed", "variant"), list(enumerate(VARIANTS)), ids=lambda v: v[0] if type(v) is tuple else v)
def test_logits_and_greedy_answers(tmp_path, seed, variant):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model_type, fields = variant
    theirs = build(torch, transformers, model_type, 100 + seed, **fields)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB" if seed % 2 else "1GB")
    ours = from_pretrained(tmp_path)

    tokens = np.random.default_rng(seed).integers(0, 64, (3, 70))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).logits.numpy()
    got = jax.jit(lambda model, tokens: model(tokens))(ours, tokens.astype(np.int32))
    assert goldens.relative_error(got, want) < goldens.TOLERANCE

    # Greedy answers step by step: transformers scores each of our tokens, so near-ties cannot hide a wrong cache.
    prompts = [row[:length].tolist() for row, length in zip(tokens, (3, 11, 24), strict=True)]
    for prompt, answer in zip(prompts, generate(ours, prompts, max_new_tokens=12), strict=True):
        assert len(answer) == 12
        with torch.no_grad():
            scores = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].numpy()
        chosen = scores[np.arange(12), answer]
        assert (scores.max(axis=1) - chosen).max() < goldens.TOLERANCE * np.abs(scores).max()
