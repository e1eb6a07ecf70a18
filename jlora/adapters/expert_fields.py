"""Read the fields of `adapter_config.json` that describe how experts' LoRA was trained and packed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from jlora._json import Json
from jlora.errors import AdapterFormatError, AdapterMismatchError, kind_of, shown, shown_value

EXPERT_FIELDS = ("target_parameters", "lora_B_layout", "unsloth_fused_expert_lora")

# Parameters of all experts, in the order of their modules. PEFT's `_inject_parameters` wraps one around the other in
# this order, so the first becomes `base_layer`.
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
# A router's weight is a plain matrix, so its LoRA is that of a linear layer.
_ROUTERS = ("gate.weight", "router.weight")
ROUTER_MODULES = ("gate", "router")
_LAYOUTS = ("rank_major", "grouped_by_expert")
# Path of Mixtral's experts in older checkpoints and in transformers 5.
_ALIASES = (".block_sparse_moe.", ".mlp.")


@dataclass(frozen=True)
class ExpertFields:
    """The configuration of experts' LoRA.

    Attributes:
      target_parameters: Names, or dotted suffixes, of the parameters with LoRA.
      layout: Order of the columns of a flat B: "rank_major" (PEFT) or "grouped_by_expert".
      layouts: Parameter -> its own layout and number of experts. Unsloth writes these; otherwise it is empty.
    """

    target_parameters: tuple[str, ...] = ()
    layout: str = "rank_major"
    layouts: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    def parameters(self, block: str) -> tuple[str, ...]:
        """Return the parameters of module `block` that PEFT would put LoRA on, in PEFT's order."""
        return tuple(name for name in PARAMETERS if self.targets(f"{block}.{name}"))

    def targets_weight(self, module: str) -> bool:
        """Return True if the module is a router whose weight is targeted as a parameter."""
        return bool(self.target_parameters) and module.endswith(ROUTER_MODULES) and self.targets(f"{module}.weight")

    def targets(self, parameter: str) -> bool:
        """Return True if `target_parameters` names a parameter, under its path in older or newer checkpoints."""
        old, new = _ALIASES
        names = {parameter, parameter.replace(old, new), parameter.replace(new, old)}
        return any(name == entry or name.endswith(f".{entry}") for name in names for entry in self.target_parameters)

    def layout_of(self, parameter: str, experts: int, where: str) -> str:
        """Return the layout of a flat B.

        Raises:
          AdapterFormatError: `layouts` has another number of experts for this parameter.
        """
        layout, count = self.layouts.get(parameter, (self.layout, experts))
        if count != experts:
            raise AdapterFormatError(
                f"{where} is of {experts} experts by its rank (r and rank_pattern), and unsloth_fused_expert_lora says "
                f"that {parameter} has {count}"
            )
        return layout


def expert_fields(raw: Mapping[str, Json], where: str) -> ExpertFields:
    """Read and check `EXPERT_FIELDS`.

    Args:
      raw: The whole configuration.
      where: Adapter and file, for messages.

    Raises:
      AdapterFormatError: A value has the wrong type, or two layout fields disagree.
      AdapterMismatchError: A parameter or a layout is not served.
    """
    targets = _target_parameters(raw.get("target_parameters"), f"{where}: field 'target_parameters'")
    marker = raw.get("lora_B_layout")
    layout = _LAYOUTS[0] if marker is None else _layout(marker, f"{where}: field 'lora_B_layout'")
    layouts = _details(raw.get("unsloth_fused_expert_lora"), f"{where}: field 'unsloth_fused_expert_lora'")
    for parameter, (own, _) in layouts.items():
        if marker not in (None, own):
            raise AdapterFormatError(
                f"{where}: field 'lora_B_layout' is {shown_value(marker)}, and unsloth_fused_expert_lora says {own} of "
                f"{shown(parameter)}; expected the same"
            )
    return ExpertFields(targets, layout, layouts)


def _target_parameters(value: Json, where: str) -> tuple[str, ...]:
    if value is None or value is False or value in ([], {}):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterFormatError(f"{where} must be a list of names, found {shown_value(value)}")
    names: list[str] = value
    for name in names:
        router = name in _ROUTERS or name.endswith(tuple(f".{router}" for router in _ROUTERS))
        if not router and name.rpartition(".")[2] not in PARAMETERS:
            raise AdapterMismatchError(
                f"{where} names {shown(name)}; LoRA on bare parameters is served of experts ({', '.join(PARAMETERS)}) "
                f"and routers ({', '.join(_ROUTERS)}) only. Train the adapter without it, or merge it into a base "
                "model of its own"
            )
    return tuple(names)


def _details(value: Json, where: str) -> dict[str, tuple[str, int]]:
    """Read Unsloth's {"lora_A_layout": ..., "parameters": {name: {...}}}; return name -> layout and num_experts."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not isinstance(value.get("parameters"), dict):
        raise AdapterFormatError(f"{where} must be an object with parameters, found {shown_value(value)}")
    if (layout_a := value.get("lora_A_layout", "grouped_by_expert")) != "grouped_by_expert":
        raise AdapterMismatchError(
            f'{where} says that lora_A_layout is {shown_value(layout_a)}; only "grouped_by_expert" is served'
        )
    parameters = cast("dict[str, Json]", value["parameters"])
    found: dict[str, tuple[str, int]] = {}
    for name, given in parameters.items():
        at = f"{where}, parameter {shown(name)}"
        if not isinstance(given, dict):
            raise AdapterFormatError(f"{at} must be an object, found {kind_of(given)}")
        detail = cast("dict[str, Json]", given)
        experts = detail.get("num_experts")
        if isinstance(experts, bool) or not isinstance(experts, int):
            raise AdapterFormatError(f"{at} must have num_experts, a whole number, found {shown_value(experts)}")
        found[name] = _layout(detail.get("lora_B_layout"), f"{at}, lora_B_layout"), experts
    return found


def _layout(value: Json, where: str) -> str:
    if not isinstance(value, str) or value not in _LAYOUTS:
        raise AdapterMismatchError(
            f"{where} is {shown_value(value)}, which is not a known layout of B; expected one of {', '.join(_LAYOUTS)}"
        )
    return value
