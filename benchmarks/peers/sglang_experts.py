"""Time SGLang's blocks of bf16 experts and their LoRA, from the installed package (sglang==0.5.23).

    python -m benchmarks.peers.sglang_experts --out peers_moe.json [--model mixtral-8x7b] [--rank 16] [--tokens 64] ...

- sglang_base_block_us: the block without LoRA, as `--moe-runner-backend lora_triton` computes it.
- sglang_block_us: the block with LoRA, `--lora-backend triton_v2 --moe-runner-backend lora_triton`. Up to 256 tokens,
  the plan of its table runs kernels of LoRA on a second stream.
- sglang_v2_kernels_us: the kernels of LoRA in it, one after another on one stream. It is the time of the block without
  its base products and its last sum, less that of the activation alone.
- sglang_virtual_kernels_us: the kernels of `--lora-use-virtual-experts`.

The alignment of the rows, for the base and for LoRA, is made before the graph. A server refuses gpt-oss with
`lora_triton`, because its experts have biases. Its rows are its shapes with SiLU and without biases.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
from sglang.kernels.ops.activation.activation import silu_and_mul
from sglang.kernels.ops.lora.moe.virtual_experts import merged_experts_fused_moe_lora_add
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.lora.moe import runner as runners
from sglang.srt.lora.moe.base_gemm_provider.triton_bf16 import TritonBf16ContiguousProvider
from sglang.srt.lora.moe.plan import ActivationFn, DownOverlap, GateUpOverlap, resolve_plans
from sglang.srt.lora.moe.quant_info import MoeLoraBf16QuantInfo
from sglang.srt.lora.utils import Phase, architecture_for_capability
from sglang.srt.lora.workspace import LoraWorkspace
from sglang.srt.runtime_context import get_context

from benchmarks.peers.common import (
    DEVICE,
    DTYPE,
    EXPERTS,
    Experts,
    Work,
    check,
    check_added,
    graph_us,
    int32,
    random,
    run,
)  # fmt: skip

get_context().override_server_args().install()  # the defaults of a server, which the choice of tiles reads


class Provider(TritonBf16ContiguousProvider):
    """The base products of one layer. Rows are aligned once; `idle` leaves all of it out but the activation."""

    aligned, idle = None, False

    def prepare(self, hidden_states, topk_ids, top_k, workspace=None):
        if self.aligned is None:
            self.aligned = super().prepare(hidden_states, topk_ids, top_k)
        return self.aligned

    def gateup(self, row_state, out) -> None:
        if not self.idle:
            super().gateup(row_state, out)

    def down(self, row_state, act_out, out) -> None:
        if not self.idle:
            super().down(row_state, act_out, out)

    def finalize(self, *args, **kwargs) -> None:
        if not self.idle:
            super().finalize(*args, **kwargs)


class Runner(runners.MoeLoraRunner):
    """A runner whose output is of torch, without the parallel state of a server."""

    def _allocate_output(self, *, num_tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty((num_tokens, self.hidden_size), dtype=dtype, device=device)


class Blocks:
    """A chain of blocks, with the routes of each."""

    def __init__(self, d: Experts):
        self.d, self.workspace, e = d, LoraWorkspace(), d.e
        self.phase = Phase.PREFILL if d.tokens > 256 else Phase.DECODE
        self.plans = resolve_plans(
            architecture=architecture_for_capability(torch.cuda.get_device_capability()[0]), is_shared_outer=False,
            physical_rank=d.rank, activation=ActivationFn.SILU, hidden_size=e.hidden, num_local_experts=e.experts,
            quant_family="bf16",
        )  # fmt: skip
        self.providers = [Provider(self.weights(layer)) for layer in d.layers]
        names = {selected.base_gemm_rows for selected in self.plans.values()}
        sizes = {"top_k": e.top_k, "routed_scaling_factor": None, "workspace": self.workspace}
        self.runners = [Runner(providers=dict.fromkeys(names, provider), **sizes) for provider in self.providers]
        for runner in self.runners:
            runner.plans = self.plans
        self.routes = [self.route(layer) for layer in d.layers]

    def weights(self, layer: int) -> MoeLoraBf16QuantInfo:
        return MoeLoraBf16QuantInfo(
            w13_weight=self.d.w13[layer], w2_weight=self.d.w2[layer], num_local_experts=self.d.e.experts,
            intermediate_size=self.d.e.intermediate, hidden_size=self.d.e.hidden,
        )  # fmt: skip

    def route(self, layer: int):
        selected = self.plans[self.phase]
        return runners.build_moe_routes(
            selected.plan, topk_ids=self.d.expert[layer], token_lora_mapping=self.d.slot,
            num_local_experts=self.d.e.experts, max_loras=self.d.slots, workspace=LoraWorkspace(),
            block_size=selected.tiles.config_for(self.d.tokens).routing_block_size,
        )  # fmt: skip

    def lora(self, layer: int) -> torch.Tensor:
        d = self.d
        topk = StandardTopKOutput(topk_weights=d.weight[layer], topk_ids=d.expert[layer], router_logits=None)
        batch = runners.MoeLoraBatch(
            gate_up_lora_a=d.a13[layer], gate_up_lora_b=d.b13[layer], down_lora_a=d.a2[layer], down_lora_b=d.b2[layer],
            token_lora_mapping=d.slot, use_cuda_graph=True, is_prefill=self.phase is Phase.PREFILL,
        )  # fmt: skip
        given = StandardDispatchOutput(hidden_states=d.x[layer], hidden_states_scale=None, topk_output=topk)
        with mock.patch.object(runners, "build_moe_routes", return_value=self.routes[layer]):
            return self.runners[layer].run(given, batch).hidden_states

    def buffer(self, name: str, columns: int) -> torch.Tensor:
        shape = self.d.tokens * self.d.e.top_k, columns
        return self.workspace.tensor(name, shape, dtype=DTYPE, device=DEVICE)

    def activation(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, h = self.buffer("base:gateup", 2 * self.d.e.intermediate), self.buffer("act", self.d.e.intermediate)
        silu_and_mul(gate_up, h)
        return gate_up, h

    def base(self, layer: int) -> None:
        """Run the stages of the block without LoRA, with SGLang's plain activation."""
        d, provider = self.d, self.providers[layer]
        self.workspace.begin_forward(graph_mode=True, is_prefill_graph=self.phase is Phase.PREFILL)
        state = provider.prepare(d.x[layer], d.expert[layer], d.e.top_k)
        provider.gateup(state, self.buffer("base:gateup", 2 * d.e.intermediate))
        _, h = self.activation()
        down, out = provider.down_output(state, self.workspace), torch.empty_like(d.x[layer])
        provider.down(state, h, down)
        provider.finalize(state, down, d.expert[layer], d.weight[layer], None, out)

    @contextlib.contextmanager
    def lora_alone(self) -> Iterator[None]:
        """Leave the base products and the last sum out, and run all kernels on one stream."""
        selected = self.plans[self.phase]
        serial = {"gate_up_overlap": GateUpOverlap.NONE, "down_overlap": DownOverlap.NONE}
        plan = dataclasses.replace(selected, plan=dataclasses.replace(selected.plan, **serial))
        with mock.patch.object(Provider, "idle", True), mock.patch.dict(self.plans, {self.phase: plan}):
            yield

    def us(self, one) -> float:
        """Return the microseconds a layer of `one(layer)`."""
        return graph_us(lambda: [one(layer) for layer in self.d.layers], self.d.repeats) / len(self.d.layers)

    def block_us(self) -> float:
        check(self.lora(0), self.d.block())
        return self.us(self.lora)

    def kernels_us(self) -> float:
        check(self.lora(0), self.d.block())
        with self.lora_alone():
            return self.us(self.lora) - self.us(lambda _: self.activation())


def virtual_us(d: Experts) -> float:
    h, i, k = d.e.hidden, d.e.intermediate, d.e.top_k
    y13, y2 = (random(d.tokens, k, size) for size in (2 * i, h))
    enabled = int32([slot < d.adapters for slot in range(d.slots)])
    routing = [{} for _ in d.layers]  # filled by the first call, before the graph

    def add(layer: int, y, x, a, b, weighted: bool, slices: int) -> None:
        merged_experts_fused_moe_lora_add(
            output=y, hidden_states=x, lora_a=a, lora_b=b, topk_ids=d.expert[layer], topk_weights=d.weight[layer],
            token_lora_mapping=d.slot, mul_routed_weight=weighted, experts_shared_outer_loras_a=False,
            experts_shared_outer_loras_b=False, routing_cache=routing[layer], adapter_enabled=enabled,
            a_output_slices=slices,
        )  # fmt: skip

    def first(layer: int, y) -> None:
        add(layer, y.view(y13.shape), d.x[layer], d.a13[layer], d.b13[layer], False, 2)

    def second(layer: int, y) -> None:
        add(layer, y.view(y2.shape), d.h[layer], d.a2[layer], d.b2[layer], True, 1)

    check_added(lambda y: first(0, y), d.delta13(d.x[0].repeat_interleave(k, 0)))
    check_added(lambda y: second(0, y), d.delta2(d.h[0]) * d.weight[0].flatten()[:, None])
    work = [lambda layer=layer: (first(layer, y13), second(layer, y2)) for layer in d.layers]
    return graph_us(lambda: [one() for one in work], d.repeats) / len(d.layers)


def works(d: Experts) -> dict[str, Work]:
    blocks = Blocks(d)
    return {
        "sglang_base_block_us": lambda: blocks.us(blocks.base),
        "sglang_block_us": blocks.block_us,
        "sglang_v2_kernels_us": blocks.kernels_us,
        "sglang_virtual_kernels_us": lambda: virtual_us(d),
    }


if __name__ == "__main__":
    run(__doc__, "sglang", EXPERTS, Experts, works)
