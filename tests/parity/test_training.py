"""Training of several adapters at once against PEFT, which trains each adapter alone; PEFT loads what was trained."""

from typing import Any, NamedTuple

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

STEPS, ROWS, LENGTH = 20, 2, 12


class Trained(NamedTuple):
    """An adapter, and the numbers of torch's AdamW for it."""

    fields: dict[str, Any]  # of peft.LoraConfig
    rate: float
    b1: float
    b2: float
    decay: float
    clip: float

    def rate_at(self, step: int) -> float:
        return self.rate * min(1, (step + 1) / 4) * (1 - step / (2 * STEPS))


# At a rate of 2e-3, rounding grows to 2e-4 of the losses of "everywhere" within these steps; at 5e-4, to 2e-6.
TABLES = ["embed_tokens", "lm_head", "up_proj"]
ADAPTERS = {
    "small": Trained({"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}, 5e-3, 0.9, 0.999, 0.0, 0.3),
    "everywhere": Trained({"r": 8, "target_modules": cases.ALL, "use_rslora": True}, 5e-4, 0.8, 0.95, 0.1, 1.0),
    "tables": Trained({"r": 16, "target_modules": TABLES, "rank_pattern": {"up_proj": 7}}, 4e-3, 0.95, 0.99, 0.01, 0.1),
}


def batches():
    rng = np.random.default_rng(0)
    own = [{name: rng.integers(0, cases.VOCAB, (ROWS, LENGTH)) for name in ADAPTERS} for _ in range(2)]
    return own * (STEPS // 2)


def losses_of_peft(model, name: str) -> list[float]:
    own = ADAPTERS[name]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(own.b1, own.b2), weight_decay=own.decay)
    found = []
    for i, batch in enumerate(batches()):
        tokens = torch.from_numpy(batch[name])
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, own.clip)
        optimizer.param_groups[0]["lr"] = own.rate_at(i)
        optimizer.step()
        found.append(float(loss))
    return found


def loss(model, batch, tokens):
    with jlora.use(batch):
        logits = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.sum(axis=1), jnp.full(len(tokens), LENGTH - 1, jnp.float32)


@pytest.mark.parametrize("base_name", ["llama-biases-llama3", "qwen2-tied"])
def test_twenty_steps_are_those_of_peft_for_each_adapter_alone(tmp_path, base_name):
    """Losses and trained factors are within 1e-4 of PEFT's, for adapters with ranks and numbers of their own."""
    base = cases.base_model(torch, transformers, base_name)
    base.save_pretrained(tmp_path / "base")
    manager = jlora.LoRAManager(
        jlora.models.from_pretrained(tmp_path / "base"), jlora.LoRAConfig(max_loras=3, max_lora_rank=16)
    )
    theirs = {}
    for name, own in ADAPTERS.items():
        theirs[name] = cases.peft_model(torch, peft, base, name, own.fields)
        manager.add_adapter(jlora.LoRARequest(name, str(cases.save_adapter(torch, theirs[name], name, tmp_path))))
    trainer = manager.trainer(loss, capacity=4)
    for name in ADAPTERS:
        trainer.add(name)
    fields = {"b1": "b1", "b2": "b2", "weight_decay": "decay", "max_norm": "clip"}
    numbers = {key: {name: getattr(own, field) for name, own in ADAPTERS.items()} for key, field in fields.items()}
    found = {name: [] for name in ADAPTERS}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax needs the defaults of JAX
        for i, batch in enumerate(batches()):
            prepared = trainer.prepare([name for name in batch for _ in range(ROWS)])
            rates = {name: own.rate_at(i) for name, own in ADAPTERS.items()}
            tokens = np.concatenate([*batch.values()]).astype(np.int32)
            for name, value in trainer.step(prepared, tokens, learning_rate=rates, **numbers).losses.items():
                found[name].append(float(value))
    tokens = np.random.default_rng(1).integers(0, cases.VOCAB, (ROWS, LENGTH))
    for name in ADAPTERS:
        want = losses_of_peft(theirs[name], name)
        assert want[0] - want[-1] > 0.05
        np.testing.assert_allclose(found[name], want, rtol=1e-4)
        trained = trainer.tensors(name)
        expected = peft.get_peft_model_state_dict(theirs[name], save_embedding_layers=False)
        assert trained.keys() == expected.keys()
        for key, tensor in expected.items():
            np.testing.assert_allclose(trained[key], tensor, atol=1e-4 * float(tensor.abs().max()), rtol=0, err_msg=key)
        folder = tmp_path / "trained" / name
        trainer.adapter(name).save_pretrained(folder)
        loaded = peft.PeftModel.from_pretrained(cases.base_model(torch, transformers, base_name), folder)
        logits = cases.logits(torch, theirs[name], tokens)
        np.testing.assert_allclose(cases.logits(torch, loaded, tokens), logits, atol=1e-4 * np.abs(logits).max())
