"""Log probabilities of prompts in the engine, against transformers and PEFT, through files that PEFT wrote."""

import copy

import numpy as np
import peft
import pytest
import torch
import transformers

import jlora
import jlora.models
from jlora.serve import Engine, EngineOptions, SamplingParams
from tests.parity import cases

# transformers and PEFT warn of their own deprecations, and when they save more than LoRA.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

LENGTHS, TOP = (1, 9, 16, 31), 4
SAVED = {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}
ADAPTERS = ["head", "embedding and head", "rank pattern"]
DORA = {"r": 5, "target_modules": ["q_proj", "lm_head"], "use_dora": True}
MODELS = {
    "llama-biases-llama3": (ADAPTERS, {"saved": SAVED, "dora": DORA}),
    "qwen2-tied": ([*ADAPTERS, *cases.TIED_ADAPTERS], {}),
}


@pytest.fixture(scope="module")
def world(request, tmp_path_factory):
    """Return the folder of the base, those of the adapters, prompts, and log probabilities [L, V] of all."""
    folder = tmp_path_factory.mktemp(request.param)
    names, more = MODELS[request.param]
    fields = {name: cases.adapters_of(request.param)[name] for name in names} | more
    base = cases.base_model(torch, transformers, request.param)
    base.save_pretrained(folder / "base")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, cases.VOCAB, length).astype(np.int32) for length in LENGTHS]
    paths, want = {}, {}
    for name in (None, *fields):
        model = copy.deepcopy(base)
        if name is not None:
            made = cases.peft_model(torch, peft, base, name, fields[name])
            if "modules_to_save" in fields[name]:
                with torch.no_grad():
                    made.base_model.model.lm_head.modules_to_save["default"].weight.normal_(std=0.3)
            paths[name] = str(cases.save_adapter(torch, made, name, folder))
            model = peft.PeftModel.from_pretrained(model, paths[name]).eval()
        for i, prompt in enumerate(prompts):
            logits = torch.tensor(cases.logits(torch, model, prompt[None]))[0]
            want[name, i] = torch.log_softmax(logits.double(), -1).numpy()
    return folder / "base", paths, prompts, want


@pytest.mark.parametrize(
    ("world", "chunk"),
    [("llama-biases-llama3", 5), ("llama-biases-llama3", 32), ("qwen2-tied", 16)],
    indirect=["world"],
)
def test_prompts_of_all_adapters_at_once(world, chunk):
    base, paths, prompts, want = world
    saved = {} if "saved" not in paths else {"saved_heads": {"lm_head": cases.VOCAB}}
    config = jlora.LoRAConfig(max_loras=6, max_lora_rank=cases.MAX_RANK, variants=["dora"], **saved)
    model = jlora.models.from_pretrained(base)
    manager = jlora.LoRAManager(model, config)
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=chunk, max_model_len=32)
    engine = Engine(model, manager, options=options)
    for name, path in paths.items():
        engine.add_lora(jlora.LoRARequest(name, path))
    engine.start()
    params = SamplingParams(temperature=2.0, seed=1, max_tokens=0, prompt_logprobs=TOP)
    running = {key: engine.submit(prompts[key[1]].tolist(), params, lora=key[0]) for key in want}
    for (name, i), generation in running.items():
        first, *found = generation.result(120).prompt_logprobs
        assert first is None
        rows, targets = want[name, i][:-1], prompts[i][1:]
        assert [one.token for one in found] == targets.tolist()
        chosen = np.take_along_axis(rows, targets[:, None], 1)
        assert np.abs(np.array([one.logprob for one in found]) - chosen[:, 0]).max(initial=0) <= 1e-4, (name, i)
        ranks = np.array([one.rank for one in found])
        assert np.all(ranks <= np.sum(rows >= chosen - 1e-4, 1))
        assert np.all(ranks >= np.sum(rows > chosen + 1e-4, 1))
        for one, row in zip(found, rows, strict=True):
            ids, values = map(list, zip(*one.top, strict=True))
            assert np.abs(np.array(values) - row[ids]).max() <= 1e-4, (name, i)
            assert np.abs(np.array(values) - np.sort(row)[::-1][:TOP]).max() <= 1e-4, (name, i)
    assert engine.close(60)
