"""The unmodified client of TRL's asynchronous trainer against a server, with adapters that PEFT saved.

Skipped without trl, which the nightly workflow installs.
"""

import asyncio
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers

import jlora
from jlora.models import from_pretrained
from jlora.serve import Engine, EngineOptions, SamplingParams
from jlora.serve.http.service import Service
from jlora.serve.http.sources import AllowedSources
from tests.models.families import SMALL
from tests.parity.test_classifiers import random_
from tests.serve.client import on_socket, until
from tests.serve.fake_engine import letters

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

DOCS = Path(__file__).parents[2] / "docs" / "serve.md"
PLAIN = {
    "plain": {},
    "rank pattern": {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}},
    "rsLoRA": {"use_rslora": True},
}
REFUSED_BY_TRL = {
    "DoRA": {"use_dora": True},
    "LoRA of the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "saved head": {"modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def trl():
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    pytest.importorskip("trl")
    from accelerate import Accelerator
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, vllm_client

    Accelerator(cpu=True)  # TRL's log needs one
    return SimpleNamespace(
        trainer=async_grpo_trainer, client=vllm_client.VLLMClient, loop=async_rollout_worker._AsyncRolloutLoop
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = transformers.LlamaConfig(**{**SMALL, "vocab_size": 40, "eos_token_id": 1, "tie_word_embeddings": False})
    config._attn_implementation = "eager"
    model = random_(transformers.LlamaForCausalLM(config), "llama").eval()
    model.folder = tmp_path_factory.mktemp("trl")
    model.save_pretrained(model.folder / "base")
    return model


@pytest.fixture(scope="module")
def served(trl, base):
    """Yield the engine, and TRL's client of its server."""
    model = from_pretrained(base.folder / "base")
    config = jlora.LoRAConfig(max_loras=3, max_lora_rank=8, variants=["dora"], saved_heads={"lm_head": 40})
    manager = jlora.LoRAManager(model, config)
    engine = Engine(model, manager, tokenizer=letters(), options=EngineOptions(max_num_seqs=4, max_model_len=64))
    sources = AllowedSources(base.folder)
    service = Service(engine, manager, letters(), ("base",), "base", 64, sources, dtype="float32")
    engine.start()
    service.state = "serving"
    with on_socket(service) as (host, port):
        yield engine, trl.client(f"http://{host}:{port}")
    assert engine.close(60)


def policy(base, fields):
    """Return PEFT's model of a random adapter on a copy of the base."""
    fields = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM", **fields}
    copied = type(base)(base.config)
    copied.load_state_dict(base.state_dict())
    model = peft.get_peft_model(copied, peft.LoraConfig(**fields)).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def rollout(trl, client, version, prompt):
    """Generate as TRL's rollout worker does, with the body that it sends. Returns token ids and log probabilities."""
    loop = object.__new__(trl.loop)
    vars(loop).update(max_tokens=12, temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0)
    vars(loop).update(lora_name="policy", request_timeout=60, vllm_server_url=client.server_url)
    vars(loop).update(_model_version_value=SimpleNamespace(value=version), _counters=Counter())

    async def turn():
        import aiohttp

        async with aiohttp.ClientSession() as loop.session:
            return await loop._generate_one_turn(prompt)

    return asyncio.run(turn())


def logprobs(model, prompt, tokens):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double()
    found = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return found[torch.arange(len(tokens)), tokens].tolist()


def publish(trl, client, model, folder, version):
    """Publish a version as the trainer does: pause, save, load, resume."""
    from accelerate import Accelerator

    client.pause()
    trl.trainer.save_lora_adapter(model, Accelerator(cpu=True), "default", str(folder))
    client.load_lora_adapter(f"policy-v{version}", str(folder))
    client.resume()


def test_the_whole_life(trl, base, served):
    engine, client = served
    client.wait_for_server_ready()
    assert client.get_max_model_len() == 64
    assert client.get_dtype() == "torch.float32"
    info, args = client.get_server_info(), SimpleNamespace(max_staleness=1)
    first, second = policy(base, {}), policy(base, PLAIN["rank pattern"])
    assert trl.trainer.select_adapter_sync(info, second, args)
    with pytest.raises(ValueError, match="--max-loras 4"):
        trl.trainer.select_adapter_sync(info, first, SimpleNamespace(max_staleness=2))
    with pytest.raises(ValueError, match="--max-lora-rank"):
        trl.trainer.select_adapter_sync(info, policy(base, {"r": 16}), args)

    publish(trl, client, first, base.folder / "policy-v1", 1)
    prompt = [5, 7, 9, 11]
    before = engine.stats().generated_tokens
    kept = engine.submit(prompt, SamplingParams(ignore_eos=True, logprobs=0), lora="policy-v1")
    until(lambda: engine.stats().generated_tokens > before)
    publish(trl, client, second, base.folder / "policy-v2", 2)
    for version, model in ((1, first), (2, second)):
        tokens, found = rollout(trl, client, version, prompt)
        assert len(tokens) == len(found) > 0
        assert found == pytest.approx(logprobs(model, prompt, tokens), abs=1e-4)
    client.unload_lora_adapter("policy-v1")
    client.unload_lora_adapter("policy-v1")  # missing names are no error
    whole = kept.result(60)
    found = [one.logprob for one in whole.logprobs]
    assert found == pytest.approx(logprobs(first, prompt, list(whole.tokens)), abs=1e-4)
    assert not engine.paused
    client.unload_lora_adapter("policy-v2")


@pytest.mark.parametrize("kind", [*PLAIN, *REFUSED_BY_TRL])
def test_adapters_that_peft_saved(trl, base, served, monkeypatch, kind):
    _, client = served
    model = policy(base, (PLAIN | REFUSED_BY_TRL)[kind])
    info, args = client.get_server_info(), SimpleNamespace(max_staleness=1)
    assert trl.trainer.select_adapter_sync(info, model, args) == (kind in PLAIN)
    (block,) = re.findall(r"^```py\n(from trl\..*?)^```$", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for name in ("validate_lora_for_vllm_sync", "save_lora_adapter"):
        monkeypatch.setattr(trl.trainer, name, getattr(trl.trainer, name))  # restored after the test
    if kind in REFUSED_BY_TRL:
        exec(compile(block, "docs/serve.md", "exec"), {})
    assert trl.trainer.select_adapter_sync(info, model, args)
    publish(trl, client, model, base.folder / kind, 3)
    try:
        for prompt in ([3], [4, 8, 15, 16, 23, 35]):
            tokens, found = rollout(trl, client, 3, prompt)
            assert found == pytest.approx(logprobs(model, prompt, tokens), abs=1e-4)
    finally:
        client.unload_lora_adapter("policy-v3")
