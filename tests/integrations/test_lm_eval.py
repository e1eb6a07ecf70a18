"""lm-evaluation-harness against `jlora serve`: the figures of its own Hugging Face class on the same folders."""

import json

import numpy as np
import pytest

from jlora.cli.demo import DEMO, DENSE, demo_requests
from tests.serve.demo_process import ADAPTERS, DemoServer, recipe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TASKS = {
    "words_likelihood": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    },
    "words_generation": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["<eos>"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "words_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{word}}={{choices[gold]}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory):
    """The package, without a network."""
    for name in ("torch", "transformers", "peft", "datasets"):
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of local tasks: words with the answers of the adapter "sort" and of the base."""
    folder = tmp_path_factory.mktemp("tasks")
    words = [request.prompt.removesuffix("=") for request in demo_requests(DENSE)[:8]]
    lines = [{"word": word, "choices": ["".join(sorted(word)), word], "gold": 0} for word in words]
    (folder / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, fields in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "words.jsonl")}},
            "test_split": "test",
            "doc_to_text": "{{word}}=",
            "target_delimiter": "",
            **fields,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def server():
    server = DemoServer(recipe("--max-num-batched-tokens", "16"))
    yield server
    server.stop()


def test_figures_are_those_of_the_hugging_face_class(lm_eval, folder, server):
    tasks = pytest.importorskip("lm_eval.tasks").TaskManager(include_path=str(folder))

    def evaluate(model, arguments):
        found = lm_eval.simple_evaluate(
            model=model, model_args=arguments, tasks=[*TASKS], task_manager=tasks, log_samples=True, bootstrap_iters=0
        )
        samples = {
            name: [one["filtered_resps"] for one in sorted(rows, key=lambda one: one["doc_id"])]
            for name, rows in found["samples"].items()
        }
        return found["results"], samples

    for name, peft in (("demo", ""), ("sort", f",peft={ADAPTERS / 'sort'}")):
        base = f"base_url={server.url}/v1/completions,tokenizer={DEMO / 'model'},max_length=64"
        ours = f"model={name},{base},add_bos_token=True,num_concurrent=4"
        theirs = f"pretrained={DEMO / 'model'},dtype=float32,device=cpu,add_bos_token=True{peft}"
        (got, answers), (want, others) = evaluate("local-completions", ours), evaluate("hf", theirs)
        assert answers["words_generation"] == others["words_generation"]
        for mine, other in zip(answers["words_likelihood"], others["words_likelihood"], strict=True):
            np.testing.assert_allclose([value for value, _ in mine], [value for value, _ in other], atol=1e-4)
            assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
        np.testing.assert_allclose(answers["words_rolling"], others["words_rolling"], atol=1e-4)
        assert got["words_likelihood"]["acc,none"] == want["words_likelihood"]["acc,none"]
        assert got["words_generation"]["exact_match,none"] == want["words_generation"]["exact_match,none"]
        assert (got["words_generation"]["exact_match,none"] > 0.8) == (name == "sort")
        perplexities = [found["words_rolling"]["word_perplexity,none"] for found in (got, want)]
        np.testing.assert_allclose(*perplexities, rtol=1e-4)
