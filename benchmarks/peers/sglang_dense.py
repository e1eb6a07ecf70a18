"""Time SGLang's LoRA of single projections, its kernels alone, from the installed package (sglang==0.5.23).

    python -m benchmarks.peers.sglang_dense --out peers.json [--projection o] [--rank 16] [--tokens 64] [--adapters 8]

- sglang_triton_v2_us: `--lora-backend triton_v2`, shrink and expand with the plan of its table for the GPU.
- sglang_triton_v2_default_us: the same with its default plan, where the table multiplies A of all slots.
- sglang_csgmv_us: `--lora-backend csgmv`, its default, with `--max-lora-chunk-size 16`, its default.
- sglang_csgmv_128_us: the same with chunks of up to 128 rows, from 64 tokens on.

All metadata and routes are made before the graph. The grid has as many segments as the batch.
"""

from sglang.kernels.ops.lora.dense import chunked_sgmv_expand, chunked_sgmv_shrink
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend
from sglang.srt.lora.backend.triton_v2_backend import TritonV2LoRABackend
from sglang.srt.lora.dense import plan
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from benchmarks.peers.common import DENSE, DENSE_SLOTS, DEVICE, Dense, Work, check_added, graph_us, int32, run


class Chunked(ChunkedSgmvLoRABackend):
    """The backend with a chunk size of its own, which it else takes from the server's arguments."""

    def __init__(self, chunk: int):
        BaseLoRABackend.__init__(self, DENSE_SLOTS, DEVICE)
        self.max_chunk_size = chunk


def forward_batch(tokens: int, adapters: int) -> tuple[ForwardBatch, list[int]]:
    """Return the batch and the slot of each request: requests of one token, or one request an adapter."""
    unused = {"input_ids": None, "req_pool_indices": None, "seq_lens": None, "out_cache_loc": None}
    if tokens <= 256:
        batch = ForwardBatch(forward_mode=ForwardMode.DECODE, batch_size=tokens, seq_lens_sum=tokens, **unused)
        return batch, [token % adapters for token in range(tokens)]
    lengths = [tokens // adapters] * adapters
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=adapters, seq_lens_sum=tokens, extend_num_tokens=tokens,
        extend_seq_lens=int32(lengths), extend_seq_lens_cpu=lengths, **unused,
    )  # fmt: skip
    return batch, list(range(adapters))


def prepared(backend: BaseLoRABackend, d: Dense) -> BaseLoRABackend:
    batch, slots = forward_batch(d.tokens, d.adapters)
    used = [slot < d.adapters for slot in range(DENSE_SLOTS)]
    backend.prepare_lora_batch(batch, slots, [d.rank * use for use in used], [float(use) for use in used], False)
    return backend


def csgmv(d: Dense, chunk: int) -> float:
    # SGLang keeps compiled kernels by a key without the rank.
    chunked_sgmv_shrink._chunked_lora_shrink_kernel._clear_cache()
    chunked_sgmv_expand._chunked_lora_expand_kernel._clear_cache()
    backend = prepared(Chunked(chunk), d)
    offsets = int32(d.offsets())
    sizes = {"slice_offsets": offsets, "slice_offsets_cpu": offsets.cpu(), "max_slice_size": max(d.slices)}

    def add(layer: int, y) -> None:
        h = chunked_sgmv_shrink.chunked_sgmv_lora_shrink_forward(
            x=d.x[layer], weights=d.a[layer], batch_info=backend.batch_info, num_slices=len(d.slices)
        )
        chunked_sgmv_expand.chunked_sgmv_lora_expand_forward(
            x=h, weights=d.b[layer], batch_info=backend.batch_info, base_output=y, **sizes
        )

    return checked_us(d, add)


def triton_v2(d: Dense, default: bool = False) -> float:
    runner, offsets = prepared(TritonV2LoRABackend(DENSE_SLOTS, DEVICE), d).runner, tuple(d.offsets())
    if default:
        used = plan._decode_default() if d.tokens <= 256 else plan._prefill_default()
    else:
        used = runner.plan_for(plan.DenseLoraKind.LINEAR, d.rank, d.k, d.n, num_tokens=d.tokens)

    def add(layer: int, y) -> None:
        bridge = runner.run_a(d.x[layer], d.a[layer], stack=len(d.slices), plan=used)
        runner.run_b(bridge, d.b[layer], y, offsets=offsets, plan=used)

    return checked_us(d, add)


def checked_us(d: Dense, add) -> float:
    check_added(lambda y: add(0, y), d.want)
    return graph_us(lambda: [add(layer, d.y[layer]) for layer in d.layers]) / len(d.layers)


def works(d: Dense) -> dict[str, Work]:
    found = {
        "sglang_triton_v2_us": lambda: triton_v2(d),
        "sglang_triton_v2_default_us": lambda: triton_v2(d, default=True),
        "sglang_csgmv_us": lambda: csgmv(d, 16),
    }
    return found | ({"sglang_csgmv_128_us": lambda: csgmv(d, 128)} if d.tokens >= 64 else {})


if __name__ == "__main__":
    run(__doc__, "sglang", DENSE, Dense, works)
