"""The generation loop compared with greedy answers of transformers, a NumPy sampler, and other batches."""

import jax
import numpy as np
import pytest

from jlora.models import ModelError, generate
from jlora.models.sampling import HOTTEST
from tests.models import goldens

pytestmark = pytest.mark.device

NAME = "mistral-window"


def golden_prompts(name):
    expected = goldens.expected(name)
    indices = range(sum(key.startswith("prompt_") for key in expected))
    return [expected[f"prompt_{i}"].tolist() for i in indices], [expected[f"answer_{i}"].tolist() for i in indices]


@pytest.mark.parametrize("name", ["llama-biases-llama3", "qwen3-tied", "gpt-oss-square", "gemma3-tied"])
def test_greedy_ragged_batch_equals_transformers_one_by_one(golden, name):
    prompts, answers = golden_prompts(name)
    assert generate(golden(name), prompts, max_new_tokens=20) == answers


def test_each_sequence_stops_at_its_own_first_stop_token_or_at_the_limit(golden):
    prompts, answers = golden_prompts(NAME)
    stops = (answers[0][3], answers[1][10])
    want = []
    for answer in answers:
        ends = [i for i, token in enumerate(answer) if token in stops]
        want.append(answer[: ends[0] + 1] if ends else answer)
    assert len({len(answer) for answer in want}) > 1
    for limit in (20, 18):
        cut = [answer[:limit] for answer in want]
        assert generate(golden(NAME), prompts, max_new_tokens=limit, stop_tokens=stops) == cut


@pytest.mark.parametrize(
    "narrow", [{"temperature": 1e-40}, {"temperature": 1.0, "top_k": 1}, {"temperature": 2.0, "top_p": 1e-6}]
)
def test_narrow_sampling_is_greedy(golden, narrow):
    prompts, answers = golden_prompts(NAME)
    assert generate(golden(NAME), prompts, max_new_tokens=20, seed=3, **narrow) == answers


def test_a_temperature_beyond_float32(golden):
    prompts, _ = golden_prompts(NAME)
    hot, hottest = (generate(golden(NAME), prompts, max_new_tokens=20, temperature=one) for one in (1e39, HOTTEST))
    assert hot == hottest


def test_sampled_tokens_do_not_depend_on_the_batch(golden):
    prompts, _ = golden_prompts(NAME)
    options = {"max_new_tokens": 20, "temperature": 1.5, "seed": 5}
    together = generate(golden(NAME), prompts, sequence_ids=[7, 3, 9, 4], **options)
    assert len({tuple(answer) for answer in together}) == 4
    for order in ([2], [1, 0, 3, 2]):
        ids = [[7, 3, 9, 4][i] for i in order]
        answers = generate(golden(NAME), [prompts[i] for i in order], sequence_ids=ids, **options)
        assert answers == [together[i] for i in order]


def test_seeds_and_sequences_draw_differently(golden):
    prompts, _ = golden_prompts(NAME)
    options = {"max_new_tokens": 20, "temperature": 1.5}
    twins = [max(prompts, key=len)] * 4  # as many and as long as in the other tests, whose program this is
    answers = generate(golden(NAME), twins, seed=0, **options)
    assert len({tuple(answer) for answer in answers}) == 4
    assert generate(golden(NAME), twins, seed=0, **options) == answers
    assert not set(map(tuple, generate(golden(NAME), twins, seed=1, **options))) & set(map(tuple, answers))


def test_sampled_frequencies(golden):
    """First tokens of 4000 sequences follow the distribution that a NumPy sampler computes from the logits."""
    model, temperature, draws = golden(NAME), 1.3, 4000
    top_k, top_p = 9, 0.7
    prompt = golden_prompts(NAME)[0][1]
    logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, np.array([prompt])), np.float64)[0, -1]
    chance = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-chance)
    kept = order[:top_k]
    chance = np.where(np.isin(np.arange(chance.size), kept), chance, 0.0) / chance[kept].sum()
    count = 1 + int(np.searchsorted(np.cumsum(chance[kept]), top_p - 1e-12))
    kept = kept[:count]
    chance = np.where(np.isin(np.arange(chance.size), kept), chance, 0.0) / chance[kept].sum()

    answers = generate(
        model, [prompt] * draws, max_new_tokens=1, temperature=temperature, seed=11, top_k=top_k, top_p=top_p
    )
    found = np.bincount(np.ravel(answers), minlength=chance.size)
    assert not found[chance == 0].any()
    # Five standard deviations of a binomial count: about one false alarm in a million tokens.
    assert (np.abs(found - draws * chance) <= 5 * np.sqrt(draws * chance * (1 - chance)) + 1).all()


@pytest.mark.slow
def test_one_trace_for_all_lengths_and_settings_of_a_bucket(golden):
    model = golden("llama-tied-linear")
    traces = 0

    class Counting:
        config = model.config
        init_cache = staticmethod(model.init_cache)

        def extend(self, *args):
            nonlocal traces
            traces += 1
            return model.extend(*args)

    jax.tree_util.register_static(Counting)
    counting = Counting()
    for lengths, limit, seed in (((3, 8), 5, 0), ((1, 2), 8, 1), ((7, 7), 1, 2)):
        prompts = [list(range(1, length + 1)) for length in lengths]
        limits = {"temperature": 1.0, "top_k": limit, "top_p": 0.1 + seed / 4}
        for sampling in ({}, {"temperature": 0.5 + seed}, limits):
            generate(counting, prompts, max_new_tokens=limit, seed=seed, stop_tokens=range(seed), **sampling)
    assert traces == 3 * 2  # greedy, sampled, sampled with limits; each a prompt pass and a loop body
    generate(counting, [[1] * 9, [2]], max_new_tokens=5)
    assert traces == 4 * 2


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, r"prompts\[1\]"),
        (["text"], {}, r"prompts\[0\]"),
        ([[64]], {}, "from 0 to 63, got 64 to 64"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[1], [1] * 9], {"max_new_tokens": 248}, "prompt of 9 tokens .* max_position_embeddings=256"),
        ([[1]], {"max_new_tokens": 2**31 - 1}, "max_position_embeddings=256"),
        ([[1]], {"temperature": -1.0}, "temperature"),
        ([[1]], {"temperature": 1.0, "top_k": 0}, "top_k"),
        ([[1]], {"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ([[1]], {"top_k": 3}, "temperature above 0"),
        ([[1]], {"stop_tokens": ["a"]}, r"stop_tokens\[0\]"),
        ([[1]], {"sequence_ids": [1, 2]}, "2 entries for 1 prompts"),
        ([[1]], {"sequence_ids": [-1]}, r"sequence_ids\[0\]"),
        ([[1]], {"temperature": 1.0, "seed": -1}, "seed"),
    ],
)
def test_bad_arguments_are_named(golden, prompts, options, message):
    with pytest.raises(ModelError, match=message):
        generate(golden(NAME), prompts, **{"max_new_tokens": 2, **options})
