"""Steps without adapters: a compiled variant of their own, for prompts, chunks of prompts and tokens."""

from collections import Counter

import jax
from flax import nnx

import jlora
from jlora.serve import Engine, EngineOptions, SamplingParams
from tests.serve.engine.test_own_model import Recurrent, adapter, numpy_greedy

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CHUNK = 8


class Counted(Recurrent):
    """Counts the traces of `extend`: (tokens a sequence, positions of the cache, calls a LoRA layer?) -> traces."""

    traces: Counter = Counter()

    def extend(self, tokens, positions, cache, last):
        found = super().extend(tokens, positions, cache, last)
        program = jax.make_jaxpr(lambda x: self.blocks[0].q(x))(jax.numpy.zeros((*tokens.shape, 16)))
        products = sum(equation.primitive.name == "dot_general" for equation in equations(program.jaxpr))
        self.traces[tokens.shape[1], cache["memory"].shape[1], products > 1] += 1
        return found


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_every_step_has_both_variants_after_warm_up():
    """A prompt of one chunk, a later chunk of a prompt, and the next tokens; none is compiled while serving."""
    model, lora = Counted(nnx.Rngs(0)), adapter("a", 0)
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=2, target_modules=["q", "kv"]))
    manager.add_adapter(lora)
    options = EngineOptions(max_num_seqs=2, max_num_batched_tokens=CHUNK, max_model_len=16)
    engine = Engine(model, manager, options=options)
    engine.start()
    shapes = [(CHUNK, CHUNK), (CHUNK, 2 * CHUNK), (1, 2 * CHUNK)]
    warm = Counter({(*shape, adapters): 1 for shape in shapes for adapters in (False, True)})
    assert Counted.traces == warm
    model = Recurrent(nnx.Rngs(0))
    short, long = [3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    for names in ([None, None], ["a", "a"], [None, "a"], ["a", None]):
        asked = [(prompt, name) for name in names for prompt in (short, long)]
        found = [engine.submit(prompt, GREEDY, lora=name) for prompt, name in asked]
        for one, (prompt, name) in zip(found, asked, strict=True):
            tokens = list(one.result(60).tokens)
            want = numpy_greedy(model, None if name is None else lora, prompt, 4)
            assert tokens[: len(want)] == want
    assert Counted.traces == warm
    assert engine.close(60)
