"""Measure a running `jlora tinker` over raw HTTP: trained tokens/s of several tenants, samples and saves meanwhile.

    jlora tinker MODEL --checkpoints DIR --train-capacity 33 &
    python -m benchmarks.tinker_http http://127.0.0.1:8000 --tenants 1 8 32

Each number of tenants trains the same number of tokens in all. A tenant is a process of its own, and begins its
next step when it has the results of its last. One more model is saved and sampled. In the last period each tenant saves
its weights for sampling after each step. One line of JSON is printed for each number.
"""

import argparse
import itertools
import json
import multiprocessing
import threading
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as pb

PERIODS = ("trained_tokens_per_s", "trained_tokens_per_s_while_sampling", "trained_tokens_per_s_while_saving")


class Client:
    """A session of its own, with the order of its model's requests."""

    def __init__(self, url: str, key: str, rank: int):
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=600)
        self.base = self.http.get("/get_server_capabilities").json()["supported_models"][0]["model_name"]
        self.session = self.post("create_session", tags=[], user_metadata={}, sdk_version="0")["session_id"]
        config = {"rank": rank, "seed": 0}
        made = self.post(
            "create_model", session_id=self.session, model_seq_id=0, base_model=self.base, lora_config=config
        )
        self.model, self.seq, self.samplers = made["model_id"], 0, 0
        self.answer(made)

    def post(self, path: str, **body: Any) -> Any:
        while (found := self.http.post(f"/{path}", json=body)).status_code == 429:
            time.sleep(0.2)
        found.raise_for_status()
        return found.json()

    def answer(self, future: Any) -> httpx.Response:
        while (
            found := self.http.post("/retrieve_future", json={"request_id": future["request_id"]})
        ).status_code == 408:
            pass
        found.raise_for_status()
        if "json" in found.headers["content-type"] and "error" in found.json():
            raise RuntimeError(found.json()["error"])
        return found

    def next(self) -> dict[str, Any]:
        self.seq += 1
        return {"model_id": self.model, "seq_id": self.seq}

    def step(self, rows: int, length: int, vocab: int) -> None:
        """Train `rows` sequences and move the model."""
        message = pb.ForwardBackwardRequest(**self.next(), loss_fn="cross_entropy")
        for tokens in np.random.default_rng(self.seq).integers(0, vocab, (rows, length + 1)):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = tokens[:-1].astype(np.int32).tobytes()
            target = datum.loss_fn_inputs["target_tokens"]
            target.dtype, target.dense = pb.DTYPE_INT64, tokens[1:].astype(np.int64).tobytes()
        headers = {"content-type": "application/x-protobuf"}
        computed = self.http.post("/forward_backward", content=message.SerializeToString(), headers=headers).json()
        moved = self.post("optim_step", **self.next(), adam_params={"learning_rate": 1e-5})
        self.answer(computed)
        self.answer(moved)

    def sampler(self) -> str:
        """Save the weights for sampling, and return the sampler's id."""
        self.samplers += 1
        saved = self.post("save_weights_for_sampler", **self.next(), sampling_session_seq_id=self.samplers)
        return self.answer(saved).json()["sampling_session_id"]

    def sample(self, sampler: str, seq_id: int, tokens: int, samples: int = 1) -> int:
        chunks = [{"tokens": [1, 4, 5], "type": "encoded_text"}]
        params = {"max_tokens": tokens, "stop": []}
        asked = {"prompt": {"chunks": chunks}, "sampling_params": params, "num_samples": samples}
        found = self.answer(self.post("asample", sampling_session_id=sampler, seq_id=seq_id, **asked))
        return sum(len(each.tokens) // 4 for each in pb.SampleResponse.FromString(found.content).sequences)

    def close(self) -> None:
        self.post(f"sessions/{self.session}/finish")
        self.http.close()


def tenant(args: argparse.Namespace, rows: int, together: Barrier) -> None:
    """Train a model of its own in the periods that `measure` times."""
    try:
        client = Client(args.url, args.key, args.rank)
        client.step(rows, args.length, args.vocab)  # places it
        together.wait()
        for period in PERIODS:
            together.wait()
            for _ in range(args.steps):
                client.step(rows, args.length, args.vocab)
                if period.endswith("saving"):
                    client.sampler()
            together.wait()
        client.close()
    except BaseException:
        together.abort()
        raise


def measure(args: argparse.Namespace, tenants: int) -> dict[str, Any]:
    rows = max(1, args.rows // tenants)
    processes = multiprocessing.get_context("spawn")
    together = processes.Barrier(tenants + 1, timeout=600)
    started = [processes.Process(target=tenant, args=(args, rows, together), daemon=True) for _ in range(tenants)]
    for process in started:
        process.start()
    together.wait()
    own, numbers, saves = Client(args.url, args.key, args.rank), itertools.count(), []
    own.step(1, args.length, args.vocab)
    for _ in range(args.saves):
        begin = time.perf_counter()
        own.sample(own.sampler(), next(numbers), 1)
        saves.append(time.perf_counter() - begin)
    found: dict[str, Any] = {"tenants": tenants, "save_to_first_token_ms": round(1e3 * float(np.median(saves)), 1)}
    sampler, sampled, stop = own.sampler(), [0], threading.Event()

    def sample() -> None:
        while not stop.is_set():
            sampled[0] += own.sample(sampler, next(numbers), args.sampled, args.samples)

    thread = threading.Thread(target=sample)
    for name in PERIODS:
        together.wait()
        begin = time.perf_counter()
        if name.endswith("sampling"):
            thread.start()
        together.wait()
        seconds = time.perf_counter() - begin
        found[name] = round(args.steps * rows * tenants * args.length / seconds, 1)
        if name.endswith("sampling"):
            found["sampled_tokens_per_s"] = round(sampled[0] / seconds, 1)
            stop.set()
            thread.join()
    own.close()
    for process in started:
        process.join()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--key", default="tml-none")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=32, help="sequences of a round, of all tenants")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--sampled", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--samples", type=int, default=16, help="samples at a time")
    arguments = parser.parse_args()
    for number in arguments.tenants:
        print(json.dumps(measure(arguments, number)), flush=True)
