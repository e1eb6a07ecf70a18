"""LiteLLM as a client. Skipped without the package, which the nightly workflow installs."""

import pytest

from jlora.serve.http.template import ChatTemplate
from tests.serve.client import make_service, on_socket
from tests.serve.fake_engine import BUSY

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def litellm(monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is downloaded at the import
    return pytest.importorskip("litellm")


def test_litellm(litellm, engine):
    hi = [{"role": "user", "content": "hi"}]
    with on_socket(make_service(engine, chat=ChatTemplate(TEMPLATE))) as (host, port):
        at = {"model": "hosted_vllm/sort", "api_base": f"http://{host}:{port}/v1", "api_key": "none", "num_retries": 0}
        whole = litellm.completion(**at, messages=hi, temperature=0, logprobs=True, top_logprobs=1, seed=3)
        (choice,) = whole.choices
        assert (choice.message.content, choice.finish_reason, whole.usage.total_tokens) == ("sort|hi", "stop", 9)
        assert [one.token for one in choice.logprobs.content] == list("sort|hi")
        assert whole.system_fingerprint == "model=base&adapter=sort"
        parts = list(litellm.completion(**at, messages=hi, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "sort|hi"
        assert parts[-1].usage.total_tokens == 9
        ids = litellm.completion(**at, messages=hi, extra_body={"return_token_ids": True, "top_k": 3}, max_tokens=4)
        assert engine.generations[-1].params.top_k == 3
        assert ids.choices[0].provider_specific_fields["token_ids"] == engine.sent()
        text = litellm.text_completion(**at, prompt="ba=", max_tokens=6)
        assert text.choices[0].text == "sort|b"
        with pytest.raises(litellm.NotFoundError, match="does not exist"):
            litellm.completion(**{**at, "model": "hosted_vllm/unknown"}, messages=hi)
        engine.refuse = BUSY
        with pytest.raises(litellm.RateLimitError):
            litellm.completion(**at, messages=hi, max_retries=0)
