"""Count the cycles of the TPU kernels without a TPU, from the bundles that libtpu schedules.

    python -m benchmarks.tpu_cycles [--chips v6e] [--cases 64/8 none] [--lines] [--out FILE]
    python -m benchmarks.tpu_cycles --measured KERNELS.json [--out FILE]

Nothing of this ran on a TPU: all times are simulated. libtpu compiles each kernel ahead of time and dumps its schedule,
and `benchmarks.bundles` counts the cycles on the path that the kernel takes with the operands of the case. These are
the values that the program itself computes before the kernel, evaluated on the CPU.

How far to trust it: large products come out at 92 to 97% of the chips' specified rates, so cycles of instructions are
right to 5%. Times of copies may be up to 25% longer, with a bandwidth below the specified one and a latency other than
600 ns. Not seen are bank conflicts of VMEM, copies that XLA runs beside the kernel, loading of instructions, the start
of a kernel (about a microsecond on a chip), and clocks below the specified ones. Figures are best compared with those
of another version of the kernels by this benchmark, and with the floor.

The columns of a case are microseconds: those of each projection, their sum for a layer, the least time by bytes
("floor"), and the base products of the same rows by bytes or operations ("base"). Bytes are those that the kernels copy
of factors, and those that the adapters in use have. The floor counts factors in use once. Above 512 rows, and for
gradients, it counts the rows that are read and written too; fewer rows are in VMEM. On a tpu7x all figures are for
one of its two cores. On a v5p one core does the work of a decode step, with the bandwidth of both.

`--lines` adds the share of cycles by source line. `--measured` takes the results of `benchmarks.kernels` on a TPU, and
counts the same rows, so that each has a measured and a simulated time. `benchmarks.tpu_step` counts what XLA does
around the kernels.

To count another checkout of jlora, run this from its root with this one in PYTHONPATH. Needs the `libtpu` wheel (group
`test`), and takes about five seconds a kernel.
"""

import argparse
import datetime
import inspect
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # libtpu is only the compiler, without a machine
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import SingleDeviceSharding

from benchmarks import bundles, moe_specs
from benchmarks.bundles import CHIPS
from benchmarks.specs import PROJECTIONS, SLOTS, Projection, group_ids
from benchmarks.timing import write_rows
from jlora import ops

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# By device_kind, as JAX gives it.
KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
KINDS |= {"TPU7x": "tpu7x"}
EXPERTS = moe_specs.MODELS["qwen3-30b-a3b"]
EXPERT_TOKENS = 64
# No size is a multiple of 128, nor the rank or the number of rows one of 8.
ODD_PROJECTIONS = {
    p.name: p
    for p in (
        Projection("qkv", 3000, (3000, 1000, 1000)),
        Projection("o", 3000, (3000,)),
        Projection("gate_up", 3000, (8200, 8200)),
        Projection("down", 8200, (3000,)),
    )
}
EXPERT_PROJECTIONS = {
    p.name: p
    for p in (
        Projection("w1+w3", EXPERTS.hidden, (EXPERTS.intermediate,) * 2),
        Projection("w2", EXPERTS.intermediate, (EXPERTS.hidden,)),
    )
}
MOST_COMPARED = 2048  # rows of `compare`; more take a minute each
FEW_ROWS = 512  # as many are in VMEM before and after a kernel


@dataclass(frozen=True)
class Case:
    """A batch of one layer.

    Attributes:
      rows, slots, rank: Static sizes.
      used: Number of adapters in use, None for as many as slots.
      targets: Slices that the adapters have, None for all.
      dtype: That of the factors.
      op: "add_lora", or the gradients of "expand" or "shrink".
      projections: Those that are counted.
      experts: Number of experts, each with factors of its own.
    """

    rows: int
    slots: int
    rank: int = 16
    used: int | None = None
    targets: tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    op: str = "add_lora"
    projections: tuple[Projection, ...] = tuple(PROJECTIONS.values())
    experts: int = 1

    @property
    def program(self) -> "Case":
        """The case without what only decides the values of operands, so that some cases share a program."""
        return replace(self, used=None, targets=None, projections=())


CASES = {
    "64/8": Case(64, 8),
    "64/64": Case(64, 64),
    "8/8": Case(8, 8),
    "64/8_of_64": Case(64, 64, used=8),  # in slots anywhere
    "one": Case(64, 8, used=1),
    "none": Case(64, 8, used=0),
    "rank_8": Case(64, 8, rank=8),
    "rank_64": Case(64, 8, rank=64),
    "prefill": Case(4096, 8),
    "int8_64/8": Case(64, 8, dtype="int8"),
    "int8_64/64": Case(64, 64, dtype="int8"),
    "q_and_v": Case(64, 8, targets=(0, 2), projections=(PROJECTIONS["qkv"],)),
    "gate": Case(64, 8, targets=(0,), projections=(PROJECTIONS["gate_up"],)),
    "odd": Case(61, 8, rank=12, projections=tuple(ODD_PROJECTIONS.values())),
    "experts": Case(
        EXPERT_TOKENS * EXPERTS.top_k, 8, experts=EXPERTS.experts, projections=tuple(EXPERT_PROJECTIONS.values())
    ),
    "expand_grads": Case(4096, 8, op="expand"),
    "shrink_grads": Case(4096, 8, op="shrink"),
}


@cache
def dumps() -> tempfile.TemporaryDirectory:
    """Make libtpu dump the bundles of each program into the folder that is returned.

    To be called before JAX runs anything: libtpu reads its flags once, and the rest runs on the CPU.
    """
    folder = tempfile.TemporaryDirectory()
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder.name} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra "
        # The source lines of kernels in the dump. They do not change the schedule.
        "--xla_mosaic_enable_llo_source_annotations=true --xla_jf_collect_llo_stack_trace=true"
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a program that was kept is not dumped again
    return folder


def sharding(chip: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu").devices[0])


@cache
def compiled(chip: str, case: Case, projection: Projection) -> list[bundles.Program]:
    """Compile a case's kernels for a chip, and return them in the order of their names."""
    folder = Path(dumps().name)
    run, arguments = function(case, projection)
    place = sharding(chip)
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place), arguments)
    jax.jit(run).lower(*shapes).compile()
    found = {}
    for path in folder.iterdir():
        name = re.fullmatch(r"\d+-(\w*jlora\w*)(?:\.(\d+))?-\d+-packed-bundles-post-ra.txt", path.name)
        if name is not None:
            found[name[1], int(name[2] or 0)] = bundles.parse(path.read_text())
        path.unlink()
    return [found[name] for name in sorted(found)]


def groups(case: Case) -> np.ndarray:
    """Return the group of each row, and -1 for none."""
    if case.experts > 1:
        batch = moe_specs.batch(EXPERTS, EXPERT_TOKENS, case.slots)
        token, expert = routing()
        return batch.slot[token] * case.experts + expert
    used = min(case.rows, case.slots if case.used is None else case.used)
    return group_ids(case.rows, used, case.slots) if used else np.full(case.rows, -1, np.int32)


def routing() -> tuple[np.ndarray, np.ndarray]:
    """Return the token and the expert of each row, sorted by expert."""
    expert = moe_specs.batch(EXPERTS, EXPERT_TOKENS, 8).expert.ravel()
    order = np.argsort(expert, kind="stable").astype(np.int32)
    return order // EXPERTS.top_k, expert[order]


def function(case: Case, projection: Projection) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that calls a case's kernels, and its arguments: those that decide the schedule, and shapes.

    Rows are doubled before and after the kernels, as other layers' products would precede and follow.
    """
    g, n, r = case.slots * case.experts, len(projection.slices), case.rank
    x, base = (jax.ShapeDtypeStruct((case.rows, size), jnp.bfloat16) for size in (projection.k, projection.n))
    a = jax.ShapeDtypeStruct((g, n, r, projection.k), case.dtype)
    b = jax.ShapeDtypeStruct((g, r, projection.n), case.dtype)
    h = jax.ShapeDtypeStruct((n, case.rows, r), jnp.float32)
    ranks = np.ones((g, n, 1 + (r if case.dtype == "int8" else 1)), np.float32)
    ranks[..., 0] = r * np.isin(np.arange(n), range(n) if case.targets is None else case.targets)
    if case.experts > 1:
        slot = moe_specs.batch(EXPERTS, EXPERT_TOKENS, case.slots).slot.astype(np.int32)
        arrays = map(jnp.asarray, (slot, *routing()))
        plan = ops.plan_experts(*arrays, num_slots=case.slots, num_experts=case.experts, backend="mosaic_tpu")
    else:
        plan = ops.make_plan(jnp.asarray(groups(case)), num_groups=g, backend="mosaic_tpu")
    options: dict[str, Any] = {"backend": "mosaic_tpu"}
    sizes = {"slice_sizes": projection.slices}
    # Loads refuse factors that are not finite, and say so to the kernels; older checkouts have no such argument.
    finite = {"finite": True} if "finite" in inspect.signature(ops.add_lora).parameters else {}

    def add_lora(base, x, a, b, plan, ranks):
        return 2 * ops.add_lora(2 * base, 2 * x, a, b, plan, ranks=ranks, **options, **sizes, **finite)

    def expand(h, b, dout, plan, ranks):
        return jax.vjp(partial(ops.expand, plan=plan, ranks=ranks, **options, **sizes), h, b)[1](2 * dout)

    def shrink(x, a, dh, plan, ranks):
        return jax.vjp(partial(ops.shrink, plan=plan, ranks=ranks, **options), 2 * x, a)[1](dh)

    arrays = {"add_lora": (base, x, a, b), "expand": (h, b, base), "shrink": (x, a, h)}
    return {"add_lora": add_lora, "expand": expand, "shrink": shrink}[case.op], (*arrays[case.op], plan, ranks)


def calls(closed: ClosedJaxpr, values: Sequence[Any]) -> tuple[list[tuple[Any, list[Any]]], list[Any]]:
    """Evaluate a function as far as it does not depend on unknown values, which are None.

    Returns:
      The shapes and the values of the operands of each `pallas_call`, and the results of the function.
    """
    jaxpr, found = closed.jaxpr, []
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *values], strict=True))
    for equation in jaxpr.eqns:
        given = [one.val if isinstance(one, Literal) else known[one] for one in equation.invars]
        name, parameters = equation.primitive.name, equation.params
        results = [None] * len(equation.outvars)
        if name == "pallas_call":
            found.append(([one.aval.shape for one in equation.invars], given))
        elif name in ("jit", "pjit", "custom_vjp_call"):
            inner, results = calls(parameters["call_jaxpr" if name == "custom_vjp_call" else "jaxpr"], given)
            found += inner
        elif all(value is not None for value in given):
            results = equation.primitive.bind(*given, **parameters)
            results = results if equation.primitive.multiple_results else [results]
        known.update(zip(equation.outvars, results, strict=True))
    return found, [one.val if isinstance(one, Literal) else known[one] for one in jaxpr.outvars]


def operands(case: Case, projection: Projection) -> list[tuple[Any, list[Any]]]:
    """Return the shapes and the values of the operands of a case's kernels, None for factors and rows."""
    run, arguments = function(case, projection)
    leaves, tree = jax.tree.flatten(arguments)
    given = [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    shapes = []

    def evaluate(given):
        closed = jax.make_jaxpr(lambda *leaves: run(*jax.tree.unflatten(tree, leaves)))(*leaves)
        found, _ = calls(closed, given)
        shapes.extend(shape for shape, _ in found)
        return [values for _, values in found]

    return list(zip(shapes, jax.jit(evaluate)(given), strict=True))


def counted(chip: str, case: Case, projection: Projection) -> list[tuple[bundles.Program, bundles.Count]]:
    """Compile the kernels of a case, and count their cycles with its operands."""
    remaining, found = operands(case, projection), []
    for program in compiled(chip, case.program, projection):  # XLA leaves out kernels whose results are not used
        call = next(one for one in remaining if one[0] == [program.operands[i].shape for i in range(len(one[0]))])
        remaining.remove(call)
        values = [None if value is None else np.asarray(value) for value in call[1]]
        found.append((program, bundles.count(program, CHIPS[chip], values)))
    if not found:
        raise ValueError(f"the program for {chip} has no kernel of jlora: {case}")
    return found


def factor_bytes(case: Case, projection: Projection) -> int:
    """Return the bytes of the factors of adapters in use."""
    group = groups(case)
    used = len(np.unique(group[group >= 0]))
    targets = range(len(projection.slices)) if case.targets is None else case.targets
    columns = sum(projection.k + projection.slices[i] for i in targets)
    return used * case.rank * columns * jnp.dtype(case.dtype).itemsize


def floor_bytes(case: Case, projection: Projection) -> int:
    """Return the bytes that no kernel can avoid: factors in use, and rows that are not in VMEM."""
    m, r, n, k = case.rows, case.rank, len(projection.slices), projection.k
    factors = factor_bytes(case, projection)
    if case.op == "add_lora":
        return factors + 2 * m * (k + 2 * projection.n) * (m > FEW_ROWS)
    # One factor is read, and its gradient is written for all slots. h and dh are float32.
    size = r * projection.n if case.op == "expand" else n * r * k
    rows = 2 * 4 * n * m * r + 2 * m * projection.n if case.op == "expand" else 4 * n * m * r + 2 * 2 * m * k
    return 2 * size * (len(np.unique(groups(case))) + case.slots) + rows


def base_us(chip: str, case: Case, projection: Projection) -> float:
    """Return the least time of the base product, with the weights of the experts that are used."""
    weights = projection.k * projection.n
    experts = len(np.unique(routing()[1])) if case.experts > 1 else 1
    seconds = max(2 * experts * weights / CHIPS[chip].bandwidth, 2 * case.rows * weights / CHIPS[chip].flops)
    return 1e6 * seconds


def measure(chip: str, name: str, lines: bool) -> dict[str, Any]:
    """Count a case, and return a row of the table."""
    case, rates = CASES[name], CHIPS[chip]
    row: dict[str, Any] = {"chip": chip, "case": name, "us": {}, "wait_us": {}, "bytes": 0}
    copied = 0
    for projection in case.projections:
        found = counted(chip, case, projection)
        cycles = sum(count.cycles for _, count in found)
        row["us"][projection.name] = round(cycles / rates.clock * 1e6, 3)
        waits = sum(sum(count.waits.values()) for _, count in found)
        row["wait_us"][projection.name] = round(waits / rates.clock * 1e6, 3)
        for program, count in found:
            row["bytes"] += sum(count.copied.values())
            copied += sum(moved for i, moved in count.copied.items() if len(program.operands[i].shape) > 2)
        if lines:
            shares = sum((bundles.cycles_of_lines(*one) for one in found), Counter())
            row.setdefault("shares", {})[projection.name] = {
                line: round(share / cycles, 4) for line, share in shares.most_common(20)
            }
    row["layer_us"] = round(sum(row["us"].values()), 3)
    row["floor_us"] = round(sum(floor_bytes(case, one) for one in case.projections) / rates.bandwidth * 1e6, 3)
    row["base_us"] = round(sum(base_us(chip, case, one) for one in case.projections), 3)
    if case.op == "add_lora":
        row["factor_bytes_copied"] = copied
        row["factor_bytes_in_use"] = sum(factor_bytes(case, one) for one in case.projections)
    return row


def line_of(row: dict[str, Any]) -> str:
    """Return a row as text."""
    numbers = [f"{row[name]:9.2f}" for name in ("layer_us", "floor_us", "base_us")]
    sizes = ("bytes", "factor_bytes_copied", "factor_bytes_in_use")
    numbers += [f"{row[name] / 1e6:9.2f}" if name in row else " " * 9 for name in sizes]
    times = "  ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
    return f"{row['chip']:6}{row['case']:13}{''.join(numbers)}   {times}"


def compare(kernels: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Count the rows of a result of `benchmarks.kernels`, and yield measured and simulated microseconds of each."""
    chip = KINDS[kernels["device"]]
    for row in kernels["rows"]:
        if row["mix"] == "distinct" and row["tokens"] <= MOST_COMPARED:
            projection = PROJECTIONS[row["projection"]]
            case = Case(row["tokens"], SLOTS, row["rank"], used=row["adapters"])
            cycles = sum(count.cycles for _, count in counted(chip, case, projection))
            kept = {name: row[name] for name in ("projection", "rank", "tokens", "adapters")}
            times = {"measured_us": row["wall_us"], "simulated_us": cycles / CHIPS[chip].clock * 1e6}
            floor = floor_bytes(case, projection) / CHIPS[chip].bandwidth * 1e6
            found = {"chip": chip, **kept, **times, "floor_us": floor}
            print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
            yield found


def about() -> dict[str, str]:
    versions = {name: version(name) for name in ("libtpu", "jax", "jaxlib")}
    return {"simulated": "by benchmarks.tpu_cycles, on no TPU", **versions, "date": datetime.date.today().isoformat()}


def table(chips: Sequence[str], names: Sequence[str], lines: bool) -> Iterator[dict[str, Any]]:
    """Print the table of cases, and yield its rows."""
    columns = ("layer us", "floor us", "base us", "MB", "factors", "in use")
    print(f"{'chip':6}{'case':13}" + "".join(f"{column:>9}" for column in columns) + "   us of each projection")
    for chip in chips:
        for name in names:
            row = measure(chip, name, lines)
            print(line_of(row), flush=True)
            for projection, shares in row.get("shares", {}).items():
                for line, share in shares.items():
                    print(f"    {projection:8}{share:7.1%}  {line}")
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--lines", action="store_true", help="shares of the cycles by source line")
    parser.add_argument("--measured", type=Path, help="results of benchmarks.kernels on a TPU, whose rows are counted")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    dumps()
    if args.measured is None:
        found = table(args.chips, args.cases, args.lines)
    else:
        measured = json.loads(args.measured.read_text())
        if measured["device"] not in KINDS:
            parser.error(f"{args.measured} is of {measured['device']!r}, expected one of {', '.join(KINDS)}")
        found = compare(measured)
    for row in found:
        rows.append(row)
        if args.out is not None:
            write_rows(args.out, about(), rows)


if __name__ == "__main__":
    main()
