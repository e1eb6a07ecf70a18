"""Training of several adapters at once against PEFT, which trains each adapter alone; PEFT loads what was trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch
import transformers

import jlora
import jlora.models
from tests.parity import cases

# transformers and PEFT warn of their own deprecations.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

STEPS, ROWS, LENGTH, CLIP = 20, 2, 12, 0.3
# Adapter -> its fields of PEFT, learning rate, and decay of the weights.
ADAPTERS = {
    "small": ({"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}, 5e-3, 0.0),
    "everywhere": ({"r": 8, "target_modules": cases.ALL, "use_rslora": True}, 2e-3, 0.1),
    "pattern": ({"r": 4, "target_modules": ["o_proj", "up_proj"], "rank_pattern": {"up_proj": 7}}, 4e-3, 0.01),
}


def rate_at(step: int, rate: float) -> float:
    return rate * min(1, (step + 1) / 4) * (1 - step / (2 * STEPS))


def batches():
    rng = np.random.default_rng(0)
    own = [{name: rng.integers(0, cases.VOCAB, (ROWS, LENGTH)) for name in ADAPTERS} for _ in range(2)]
    return own * (STEPS // 2)


def losses_of_peft(model, name: str) -> list[float]:
    _, rate, decay = ADAPTERS[name]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=decay)
    found = []
    for i, batch in enumerate(batches()):
        tokens = torch.from_numpy(batch[name])
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.param_groups[0]["lr"] = rate_at(i, rate)
        optimizer.step()
        found.append(float(loss))
    return found


def loss(model, batch, tokens):
    with jlora.use(batch):
        logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.sum(axis=1), jnp.full(len(tokens), LENGTH - 1, jnp.float32)


def test_losses_are_those_of_peft_for_each_adapter_alone(tmp_path):
    base = cases.base_model(torch, transformers, "llama-biases-llama3")
    base.save_pretrained(tmp_path / "base")
    manager = jlora.LoRAManager(
        jlora.models.from_pretrained(tmp_path / "base"), jlora.LoRAConfig(max_loras=3, max_lora_rank=8)
    )
    theirs = {}
    for name, (fields, *_) in ADAPTERS.items():
        theirs[name] = cases.peft_model(torch, peft, base, name, fields)
        manager.add_adapter(jlora.LoRARequest(name, str(cases.save_adapter(torch, theirs[name], name, tmp_path))))
    trainer = manager.trainer(loss, capacity=4)
    for name in ADAPTERS:
        trainer.add(name)
    decays = {name: decay for name, (_, _, decay) in ADAPTERS.items()}
    found = {name: [] for name in ADAPTERS}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax needs the defaults of JAX
        for i, batch in enumerate(batches()):
            prepared = trainer.prepare([name for name in batch for _ in range(ROWS)])
            rates = {name: rate_at(i, rate) for name, (_, rate, _) in ADAPTERS.items()}
            numbers = {"learning_rate": rates, "weight_decay": decays, "max_norm": CLIP}
            report = trainer.step(prepared, np.concatenate([*batch.values()]).astype(np.int32), **numbers)
            for name, value in report.losses.items():
                found[name].append(float(value))
    tokens = np.random.default_rng(1).integers(0, cases.VOCAB, (ROWS, LENGTH))
    for name in ADAPTERS:
        want = losses_of_peft(theirs[name], name)
        assert want[0] - want[-1] > 0.05
        np.testing.assert_allclose(found[name], want, rtol=1e-4)
        trainer.adapter(name).save_pretrained(tmp_path / "trained" / name)
        loaded = peft.PeftModel.from_pretrained(
            cases.base_model(torch, transformers, "llama-biases-llama3"), tmp_path / "trained" / name
        )
        expected = cases.logits(torch, theirs[name], tokens)
        np.testing.assert_allclose(cases.logits(torch, loaded, tokens), expected, atol=1e-3 * np.abs(expected).max())
