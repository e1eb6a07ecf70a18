"""Read `adapter_config.json` strictly. Each PEFT field is served, has no effect at inference, or is refused.

The rules follow the source of PEFT 0.21 (`peft/tuners/lora/config.py`, `layer.py`, `tuners_utils.py`). An unknown field
is accepted only if it is null, false, or an empty list, object or string, as PEFT writes a feature that is off. Any
other value could change the result, so it is refused by name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from jlora._json import Json, JSONError, parse_object
from jlora.adapters.activation import check_invocation_tokens
from jlora.adapters.expert_fields import EXPERT_FIELDS, ExpertFields, expert_fields
from jlora.adapters.files import MemoryFile, open_file
from jlora.adapters.pattern_table import PatternTable, pattern_table
from jlora.adapters.patterns import Pattern, compile_pattern
from jlora.adapters.peft_config import PeftConfig
from jlora.adapters.variants import VARIANTS
from jlora.errors import AdapterFormatError, AdapterMismatchError, Problems, kind_of, shown, shown_path, shown_value

CONFIG_FILE = "adapter_config.json"

T = TypeVar("T")

# Largest accepted file. A hundred thousand rank patterns take about 6 MB.
_MAX_BYTES = 32 << 20

# Fields of training and initialization, which PEFT's forward pass does not use. PEFT reads four of the *_config only if
# `init_lora_weights` names them; they remain in the file after a conversion.
_WITHOUT_EFFECT = frozenset(
    (
        "lora_dropout",
        "inference_mode",
        "peft_version",
        "auto_mapping",
        "revision",
        "runtime_config",
        "megatron_core",
        "qalora_group_size",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "loftq_config",
        # Of older versions of PEFT, which wrote whether `eval` merged the weights.
        "merge_weights",
        # Learning rates of LoRA+ and the dtype of training, which ms-swift and other trainers add.
        "loraplus_lr_ratio",
        "loraplus_lr_embedding",
        "loraplus_weight_decay",
        "lorap_lr_ratio",
        "lorap_emb_lr",
        "lora_dtype",
    )
)

# Fields that change the forward pass -> feature and the values that switch it off. An empty object is not among them
# if PEFT tests `is not None`, because it then switches the feature on.
_OFF_FALSE = (None, False)
_OFF_EMPTY: tuple[Any, ...] = (None, False, [], {})
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "lora_bias": ("a bias on lora_B", _OFF_FALSE),
    "use_qalora": ("QALoRA", _OFF_FALSE),
    "bias": ("trained biases", (None, "none")),
    "layer_replication": ("replicated layers", _OFF_EMPTY),
    "trainable_token_indices": ("trained token embeddings", _OFF_FALSE),
    "kasa_config": ("KaSA", _OFF_FALSE),
    "velora_config": ("VeLoRA", _OFF_FALSE),
    "monteclora_config": ("MonteCLoRA", _OFF_FALSE),
    "arrow_config": ("Arrow routing", _OFF_FALSE),
    "use_bdlora": ("block-diagonal LoRA (BD-LoRA)", _OFF_FALSE),
    "megatron_config": ("LoRA on Megatron's parallel layers", _OFF_FALSE),
}

_HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")


def read_config(file: Path | MemoryFile, adapter: str, problems: Problems | None = None) -> PeftConfig:
    """Read and check an `adapter_config.json`.

    Args:
      file: Path of the file, or the file in memory.
      adapter: Name of the adapter, for messages.
      problems: Takes the errors of fields without which the tensors can be checked nevertheless. None raises them.

    Raises:
      AdapterFormatError: The file cannot be read or is not a JSON object, a name occurs twice, or a value has the wrong
        type or range.
      AdapterMismatchError: A PEFT feature is not served or a field is unknown. The message names it.
    """
    where = f"adapter {shown(adapter)}: {shown_path(str(file))}"
    with open_file(file, where) as opened:
        if opened.size > _MAX_BYTES:
            raise AdapterFormatError(f"{where}: has {opened.size} bytes; at most {_MAX_BYTES} are read")
        text = opened.read(0, opened.size)
    try:
        raw = parse_object(text)
    except JSONError as error:
        raise AdapterFormatError(f"{where}: {error}") from error
    return replace(_parse(raw, where, problems), digest=opened.digest())


def _parse(raw: Mapping[str, Json], where: str, problems: Problems | None) -> PeftConfig:
    peft_type = raw.get("peft_type")
    if not isinstance(peft_type, str):
        raise AdapterFormatError(f"{where}: field 'peft_type' must be the string \"LORA\", found {kind_of(peft_type)}")
    if peft_type != "LORA":
        raise AdapterMismatchError(
            f"{where}: field 'peft_type' is {shown(peft_type)}; only \"LORA\" is served. PEFT's convert_to_lora and "
            "save_as_lora(folder, model, rank=...) make a LoRA of methods that add a delta to the weights, such as "
            "LoHa, LoKr and VeRA"
        )
    found = Problems() if problems is None else problems
    needed = Problems()  # of fields without which no tensor can be checked
    for name, value in raw.items():
        found.attempt(None, _refuse_unserved, name, value, where)
    found.attempt(None, _refuse_base_changing_init, raw.get("init_lora_weights", True), where)
    experts = needed.attempt(ExpertFields(), expert_fields, raw, where)
    targets, layers, layers_pattern = needed.attempt(
        (None, None, ()), _targets, raw, bool(experts.target_parameters), where
    )
    unchecked: list[str] = []
    # If an expression cannot be evaluated, every module counts as targeted and none as excluded.
    if targets is not None:
        anything = compile_pattern(".*", where)
        targets = needed.attempt(None, _or_unchecked, targets, "target_modules", anything, unchecked, where)
    exclude = raw.get("exclude_modules") or []
    none = frozenset[str]()
    excluded = needed.attempt(none, _or_unchecked, exclude, "exclude_modules", none, unchecked, where)
    no_ranks, no_alphas = pattern_table(dict[str, int](), where), pattern_table(dict[str, float](), where)
    tokens, at_tokens = raw.get("alora_invocation_tokens"), f"{where}: field 'alora_invocation_tokens'"
    saved, at_saved = raw.get("modules_to_save"), f"{where}: field 'modules_to_save'"
    config = PeftConfig(
        r=needed.attempt(8, _rank, raw.get("r", 8), f"{where}: field 'r'"),
        lora_alpha=found.attempt(8.0, _number, raw.get("lora_alpha", 8), f"{where}: field 'lora_alpha'"),
        use_rslora=found.attempt(False, _typed, raw, "use_rslora", bool, False, where),
        variants=tuple(
            v.name for v in VARIANTS.values() if needed.attempt(False, _typed, raw, v.field, bool, None, where)
        ),
        invocation_tokens=found.attempt((), _invocation_tokens, tokens, at_tokens),
        rank_patterns=needed.attempt(no_ranks, _patterns, raw, "rank_pattern", _rank, where),
        alpha_patterns=found.attempt(no_alphas, _patterns, raw, "alpha_pattern", _number, where),
        target_modules=targets,
        exclude_modules=excluded,
        layers_to_transform=layers,
        layers_pattern=layers_pattern,
        fan_in_fan_out=found.attempt(False, _typed, raw, "fan_in_fan_out", bool, False, where),
        base_model_name=found.attempt(None, _typed, raw, "base_model_name_or_path", str, None, where),
        task_type=found.attempt(None, _typed, raw, "task_type", str, None, where),
        ensure_weight_tying=found.attempt(False, _typed, raw, "ensure_weight_tying", bool, False, where),
        modules_to_save=needed.attempt((), _modules_to_save, saved, at_saved),
        experts=experts,
        unchecked=tuple(unchecked),
        peft_fields={
            name: found.attempt(None, _writable, value, f"{where}: field {name!r}")
            for name, value in raw.items()
            if name in PEFT_FIELDS
        },
    )
    if needed.found or problems is None:
        found.found += needed.found
        found.raise_first()
    return config


def _writable(value: Json, where: str) -> Json:
    """Return the value. Raise if it cannot be written as JSON: Python reads 1e999 as infinity."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise AdapterFormatError(f"{where} must hold finite numbers, found {shown_value(value)}") from error
    return value


def _or_unchecked(
    value: Json, name: str, instead: frozenset[str] | Pattern, unchecked: list[str], where: str
) -> frozenset[str] | Pattern:
    """Return names or a pattern. For an expression that RE2 refuses, add to `unchecked` and return `instead`."""
    try:
        return _names_or_pattern(value, f"{where}: field {name!r}")
    except AdapterMismatchError as error:
        unchecked.append(str(error).removeprefix(f"{where}: "))
        return instead


# Fields that a load keeps in `Adapter.peft_fields` and a save writes back.
PEFT_FIELDS = _WITHOUT_EFFECT | {"init_lora_weights", "ensure_weight_tying"}

_SERVED = frozenset(
    (
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "alora_invocation_tokens",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
        "base_model_name_or_path",
        "task_type",
        "init_lora_weights",
        "ensure_weight_tying",
        "modules_to_save",
        *EXPERT_FIELDS,
    )
)


def _refuse_unserved(name: str, value: Json, where: str) -> None:
    if name in _SERVED or name in _WITHOUT_EFFECT or any(name == variant.field for variant in VARIANTS.values()):
        return
    at = f"{where}: field {shown(name)} is {shown_value(value)}"
    if name in _REFUSED:
        feature, off = _REFUSED[name]
        if not any(type(value) is type(o) and value == o for o in off):
            raise AdapterMismatchError(
                f"{at}: {feature} is not served; expected {off[-1]!r}. "
                "Train the adapter without it, or merge it into a base model of its own"
            )
    elif not (value is None or value is False or value in ("", [], {})):
        raise AdapterMismatchError(
            f"{at}, and this version of jlora does not know the field; only "
            "null, false or empty would be safe to pass over. If it does not matter at inference, remove it"
        )


def _refuse_base_changing_init(init: Json, where: str) -> None:
    where = f"{where}: field 'init_lora_weights'"
    if init is None or isinstance(init, bool):
        return
    if not isinstance(init, str):
        raise AdapterFormatError(f"{where} must be a boolean or a string, found {kind_of(init)}")
    if init.lower() in _HARMLESS_INITS:
        return
    if init.lower().startswith(_BASE_CHANGING_INITS):
        raise AdapterMismatchError(
            f"{where} is {shown(init)}, which changes the base weights, so the adapter does not fit the base model as "
            "published. Save it again with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), "
            "which turns it into a plain LoRA (LoftQ has no such conversion)"
        )
    raise AdapterMismatchError(
        f"{where} is {shown(init)}, which is not known; expected a boolean or one of {', '.join(_HARMLESS_INITS)}"
    )


def _targets(
    raw: Mapping[str, Json], parameters: bool, where: str
) -> tuple[Json, frozenset[int] | None, tuple[str, ...]]:
    """Return `target_modules`, `layers_to_transform` and `layers_pattern`, combined by PEFT's rules."""
    targets = raw.get("target_modules")
    if targets is None and parameters:
        targets = []
    layers = raw.get("layers_to_transform")
    layers_pattern = raw.get("layers_pattern")
    if targets is None:
        raise AdapterMismatchError(
            f"{where}: field 'target_modules' is missing or null: PEFT would choose by the model's architecture. "
            'Write the names, such as ["q_proj", "v_proj"]'
        )
    if isinstance(targets, str):
        for name, value in (("layers_to_transform", layers), ("layers_pattern", layers_pattern)):
            if value is not None:
                raise AdapterFormatError(f"{where}: field {name!r} cannot be used when 'target_modules' is a string")
        if targets.lower() == "all-linear":
            return None, None, ()
    if layers_pattern and layers is None:
        raise AdapterFormatError(f"{where}: field 'layers_pattern' is given without 'layers_to_transform'")
    return (
        targets,
        _layers(layers, f"{where}: field 'layers_to_transform'"),
        _layers_pattern(layers_pattern, f"{where}: field 'layers_pattern'"),
    )


def _layers(value: Json, where: str) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    values: list[Any] = value if isinstance(value, list) else [value]
    for v in values:
        if isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 2**31:
            raise AdapterFormatError(f"{where} must be layer indices, found {shown_value(value)}")
    return frozenset(values)


def _layers_pattern(value: Json, where: str) -> tuple[str, ...]:
    values: list[Any] = value if isinstance(value, list) else [value] if value else []
    for v in values:
        if not isinstance(v, str):
            raise AdapterFormatError(f"{where} must be a name or a list of names, found {shown_value(value)}")
        if not v.replace("_", "").isalnum():
            raise AdapterMismatchError(f'{where} is {shown_value(value)}; only plain names such as "layers" are served')
    return tuple(values)


def _patterns(raw: Mapping[str, Json], name: str, check: Callable[[Json, str], T], where: str) -> PatternTable[T]:
    value = raw.get(name)
    where = f"{where}: field {name!r}"
    if value is not None and not isinstance(value, dict):
        raise AdapterFormatError(f"{where} must be an object of names and numbers, found {kind_of(value)}")
    entries = {key: check(number, f"{where}, key {shown(key)}") for key, number in (value or {}).items()}
    return pattern_table(entries, where)


def _names_or_pattern(value: Json, where: str) -> frozenset[str] | Pattern:
    if isinstance(value, str):
        return compile_pattern(value, where)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise AdapterFormatError(f"{where} must be a list of names or a regular expression, found {shown_value(value)}")
    return frozenset(value)


def _invocation_tokens(value: Json, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if value == []:  # plain LoRA on PEFT's layers, and never active on those of bitsandbytes
        raise AdapterFormatError(f"{where} is an empty list, which PEFT reads in two ways; expected token ids, or null")
    return check_invocation_tokens(value, where)


def _modules_to_save(value: Json, where: str) -> tuple[str, ...]:
    if any(type(value) is type(off) and value == off for off in _OFF_EMPTY):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise AdapterFormatError(f"{where} must be a list of names, found {shown_value(value)}")
    return tuple(cast("list[str]", value))


def _rank(value: Json, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise AdapterFormatError(f"{where} must be a positive integer below 2**31, found {shown_value(value)}")
    return value


def _number(value: Json, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
        raise AdapterFormatError(f"{where} must be a finite number, found {shown_value(value)}")
    return float(value)


def _typed(raw: Mapping[str, Json], name: str, kind: type, default: Any, where: str) -> Any:
    value = raw.get(name, default)
    if not isinstance(value, kind) and not (value is None and default is None):
        raise AdapterFormatError(f"{where}: field {name!r} must be {kind.__name__}, found {shown_value(value)}")
    return value
