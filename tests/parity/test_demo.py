"""The checkpoints and adapters of `jlora demo` give the same answers in transformers and PEFT."""

import peft
import pytest
import torch
import transformers

from jlora.cli.demo import DENSE, MIXTURE, demo_requests
from jlora.cli.loading import load_tokenizer

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


def _right(model, tokenizer, requests) -> int:
    right = 0
    for request in requests:
        prompt = torch.tensor([tokenizer.encode(request.prompt).ids])
        with torch.no_grad():
            out = model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False
            )
        right += tokenizer.decode(out[0, prompt.shape[1] :].tolist()) == request.answer
    return right


@pytest.mark.parametrize("shipped", [DENSE, MIXTURE], ids=["dense", "moe"])
def test_held_out_prompts(shipped):
    tokenizer = load_tokenizer(shipped.folder / "model" / "tokenizer.json")
    requests = demo_requests(shipped)
    for folder in (shipped.folder / "adapters").iterdir():
        model = transformers.AutoModelForCausalLM.from_pretrained(shipped.folder / "model", dtype=torch.float32).eval()
        copies = [r for r in requests if r.adapter is None][:20]
        asked = [r for r in requests if r.adapter == folder.name][:20]
        assert _right(model, tokenizer, copies) >= 19
        assert _right(model, tokenizer, asked) <= 1
        assert _right(peft.PeftModel.from_pretrained(model, folder).eval(), tokenizer, asked) >= 19
