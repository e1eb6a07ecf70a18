"""`jlora demo`: the shipped tiny model and its adapters, one batch first and then a queue over two slots."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jlora.cli.generate import Request, answer_all, complete
from jlora.cli.loading import load_model, load_tokenizer, progress
from jlora.config import LoRAConfig, LoRARequest

DEMO = Path(__file__).parents[1] / "demo"


def run_demo() -> int:
    """One batch with four adapters and the base; then 64 held-out prompts over two slots."""
    from jlora.manager.manager import LoRAManager
    from jlora.models import generation

    model, tokenizer = load_model(DEMO / "model", "float32"), load_tokenizer(DEMO / "model" / "tokenizer.json")
    adapters = {path.name: path for path in sorted((DEMO / "adapters").iterdir())}
    with progress("compiling"):
        manager = LoRAManager(model, LoRAConfig(max_loras=len(adapters), max_lora_rank=32))
        for name, path in adapters.items():
            manager.add_adapter(LoRARequest(name, str(path)))
        word = "planet="
        together = [Request(None, word), *(Request(name, word) for name in adapters)]
        answers = answer_all(manager, tokenizer, together, max_new_tokens=10)
    print("One batch, one prompt, five different answers:\n")
    for request, (answer, _) in zip(together, answers, strict=True):
        print(f"  {request.prompt:<12}{request.adapter or '(base)':<10}{answer}")
    manager.unwrap()

    requests = demo_requests()[:64]
    manager = LoRAManager(model, LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=len(adapters)))
    for name, path in adapters.items():
        manager.add_adapter(LoRARequest(name, str(path)))
    # Batches are filled up with the longest prompt there is, so that all have one shape.
    size, filler = 16, Request(None, "abcdefgh=")
    with progress("compiling for two slots"):
        manager.warmup(lambda batch: complete(manager, tokenizer, [filler] * size, batch, 10), num_sequences=size)
    compiled, started, tokens = generation.compiled_variants(), time.perf_counter(), 0
    answered: dict[Request, str] = {}
    for batch in schedule(requests, size, manager.config.max_loras):
        padded = [*batch, *[filler] * (size - len(batch))]
        results = answer_all(manager, tokenizer, padded, max_new_tokens=10)[: len(batch)]
        answered |= {request: answer for request, (answer, _) in zip(batch, results, strict=True)}
        tokens += sum(count for _, count in results)
    seconds = time.perf_counter() - started

    print("\n64 prompts that training never saw, four adapters and the base over two slots:\n")
    print(f"  {'prompt':<12}{'adapter':<10}{'answer':<12}")
    right = 0
    for request in requests:
        good = answered[request] == request.answer
        right += good
        verdict = "right" if good else f"wrong: {request.answer}"
        print(f"  {request.prompt:<12}{request.adapter or '(base)':<10}{answered[request]:<12}{verdict}")
    stats = manager.stats()
    late = generation.compiled_variants() - compiled
    print(
        f"\n  {right} of {len(requests)} right; {stats.slot_loads} adapter loads, {stats.slot_evictions} evictions, "
        f"{stats.compilations + late - 1} compilations after warm-up, {tokens / seconds:.0f} tokens/s"
    )
    return 0 if right >= 0.95 * len(requests) else 1


def demo_requests() -> list[Request]:
    """The shipped held-out prompts with their right answers, mixed over base and adapters."""
    return [Request(**entry) for entry in json.loads((DEMO / "prompts.json").read_text())]


def schedule(requests: Sequence[Request], size: int, max_loras: int) -> Iterator[list[Request]]:
    """Cut a queue into batches of at most `size` requests that use at most `max_loras` different adapters.

    A request whose adapter does not fit waits for a later batch; the first in the queue never waits.
    """
    queue = list(requests)
    while queue:
        batch, waiting, adapters = [], [], set()
        for request in queue:
            fits = request.adapter is None or request.adapter in adapters or len(adapters) < max_loras
            if len(batch) < size and fits:
                batch.append(request)
                adapters |= {request.adapter} - {None}
            else:
                waiting.append(request)
        yield batch
        queue = waiting
