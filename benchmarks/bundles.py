"""Count the cycles of a TPU program from libtpu's dump of its scheduled bundles.

A core issues one bundle of instructions a cycle, in the order of the compiler's schedule. Latencies of vector, matrix
and scalar instructions are empty bundles of that schedule. The cycles of a program are therefore the bundles on its
path and the cycles in which it waits for copies. `count` executes the scalar instructions, since they decide the path:
arithmetic, predicates, branches, SMEM, and copies with their semaphores. Values that the vector unit hands to the
scalar unit are taken as 0.

Copies from and to HBM pass one after the other at the full bandwidth, and each arrives `LATENCY` later.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Chip(NamedTuple):
    """Rates of a chip as specified; of a tpu7x one of its two cores.

    Attributes:
      clock: Cycles/s, from `flops` and the number and size of the matrix units.
      bandwidth: Bytes/s of HBM.
      flops: bfloat16 FLOP/s.
      branch_slots: Bundles that are still issued after a branch.
    """

    clock: float
    bandwidth: float
    flops: float
    branch_slots: int = 4


CHIPS = {
    "v5e": Chip(1.5e9, 819e9, 197e12),
    "v5p": Chip(1.75e9, 2765e9, 459e12),
    "v6e": Chip(1.75e9, 1640e9, 918e12),
    "tpu7x": Chip(2.2e9, 3690e9, 1153.5e12, branch_slots=6),
}
LATENCY = 600e-9  # seconds from the end of a copy's turn to the semaphore
_ON_CHIP_CYCLES = 50  # of a copy between VMEM and SMEM
_GRANULE = 32  # bytes
# Pointers are integers past 32 bits. That of operand i is an odd multiple of 2 ** 100, so that i is found in a pointer
# that was shifted to other units.
_OPERAND, _ALLOCATION = 100, 70

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)?:\s*(?:>\s*)*\{", re.M)
_SOURCE = re.compile(r'loc\("[^"]*/(jlora/[^"]*)":(\d+)')
_INPUT = re.compile(r"inlined_call_operand\.([\w<> ]+?) \[shape: (\w+)\[([\d,]*)\][^\]]*index: (\d+)")
_OPERANDS = re.compile(r"\[smem:\[[^\]]*\]\]|\[[^\]]*\]|[^\s,]+")
_PREDICATE = re.compile(r"\((!?)%(\w+)(?:, [^()]*)?\)")
_IGNORED = ("sphi", "vsync", "sfence")


class Instruction(NamedTuple):
    """A scalar instruction.

    Attributes:
      op, result: Its name, and the register that it writes.
      operands: Each the sum of a constant and of registers.
      predicate: The register on which it depends, and the value of that register with which it is executed.
      target: Address to which a branch jumps, or number of the program's operand that is read.
    """

    op: str
    result: str
    operands: tuple[tuple[float, tuple[str, ...]], ...]
    predicate: tuple[str, bool] | None
    target: int | None


class Operand(NamedTuple):
    """An operand or result of a program: memory space, dtype, and shape."""

    space: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A parsed dump.

    Attributes:
      operands: Operands and results by number.
      bundles: Scalar instructions of each bundle.
      lines: Source lines of all instructions of each bundle, as "jlora/...py:12".
    """

    operands: dict[int, Operand]
    bundles: list[list[Instruction]]
    lines: list[list[str]]


@dataclass
class Count:
    """Cycles of one execution.

    Attributes:
      cycles: All cycles, with those of `waits`.
      waits: Cycles in which the bundle of an address waited for copies.
      visits: How often the bundle of each address was issued.
      copied: Bytes that were copied between HBM and each operand.
    """

    cycles: float = 0
    waits: Counter[int] = field(default_factory=Counter)
    visits: Counter[int] = field(default_factory=Counter)
    copied: Counter[int] = field(default_factory=Counter)


def parse(text: str) -> Program:
    """Parse the text of a dump after the pass "packed-bundles-post-ra"."""
    marks = list(_BUNDLE.finditer(text))
    size = int(marks[-1][1], 16) + 1
    bundles: list[list[Instruction]] = [[] for _ in range(size)]
    lines: list[list[str]] = [[] for _ in range(size)]
    allocations: dict[str, int] = {}
    for mark, end in zip(marks, [*(mark.start() for mark in marks[1:]), len(text)], strict=True):
        address, body = int(mark[1], 16), text[mark.end() : end]
        lines[address] = [f"{path}:{line}" for path, line in _SOURCE.findall(body)]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S).rpartition("}")[0]
        found = (_instruction(one.strip(), allocations) for one in re.split(r"\s;;\s", body))
        bundles[address] = [one for one in found if one is not None]
    inputs = {
        int(index): Operand(space, dtype, tuple(map(int, filter(None, dims.split(",")))))
        for space, dtype, dims, index in _INPUT.findall(text)
    }
    return Program(inputs, bundles, lines)


def _instruction(text: str, allocations: dict[str, int]) -> Instruction | None:
    """Return a scalar instruction, or None for the others."""
    named = re.match(r"%(\w+) = ([\w.]+)(.*)", text, re.S)
    if named is None:
        return None
    result, op, rest = named.groups()
    scalar = result[0] in "sp" or op.startswith(("dma.", "sst", "sbr"))
    if not scalar or op.startswith(_IGNORED):
        return None
    if op.startswith("inlined_call_operand"):
        return Instruction("operand", _register(result), (), None, int(re.search(r"index: (\d+)", rest)[1]))  # type: ignore[index]
    if op == "sbr.rel":
        target = int(re.search(r"target bundleno = (\d+)", rest)[1])  # type: ignore[index]
        rest = rest[: rest.index("target")]
    else:
        target = None
    rest = re.sub(r"\[(thread|resolvable):[^\]]*\]", "", rest)
    predicate = _PREDICATE.search(rest)
    if predicate is not None:  # (%p, %old): without execution the result keeps %old, which has the same register
        rest = rest[: predicate.start()] + rest[predicate.end() :]
    operands = tuple(_operand(one, allocations) for one in _OPERANDS.findall(rest))
    condition = None if predicate is None else (_register(predicate[2]), not predicate[1])
    return Instruction(op, _register(result), operands, condition, target)


def _operand(text: str, allocations: dict[str, int]) -> tuple[float, tuple[str, ...]]:
    """Parse a register, a number, or an address such as [smem:[#allocation8 + %s1_s2]]."""
    constant, registers = 0.0 if "." in text else 0, []
    for part in re.sub(r"\[(smem:)?|\]", " ", text).split("+"):
        part = part.strip().lstrip("$")
        if part.startswith("%"):
            registers.append(_register(part[1:]))
        elif part.startswith("#"):
            constant += allocations.setdefault(part, (len(allocations) + 1) << _ALLOCATION)
        elif re.fullmatch(r"-?(\d+|0x[0-9a-f]+)", part):
            value = int(part, 0)
            constant += value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value
        else:
            constant += float(part)
    return constant, tuple(registers)


def _register(name: str) -> str:
    return name.rpartition("_")[2]


def _unsigned(value):
    return value + (1 << 32) if value < 0 else value


def _operand_at(pointer: int) -> int | None:
    """Return the operand to which a pointer in any unit refers."""
    number = pointer >> _OPERAND
    while number and number % 2 == 0:
        number >>= 1
    return number // 2 if number else None


# By the name up to the first dot.
_COMPUTE: dict[str, Callable] = {
    "sadd": lambda x, y: x + y,
    "scalar_lea": lambda x, y, *allocation: x + y,  # a third operand only names the allocation that has the address
    "ssub": lambda x, y: x - y,
    "smul": lambda x, y: x * y,
    "sshll": lambda x, y: x << y,
    "sshra": lambda x, y: x >> y,
    "sshrl": lambda x, y: _unsigned(x) >> y,
    "sand": lambda x, y: x & y,
    "sor": lambda x, y: x | y,
    "sxor": lambda x, y: x ^ y,
    "smin": min,
    "smax": max,
    "smov": lambda x: x,
    "pmov": lambda x: x,
    "pneg": lambda x: not x,
    "pand": lambda x, y: x and y,
    "por": lambda x, y: x or y,
    "pxor": lambda x, y: bool(x) != bool(y),
    "pnand": lambda x, y: not (x and y),
    "scalar_select": lambda x, y, z: y if x else z,
    "sfloor": np.floor,
    "sceil": np.ceil,
    "spop": lambda *_: 0,
    "vpop": lambda *_: 0,
}
_COMPARE: dict[str, Callable] = {
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}


def compute(op: str, values: list):
    """Return the result of a scalar instruction.

    Raises:
      NotImplementedError: The instruction is unknown.
    """
    name, *kinds = op.split(".")
    if "u32" in kinds and name in ("smin", "smax", "scmp"):
        values = [_unsigned(value) for value in values]
    if name == "scmp":
        return _COMPARE[kinds[0]](*values)
    if name == "scvt":
        return int(values[0]) if kinds[-1] == "s32" else float(values[0])
    if name not in _COMPUTE:
        raise NotImplementedError(f"unknown scalar instruction {op}: add it to benchmarks/bundles.py")
    return _COMPUTE[name](*values)


def count(program: Program, chip: Chip, values: Sequence[np.ndarray | None]) -> Count:
    """Execute a program and return its cycles.

    Args:
      program: The program.
      chip: Where it runs.
      values: Of the operands. Only those of scalars and of arrays that are copied to SMEM are read, others may be None.

    Raises:
      NotImplementedError: An instruction is unknown.
      ValueError: A wait has no copy or a copy no wait, the program does not end, or it reads an operand that is None.
    """
    core = _Core(program, chip, values)
    address, branch = 0, None  # the bundles up to a jump, and its target
    while address < len(program.bundles):
        core.found.visits[address] += 1
        target = core.issue(address)
        core.now += 1
        if core.now > 1e8:
            raise ValueError(f"the program is still at bundle {address} after 1e8 cycles")
        address += 1
        if branch is not None:
            branch = branch[0] - 1, branch[1]
            if branch[0] == 0:
                address, branch = branch[1], None
        elif target is not None:
            branch = chip.branch_slots, target
    if left := sum(granules for queue in core.semaphores.values() for granules, _ in queue):
        raise ValueError(f"no wait takes the last {left} granules that were copied")
    core.found.cycles = core.now
    return core.found


class _Core:
    """The state of the scalar unit and of the copies in flight."""

    def __init__(self, program: Program, chip: Chip, values: Sequence[np.ndarray | None]):
        self.program, self.chip, self.values = program, chip, values
        self.registers: dict[str, float] = {}
        self.memory: dict[float, float] = {}  # SMEM, by address in words
        self.semaphores: dict[float, deque[list[float]]] = defaultdict(deque)  # granules, and when they arrive
        self.now, self.hbm_free = 0.0, 0.0  # cycles
        self.found = Count()

    def value(self, operand: tuple[float, tuple[str, ...]]):
        constant, registers = operand
        for name in registers:
            constant += self.registers.get(name, 0)
        return constant

    def issue(self, address: int) -> int | None:
        """Execute a bundle, and return the target of a branch that it takes. Its reads precede its writes."""
        target, written, casts = None, [], []
        for one in self.program.bundles[address]:
            if one.predicate is not None and bool(self.registers.get(one.predicate[0], 0)) != one.predicate[1]:
                continue
            if one.op == "sbr.rel":
                target = one.target
            elif one.op == "operand":
                written.append((one.result, self.argument(one.target)))
            elif one.op.startswith("int_to_ptr"):  # of a value that the same bundle may write
                casts.append(one)
            elif one.op == "sst":
                place, value = map(self.value, one.operands)
                self.memory[place] = value
            elif one.op == "sld":
                written.append((one.result, self.memory.get(self.value(one.operands[0]), 0)))
            elif one.op == "dma.done.wait":
                self.wait(address, *map(self.value, one.operands))
            elif one.op.startswith("dma."):
                self.copy(one.op, *map(self.value, one.operands[:4]))
            else:
                written.append((one.result, compute(one.op, [self.value(each) for each in one.operands])))
        self.registers.update(written)
        self.registers.update((one.result, self.value(one.operands[0])) for one in casts)
        return target

    def read(self, index) -> list:
        if (value := self.values[index]) is None:
            raise ValueError(f"the path depends on operand {index}, {self.program.operands[index]}, which has no value")
        return value.ravel().tolist()

    def argument(self, index):
        """Return the value of a scalar operand, or a pointer to another one."""
        if self.program.operands[index].space == "<no memory space>":
            return self.read(index)[0]
        pointer = (2 * index + 1) << _OPERAND
        if self.program.operands[index].space == "smem":
            self.memory.update({pointer + i: value for i, value in enumerate(self.read(index))})
        return pointer

    def copy(self, op: str, source, granules, target, semaphore) -> None:
        """Start a copy: granules of 32 bytes between HBM and VMEM, or an operand to SMEM."""
        if op.endswith("_to_smem"):
            self.memory.update({target + i: value for i, value in enumerate(self.read(_operand_at(source)))})
        arrival = self.now + _ON_CHIP_CYCLES
        if "hbm" in op or op == "dma.general":
            moved = granules * _GRANULE
            ends = {_operand_at(end) for end in (source, target)} - {None}
            self.found.copied.update({i: moved for i in ends if self.program.operands[i].space == "hbm"})
            self.hbm_free = max(self.hbm_free, self.now) + moved / self.chip.bandwidth * self.chip.clock
            arrival = self.hbm_free + LATENCY * self.chip.clock
        self.semaphores[semaphore].append([granules, arrival])

    def wait(self, address: int, semaphore, granules) -> None:
        """Wait until so many granules have arrived at a semaphore, in the order of their copies."""
        queue, until = self.semaphores[semaphore], self.now
        while granules > 0:
            if not queue:
                raise ValueError(f"bundle {address} waits for {granules} granules that no copy sends")
            taken = min(granules, queue[0][0])
            granules, until = granules - taken, max(until, queue[0][1])
            queue[0][0] -= taken
            if queue[0][0] == 0:
                queue.popleft()
        self.found.waits[address] += until - self.now
        self.now = until


def cycles_of_lines(program: Program, found: Count) -> Counter[str]:
    """Return the cycles of each source line, and those of "waiting for copies".

    The cycle of a bundle is divided among the lines of its instructions. Bundles without lines count to the line
    before them.
    """
    cycles: Counter[str] = Counter()
    last = "pipeline of the grid"
    for address, lines in enumerate(program.lines):
        last = lines[0] if lines else last
        for line in lines or [last]:
            cycles[line] += found.visits[address] / max(1, len(lines))
    cycles["waiting for copies"] = sum(found.waits.values())
    return cycles
