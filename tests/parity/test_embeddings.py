"""`/v1/embeddings` in the layout of Qwen3-Embedding against transformers and PEFT, with OpenAI's client."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

import jlora
from jlora.models import from_pretrained
from jlora.serve import Engine, EngineOptions
from jlora.serve.http.app import build_app
from jlora.serve.http.service import Service
from tests.models.families import SMALL
from tests.parity.test_classifiers import adapter_of, random_
from tests.serve.embedding import TEXTS, tokenizer, write_modules

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


def theirs(model, ids, mode):
    """Return the embedding that sentence-transformers computes: the last hidden states, pooled and normalised."""
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state
        weights = torch.arange(1, len(ids) + 1).reshape(1, -1, 1)
        found = hidden[:, -1] if mode == "lasttoken" else (hidden * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(found, p=2, dim=1)[0].numpy()


@pytest.mark.parametrize("mode", ["lasttoken", "weightedmean"])
def test_embeddings(tmp_path, mode):
    config = transformers.AutoConfig.for_model("qwen3", **{**SMALL, "tie_word_embeddings": True})
    config._attn_implementation = "eager"
    whole = random_(transformers.AutoModelForCausalLM.from_config(config), "qwen3").eval()
    whole.save_pretrained(tmp_path / "base")  # as a language model, like Qwen3-Embedding
    write_modules(tmp_path / "base", mode)
    base = whole.model
    of = {name: adapter_of(base, name, tmp_path, "FEATURE_EXTRACTION") for name in ("one", "two")}
    of["dora"] = adapter_of(base, "dora", tmp_path, "FEATURE_EXTRACTION", use_dora=True)
    of["base"] = base

    model = from_pretrained(tmp_path / "base")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=3, max_lora_rank=4, variants=["dora"]))
    engine = Engine(model, manager, tokenizer=tokenizer(), options=EngineOptions(max_num_batched_tokens=128))
    for name in ("one", "two", "dora"):
        engine.add_lora(jlora.LoRARequest(name, str(tmp_path / name)))
    service = Service(engine, manager, tokenizer(), ("base",), "base", engine.max_model_len)
    engine.start()
    service.state = "serving"

    async def answers():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(build_app(service)))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
            return await asyncio.gather(*(client.embeddings.create(model=name, input=TEXTS) for name in of))

    try:
        compiled = engine._steps.compiled()  # no public call counts them
        ids = [tokenizer().encode(text).ids for text in TEXTS]
        for name, answer in zip(of, asyncio.run(answers()), strict=True):
            assert answer.usage.total_tokens == sum(map(len, ids))
            for want, found in zip((theirs(of[name], one, mode) for one in ids), answer.data, strict=True):
                np.testing.assert_allclose(found.embedding, want, atol=1e-4)
        assert engine._steps.compiled() == compiled
    finally:
        assert engine.close(60)
    first = [theirs(each, ids[1], mode) for each in of.values()]
    assert min(np.abs(a - b).max() for i, a in enumerate(first) for b in first[:i]) > 1e-2
    assert json.loads((tmp_path / "base" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
