"""Recognize the formats of experts' LoRA from the names and shapes of the tensors.

A file stores the LoRA of E experts in one of three formats. Separate experts have names such as `experts.7.gate_proj`
and are modules like any other. The two stacked formats have one A and one B for all experts.

  three axes  A [E or 1, r, in] and B [E or 1, out, r] under the name of a projection, for example `experts.w1` or
              `experts.gate_proj` (Tinker, SGLang). Size 1 is a factor shared by all experts.
  flat        A (E * r, in) and B (out, r * E) of PEFT's `target_parameters`. `experts.base_layer` is the module's first
              parameter and `experts` the second, or the only one. The rows of A are grouped by expert. The columns of B
              are rank-major, with column j * E + e for rank j of expert e (`reshape(out, r, E)` in
              `ParamWrapper.get_delta_weight`), or grouped by expert if `lora_B_layout` is "grouped_by_expert". Some
              versions of PEFT exchange in and out; the delta is then (B A) transposed (`ExpertsLoRA.exchanged`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from jlora.adapters.expert_fields import PARAMETERS
from jlora.adapters.lora import ExpertsLoRA, HostArray, UnreadArray
from jlora.adapters.peft_config import PeftConfig, scaling_of
from jlora.errors import AdapterFormatError, AdapterMismatchError, shown

# Projection name -> its parts of a gated block. A block without a gate has only "up" before the activation.
_PARTS = {
    "gate_up_proj": ("gate", "up"),
    "gate_proj": ("gate",),
    "w1": ("gate",),
    "up_proj": ("up",),
    "w3": ("up",),
    "down_proj": ("down",),
    "w2": ("down",),
}
_FIRST = ("gate_up_proj", "up_proj", "gate_proj", "w1", "w3")
_DOWN = ("down_proj", "w2")
# Other names of a projection in `target_modules`, which hold names from training that may differ from the file's.
_ALSO_CALLED = {
    "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"),
    "gate_proj": ("w1",),
    "w1": ("gate_proj", "up_proj"),
    "up_proj": ("w3",),
    "w3": ("up_proj",),
    "down_proj": ("w2",),
    "w2": ("down_proj",),
}


@dataclass(frozen=True)
class Stacked:
    """A stacked pair of a file.

    Attributes:
      name: Name in `Adapter.modules`.
      lora: The factors, with arrays that are not read yet.
      grouped: True if the columns of a flat B are grouped by expert.
    """

    name: str
    lora: ExpertsLoRA
    grouped: bool = False

    def arrays(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return A [E or 1, r, in] and B [E or 1, out, r] as views of the tensors or of their shares."""
        if not self.lora.flat:
            return a, b
        a = a.reshape(self.lora.a.shape)
        if b.ndim == 3:  # a share, which is read sorted by expert
            return a, b.reshape(self.lora.b.shape)
        experts, rank, _ = a.shape
        b = b.reshape(len(b), experts, rank) if self.grouped else b.reshape(len(b), rank, experts).swapaxes(1, 2)
        return a, b.swapaxes(0, 1)


def is_stacked(module: str) -> bool:
    """Return True if a module's tensors hold all experts of a block."""
    return _split(module) is not None


def _split(module: str) -> tuple[str, str] | None:
    """Return the block and the rest of the name (a projection, one or more "base_layer", or ""), else None."""
    block, _, last = module.rpartition(".")
    if last in _PARTS:
        return (block, last) if _is_block(block) else None
    block, follows = module, ""
    while block.endswith(".base_layer"):
        block, follows = block.removesuffix(".base_layer"), f"{follows}.base_layer"
    return (block, follows[1:]) if _is_block(block) else None


def _is_block(module: str) -> bool:
    return module.endswith("experts") and (module == "experts" or module[-8] == ".")


def _of_one_expert(module: str) -> tuple[str, str] | None:
    """Return block and projection of a module such as `mlp.experts.7.gate_proj`, else None."""
    rest, _, last = module.rpartition(".")
    block, _, expert = rest.rpartition(".")
    return (block, last) if last in _PARTS and expert.isdecimal() and _is_block(block) else None


def stacked_pairs(
    pairs: Mapping[str, tuple[UnreadArray, UnreadArray]], others: Iterable[str], config: PeftConfig, where: str
) -> dict[str, Stacked]:
    """Return the stacked pairs of a file.

    Args:
      pairs: Module name of the tensors -> A and B as stored in the file, for modules with `is_stacked`. Two of size 0
        are Tinker's placeholder for a projection that the model lacks.
      others: Names of the file's other modules.
      config: The adapter's configuration.
      where: Adapter and file, for messages.

    Returns:
      Module name of the tensors -> the pair. Placeholders are left out.

    Raises:
      AdapterFormatError: A and B differ in rank or number of experts, a projection occurs in two formats, or the
        parameters in the configuration and in the file differ.
      AdapterMismatchError: The configuration does not target a pair.
    """
    blocks: dict[str, dict[str, str]] = {}  # block -> rest of the tensors' name -> module
    for module, (a, b) in pairs.items():
        if (a.nbytes or b.nbytes) and (split := _split(module)) is not None:
            blocks.setdefault(split[0], {})[split[1]] = module
    names = {
        module: f"{block}.{name}"
        for block, suffixes in blocks.items()
        for module, name in _projections(block, suffixes, config, where).items()
    }
    _refuse_two_formats(names, others, where)
    ranks, alphas = config.ranks(names.values()), config.alphas(names.values())
    found = {m: _stacked(m, name, *pairs[m], ranks[name], alphas[name], config, where) for m, name in names.items()}
    for block, suffixes in blocks.items():
        modules = list(suffixes.values())
        several = {e: module for module in modules if (e := found[module].lora.experts) > 1}
        if len(several) > 1:
            (one, module), (two, other) = list(several.items())[:2]
            raise AdapterFormatError(
                f"{where}: {shown(module)} is of {one} experts and {shown(other)} of {two}; expected as many in all of "
                f"{shown(block)} (r and rank_pattern say which rank each has)"
            )
        flat = {module: found[module] for module in modules if found[module].lora.flat}
        try:
            exchanged = flat_orientation(block, {pair.name: pair.lora for pair in flat.values()})
        except AdapterFormatError as error:
            raise AdapterFormatError(f"{where}: {error}") from None
        found |= {m: replace(pair, lora=replace(pair.lora, exchanged=exchanged)) for m, pair in flat.items()}
    return found


def flattened(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return A [E, r, in] and B [E, out, r] in PEFT's flat layout, (E * r, in) and (out, r * E)."""
    experts, rank, _ = a.shape
    return a.reshape(experts * rank, -1), b.transpose(1, 2, 0).reshape(b.shape[1], rank * experts)


def stored_names(names: Collection[str], others: Iterable[str], flat: Collection[str], where: str) -> dict[str, str]:
    """Map names in `Adapter.modules` to the module names that their tensors are written under.

    The flat pairs of a block get PEFT's names if PEFT has names for all of them, that is for one parameter or two. All
    others keep their own names.

    Args:
      names: Names of modules that hold all experts.
      others: Names of the adapter's other modules.
      flat: The subset of `names` that is written flat.
      where: Adapter, for messages.

    Raises:
      AdapterFormatError: A name is not a projection of a module named experts, or a projection occurs twice.
    """
    blocks: dict[str, set[str]] = {}
    for name in names:
        block, _, last = name.rpartition(".")
        if not _is_block(block) or last not in _PARTS:
            raise AdapterFormatError(
                f"{where}: {shown(name)} cannot be saved; expected one of {', '.join(_PARTS)} of a module named experts"
            )
        if name in flat:
            blocks.setdefault(block, set()).add(last)
    found = {name: name for name in names}
    _refuse_two_formats(found, others, where)
    for block, lasts in blocks.items():
        if len(lasts) == 1 and lasts <= set(PARAMETERS):
            found |= {f"{block}.{last}": block for last in lasts}
        elif lasts in ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"}):
            found |= {f"{block}.{last}": block if last == "down_proj" else f"{block}.base_layer" for last in lasts}
    return found


def flat_orientation(block: str, modules: Mapping[str, ExpertsLoRA]) -> bool | None:
    """Return True if a block's flat pairs have in and out exchanged, derived from the sizes of both.

    A block maps H to I and back to H. If in and out are not exchanged, the first pair has in = H and out = I (2 I for
    gate_up), and the second has in = I and out = H.

    Args:
      block: Module name of the experts.
      modules: Name -> factors, read or not. Those of other blocks are ignored.

    Returns:
      None if the block has only one of the two pairs, or if both readings fit.

    Raises:
      AdapterFormatError: Neither reading fits.
    """
    first, down = (
        next(((n, modules[n]) for n in (f"{block}.{last}" for last in lasts) if n in modules), None)
        for lasts in (_FIRST, _DOWN)
    )
    if first is None or down is None:
        return None
    (in_1, out_1), (in_2, out_2) = ((lora.a.shape[2], lora.b.shape[1]) for _, lora in (first, down))
    times = (1, 2) if first[0].endswith(".gate_up_proj") else (1,)
    straight = in_1 == out_2 and out_1 in [t * in_2 for t in times]
    exchanged = out_1 == in_2 and in_1 in [t * out_2 for t in times]
    if not (straight or exchanged):
        raise AdapterFormatError(
            f"{shown(first[0])} takes {in_1} and gives {out_1}, {shown(down[0])} {in_2} and {out_2}; expected the one "
            "to take what the other gives, and to give it what it takes or, with a gate, twice that"
        )
    return None if straight and exchanged else exchanged


def _projections(block: str, suffixes: Mapping[str, str], config: PeftConfig, where: str) -> dict[str, str]:
    """Return module name -> projection for the stacked modules of a block."""
    found = {module: name for name, module in suffixes.items() if name in _PARTS}
    plain = {name: module for name, module in suffixes.items() if name not in _PARTS}
    for module, name in found.items():
        if not (name in config.experts.parameters(block) or _targeted(block, name, config)):
            raise _not_targeted(module, where)
    if not plain:
        return found
    deeper = next((module for name, module in plain.items() if "." in name), None)
    if deeper is not None:
        raise AdapterMismatchError(
            f"{where}: {shown(deeper)} is of a third parameter; at most two of a module are served"
        )
    if "" not in plain:
        raise AdapterFormatError(
            f"{where}: {shown(plain['base_layer'])} is the first of two parameters, and the second, "
            f"{shown(block + '.lora_A')}, is missing"
        )
    parameters = config.experts.parameters(block)
    if not config.experts.target_parameters:  # a converted file, whose two pairs have vLLM's fixed meaning
        if not _targeted(block, "gate_up_proj", config):
            raise _not_targeted(plain[""], where)
        if len(plain) == 1:
            raise AdapterFormatError(
                f"{where}: {shown(block)} has tensors of one parameter, and nothing says which; expected it in "
                "target_parameters, or tensors of both"
            )
        parameters = ("gate_up_proj", "down_proj")
    if not parameters:
        raise _not_targeted(plain[""], where)
    if len(parameters) != len(plain):
        raise AdapterFormatError(
            f"{where}: of {shown(block)} there are {', '.join(map(shown, plain.values()))}, and target_parameters "
            f"names {', '.join(parameters)}; expected base_layer and the module itself for two, or the module for one"
        )
    in_order = [plain[name] for name in ("base_layer", "") if name in plain]
    return found | dict(zip(in_order, parameters, strict=True))


def _targeted(block: str, name: str, config: PeftConfig) -> bool:
    """Return True if `target_modules` matches a stacked projection under any of its names."""
    return any(
        config.targets(module, "linear")
        for module in (block, *(f"{block}.{other}" for other in (name, *_ALSO_CALLED[name])))
    )


def _not_targeted(module: str, where: str) -> AdapterMismatchError:
    return AdapterMismatchError(
        f"{where}: the adapter's configuration does not target {shown(module)} (target_parameters, target_modules, "
        "exclude_modules, layers_to_transform)"
    )


def _refuse_two_formats(names: Mapping[str, str], others: Iterable[str], where: str) -> None:
    taken: dict[tuple[str, str], str] = {}
    for module, name in names.items():
        block, _, last = name.rpartition(".")
        for part in _PARTS[last]:
            if (other := taken.setdefault((block, part), module)) != module:
                raise AdapterFormatError(f"{where}: {shown(other)} and {shown(module)} are of the same projection")
    if not taken:
        return
    for module in others:
        if (one := _of_one_expert(module)) is not None:
            block, last = one
            for part in _PARTS[last]:
                if (other := taken.get((block, part))) is not None:
                    raise AdapterFormatError(
                        f"{where}: {shown(other)} holds all experts and {shown(module)} one of the same projection; "
                        "expected one format of each"
                    )


def _stacked(
    module: str,
    name: str,
    stored_a: UnreadArray,
    stored_b: UnreadArray,
    rank: int,
    alpha: float,
    config: PeftConfig,
    where: str,
) -> Stacked:
    a, b = stored_a.shape, stored_b.shape
    where = f"{where}: {shown(module)} has A {a} and B {b}"
    if len(a) != len(b) or len(a) not in (2, 3) or 0 in a or 0 in b:
        raise AdapterFormatError(f"{where}; expected both of two or of three axes, and none empty")
    flat, grouped = len(a) == 2, False
    if not flat:
        if module.rpartition(".")[2] not in _PARTS:
            raise AdapterFormatError(f"{where}; expected (experts * rank, in) and (out, rank * experts)")
        if a[1] != rank or b[2] != rank:
            raise AdapterFormatError(f"{where}; expected (experts, {rank}, in) and (experts, out, {rank})")
        if not {a[0], b[0]} <= {1, max(a[0], b[0])}:
            raise AdapterFormatError(f"{where}; expected as many experts in both, or 1 where all share the factor")
    else:
        if a[0] != b[1]:
            raise AdapterFormatError(f"{where}; expected (experts * rank, in) and (out, rank * experts)")
        experts, rest = divmod(a[0], rank)
        if rest or experts < 2:
            raise AdapterFormatError(
                f"{where}; expected rank * experts of two experts or more, and rank {rank} (r and rank_pattern)"
            )
        grouped = config.experts.layout_of(name.rpartition(".")[2], experts, where) == "grouped_by_expert"
        a, b = (experts, rank, a[1]), (experts, b[0], rank)
    lora = ExpertsLoRA(
        a=cast("HostArray", replace(stored_a, shape=a)),
        b=cast("HostArray", replace(stored_b, shape=b)),
        alpha=alpha,
        scaling=scaling_of(alpha, rank, config.use_rslora),
        flat=flat,
    )
    return Stacked(name, lora, grouped)
