"""Shared by the scripts beside it: rows and their file, inputs, a reference in float32, and times of CUDA graphs.

Needs PyTorch and NumPy, and neither JAX nor jlora.
"""

import argparse
import datetime
import importlib.metadata
import json
import statistics
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import moe_specs, roofline, specs

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
TOLERANCE = 2e-2  # largest error of a row of the output, relative to its norm
DENSE_SLOTS = 32
LAYER_BYTES = 600e6  # bytes of factors of a chain of layers of one projection, several times the L2 cache
PROJECTIONS = specs.PROJECTIONS | specs.OTHER_PROJECTIONS
MODELS = moe_specs.MODELS | moe_specs.OTHER_MODELS
HERE = Path(__file__).parent


class Table(NamedTuple):
    """A file of rows: its columns that name a row, the figures of all scripts, and the column of the best of some."""

    file: Path
    key: tuple[str, ...]
    figures: tuple[str, ...]
    best: str
    compared: tuple[str, ...]  # figures of which `best` is the smallest


_DENSE = (
    "vllm_default_us", "vllm_tuned_us", "sglang_triton_v2_us", "sglang_triton_v2_default_us", "sglang_csgmv_us",
    "sglang_csgmv_128_us",
)  # fmt: skip
_KERNELS = ("sglang_v2_kernels_us", "sglang_virtual_kernels_us", "vllm_default_us", "vllm_tuned_us")
DENSE = Table(
    HERE.parent / "peers_h200.json", ("projection", "rank", "tokens", "adapters"), _DENSE, "best_peer_us", _DENSE
)
EXPERTS = Table(
    HERE.parent / "peers_moe_h200.json", ("model", "rank", "tokens", "adapters"),
    ("sglang_base_block_us", "sglang_block_us", *_KERNELS), "best_kernels_us", _KERNELS,
)  # fmt: skip
Work = Callable[[], float]  # checks a result, and returns microseconds a layer


def arguments(doc: str, table: Table, argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON, also of other scripts: they add to its rows")
    for name in table.key:
        parser.add_argument(f"--{name}", nargs="+", type=str if name == table.key[0] else int)
    return parser.parse_args(argv)


def chosen(args: argparse.Namespace, table: Table) -> tuple[list[dict], list[dict]]:
    """Return all rows of --out, or those of the table without figures, and the rows of them that are to be timed."""
    found = {tuple(row[k] for k in table.key): row for row in _read(args.out)}
    rows = []
    for row in _read(table.file):
        key = {name: row[name] for name in table.key}
        rows.append(found.get(tuple(key.values())) or key | dict.fromkeys(("floor_us", *table.figures, table.best)))
    return rows, [row for row in rows if all(row[k] in (getattr(args, k) or [row[k]]) for k in table.key)]


def _read(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def run(
    doc: str, package: str, table: Table, inputs: "type[Dense | Experts]", works: Callable[[Any], dict[str, Work]]
) -> None:
    """Time the rows that the command line names, and write --out after each.

    `works(inputs(row))` returns the figures of a script, each with a function that measures it. One that fails is
    printed, and its figure stays null. A figure that --out has already is kept, so a run that ended early can go on.
    """
    args = arguments(doc, table)
    rows, todo = chosen(args, table)
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())  # for all work, as some packages keep memory by stream
    kind = torch.cuda.get_device_name()
    for row in todo:
        made = inputs(row)
        floor = made.floor_us(kind)
        row["floor_us"] = None if floor is None else round(floor, 2)
        for name, work in works(made).items():
            if row[name] is not None:
                continue
            try:
                row[name] = round(work(), 2)
            except Exception as error:
                print(f"{[row[k] for k in table.key]} {name}: {type(error).__name__}: {error}", flush=True)
                torch.cuda.synchronize()  # ends the process if the context is lost; the next run goes on here
        row[table.best] = min((row[f] for f in table.compared if row[f] is not None), default=None)
        print(json.dumps(row), flush=True)
        write(args.out, package, kind, rows)
        del made, work
        torch.cuda.empty_cache()


def write(path: Path, package: str, kind: str, rows: Iterable[dict]) -> None:
    about = json.loads(path.read_text())["about"] if path.exists() else f"One {kind}, bfloat16, microseconds a layer."
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in (package, "torch", "triton"))
    if versions not in about:
        about += f" {versions}, {datetime.date.today().isoformat()}."
    lines = ",\n".join(map(json.dumps, rows))
    path.write_text(f'{{\n"about": {json.dumps(about)},\n"rows": [\n{lines}\n]\n}}\n')


def graph_us(work: Callable[[], Any], repeats: int = 20) -> float:
    """Return the median microseconds of the replays of a CUDA graph of `work`, one at a time."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        work()
    times = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE).mul_(scale)


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def slot_of(tokens: int, adapters: int) -> torch.Tensor:
    """Return the int32 [tokens] slot of each token: interleaved up to 256 tokens (decode), else in runs (prefill)."""
    token = torch.arange(tokens)
    return int32(token % adapters if tokens <= 256 else token * adapters // tokens)


def delta(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return the float32 [rows, N] products x A[g]ᵀ B[g]ᵀ of rows x [rows, K], a [G, R, K] and b [G, N, R]."""
    out = torch.zeros(len(x), b.shape[1], device=x.device)
    for g in group.unique().tolist():
        rows = (group == g).nonzero().flatten()
        out[rows] = x[rows].float() @ a[g].float().T @ b[g].float().T
    return out


def product(x: torch.Tensor, w: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    """Return the float32 [rows, N] products of rows x [rows, K] with their experts' w [E, N, K]."""
    out = torch.zeros(len(x), w.shape[1], device=x.device)
    for e in expert.unique().tolist():
        rows = (expert == e).nonzero().flatten()
        out[rows] = x[rows].float() @ w[e].float().T
    return out


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise unless each row of `got` is that of `want`, to `TOLERANCE` of its norm."""
    error = ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
    if not error < TOLERANCE:
        raise AssertionError(f"relative error of a row: {error:.2e}")


def check_added(add: Callable[[torch.Tensor], Any], want: torch.Tensor) -> None:
    """Raise unless `add(y)` adds `want` to y: twice, from zeros."""
    y = torch.zeros(want.shape, dtype=DTYPE, device=want.device)
    add(y)
    check(y, want)
    add(y)
    check(y, 2 * want)


class Dense:
    """A projection in `layers` layers. a[l] is [slots, n * R, K], b[l] [slots, N, R], of n slices and N columns."""

    def __init__(self, row: dict):
        self.projection, self.rank = PROJECTIONS[row["projection"]], row["rank"]
        self.tokens, self.adapters = row["tokens"], row["adapters"]
        self.k, self.n, self.slices = self.projection.k, self.projection.n, self.projection.slices
        a, b = (DENSE_SLOTS, len(self.slices) * self.rank, self.k), (DENSE_SLOTS, self.n, self.rank)
        per_layer = 2 * DENSE_SLOTS * self.rank * (len(self.slices) * self.k + self.n)
        self.layers = range(max(2, min(12, int(LAYER_BYTES / per_layer) + 1)))
        self.a, self.b = ([random(*shape, scale=0.02) for _ in self.layers] for shape in (a, b))
        self.x, self.y = ([random(self.tokens, size) for _ in self.layers] for size in (self.k, self.n))
        self.slot = slot_of(self.tokens, self.adapters)

    def floor_us(self, kind: str) -> float | None:
        return roofline.floor_us(self.projection, self.rank, self.tokens, self.adapters, kind=kind)

    def offsets(self) -> list[int]:
        return [0, *torch.tensor(self.slices).cumsum(0).tolist()]

    @cached_property
    def want(self) -> torch.Tensor:
        """The float32 [tokens, N] delta of the first layer."""
        pairs = zip(self.a[0].split(self.rank, 1), self.b[0].split(self.slices, 1), strict=True)
        return torch.cat([delta(self.x[0], a, b, self.slot) for a, b in pairs], 1)


class Experts:
    """A block of experts in `layers` layers, with the routing of each, and LoRA on both products.

    w13[l] is [E, 2 I, H], w2[l] [E, H, I], a13[l] [slots, E, 2 R, H], b13[l] [slots, E, 2 I, R], a2[l] [slots, E, R, I]
    and b2[l] [slots, E, H, R]. expert[l] and weight[l] are [tokens, top_k].
    """

    def __init__(self, row: dict):
        self.e, self.rank, self.tokens = MODELS[row["model"]], row["rank"], row["tokens"]
        self.adapters, self.slots = row["adapters"], moe_specs.slots(row["adapters"])
        self.layers = range(2 if self.tokens >= 2048 else 4)
        self.repeats = 8 if self.tokens >= 2048 else 20
        h, i, e, r = self.e.hidden, self.e.intermediate, self.e.experts, self.rank

        def each(*shape: int, scale: float) -> list[torch.Tensor]:
            return [random(*shape, scale=scale) for _ in self.layers]

        self.w13, self.w2 = each(e, 2 * i, h, scale=0.02), each(e, h, i, scale=0.02)
        self.a13, self.b13 = each(self.slots, e, 2 * r, h, scale=0.02), each(self.slots, e, 2 * i, r, scale=0.2)
        self.a2, self.b2 = each(self.slots, e, r, i, scale=0.02), each(self.slots, e, h, r, scale=0.2)
        self.x, self.h = each(self.tokens, h, scale=1), each(self.tokens * self.e.top_k, i, scale=1)
        self.slot = slot_of(self.tokens, self.adapters)
        self.expert = [int32(torch.rand(self.tokens, e).topk(self.e.top_k).indices) for _ in self.layers]
        self.weight = [(w / w.sum(1, keepdim=True)).to(DEVICE) for w in (self.random_weights() for _ in self.layers)]

    def random_weights(self) -> torch.Tensor:
        return torch.rand(self.tokens, self.e.top_k) + 0.1

    def pairs(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert of each (token, choice), and its slot and expert as one number."""
        expert = self.expert[layer].flatten().long()
        return expert, self.slot.long().repeat_interleave(self.e.top_k) * self.e.experts + expert

    def floor_us(self, kind: str) -> float | None:
        present = len(self.pairs(0)[1].unique())
        return moe_specs.floor_us(self.e, self.rank, self.tokens, present, kind=kind)

    def delta13(self, x: torch.Tensor) -> torch.Tensor:
        """Return the float32 delta [pairs, 2 I] of gate and up in the first layer, of x [pairs, H]."""
        i, a, b = self.e.intermediate, self.a13[0].flatten(0, 1), self.b13[0].flatten(0, 1)
        halves = zip(a.split(self.rank, 1), b.split(i, 1), strict=True)
        return torch.cat([delta(x, *half, self.pairs(0)[1]) for half in halves], 1)

    def delta2(self, h: torch.Tensor) -> torch.Tensor:
        """Return the float32 delta [pairs, H] of down in the first layer, of h [pairs, I], without router weights."""
        return delta(h, self.a2[0].flatten(0, 1), self.b2[0].flatten(0, 1), self.pairs(0)[1])

    def block(self) -> torch.Tensor:
        """Return the float32 [tokens, H] of the first layer's block with LoRA and SiLU."""
        x, (expert, _) = self.x[0].repeat_interleave(self.e.top_k, 0), self.pairs(0)
        gate, up = (product(x, self.w13[0], expert) + self.delta13(x)).chunk(2, 1)
        h = torch.nn.functional.silu(gate) * up
        down = product(h, self.w2[0], expert) + self.delta2(h)
        return (down * self.weight[0].flatten()[:, None]).view(self.tokens, self.e.top_k, -1).sum(1)
