"""`jlora demo`: run the shipped tiny model and its adapters in one batch, then in a queue over few slots."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jlora import BatchShape, LoRAConfig, LoRAManager, LoRARequest
from jlora.cli.generate import Request, answer_all, complete
from jlora.cli.loading import load_model, load_tokenizer, progress
from jlora.models import compiled_variants

DEMO = Path(__file__).parents[1] / "demo"


@dataclass(frozen=True)
class Shipped:
    """A shipped model with adapters and prompts.

    Attributes:
      folder: Folder of the model, adapters and prompts.
      slots: Number of slots of the second part, fewer than the adapters.
      rank: Largest rank of the adapters.
    """

    folder: Path
    slots: int
    rank: int


DENSE = Shipped(DEMO, slots=2, rank=32)
MIXTURE = Shipped(DEMO / "moe", slots=1, rank=16)


def run_demo(shipped: Shipped) -> int:
    """Run one batch with every adapter and the base, then 64 held-out prompts over fewer slots than adapters.

    Returns:
      0 if at least 95% of the answers are right, else 1.
    """
    folder = shipped.folder
    model, tokenizer = load_model(folder / "model", "float32"), load_tokenizer(folder / "model" / "tokenizer.json")
    adapters = {path.name: path for path in sorted((folder / "adapters").iterdir())}
    with progress("compiling"):
        manager = LoRAManager(model, LoRAConfig(max_loras=len(adapters), max_lora_rank=shipped.rank))
        for name, path in adapters.items():
            manager.add_adapter(LoRARequest(name, str(path)))
        word = "planet="
        together = [Request(None, word), *(Request(name, word) for name in adapters)]
        answers = answer_all(manager, tokenizer, together, max_new_tokens=10)
    print(f"One batch, one prompt, {len(together)} different answers:\n")
    for request, (answer, _) in zip(together, answers, strict=True):
        print(f"  {request.prompt:<12}{request.adapter or '(base)':<10}{answer}")
    manager.unwrap()

    requests = demo_requests(shipped)[:64]
    config = LoRAConfig(max_loras=shipped.slots, max_lora_rank=shipped.rank, max_cpu_loras=len(adapters))
    manager = LoRAManager(model, config)
    for name, path in adapters.items():
        manager.add_adapter(LoRARequest(name, str(path)))
    # Pad batches with the longest prompt, so that all have one shape.
    size, filler = 16, Request(None, "abcdefgh=")
    slots = f"{shipped.slots} slot{'s' * (shipped.slots > 1)}"
    with progress(f"compiling for {slots}"):
        manager.warmup(lambda batch: complete(manager, tokenizer, [filler] * size, batch, 10), BatchShape(size))
    compiled, started, tokens = compiled_variants(), time.perf_counter(), 0
    answered: dict[Request, str] = {}
    for batch in schedule(requests, size, shipped.slots):
        padded = [*batch, *[filler] * (size - len(batch))]
        results = answer_all(manager, tokenizer, padded, max_new_tokens=10)[: len(batch)]
        answered |= {request: answer for request, (answer, _) in zip(batch, results, strict=True)}
        tokens += sum(count for _, count in results)
    seconds = time.perf_counter() - started

    print(f"\n64 prompts that training never saw, {len(adapters)} adapters and the base over {slots}:\n")
    print(f"  {'prompt':<12}{'adapter':<10}{'answer':<12}")
    right = 0
    for request in requests:
        good = answered[request] == request.answer
        right += good
        verdict = "right" if good else f"wrong: {request.answer}"
        print(f"  {request.prompt:<12}{request.adapter or '(base)':<10}{answered[request]:<12}{verdict}")
    stats = manager.stats()
    late = compiled_variants() - compiled
    print(
        f"\n  {right} of {len(requests)} right; {stats.slot_loads} adapter loads, {stats.slot_evictions} evictions, "
        f"{stats.compilations + late - 1} compilations after warm-up, {tokens / seconds:.0f} tokens/s"
    )
    return 0 if right >= 0.95 * len(requests) else 1


def demo_requests(shipped: Shipped) -> list[Request]:
    """Return the shipped held-out prompts with their right answers, mixed over base and adapters."""
    return [Request(**entry) for entry in json.loads((shipped.folder / "prompts.json").read_text())]


def schedule(requests: Sequence[Request], size: int, max_loras: int) -> Iterator[list[Request]]:
    """Yield batches of at most `size` requests that use at most `max_loras` different adapters.

    A request is moved to a later batch if its adapter does not fit. The first request in the queue is never moved.
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
