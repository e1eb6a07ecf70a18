"""Train the demo, a small model that copies letters, and all of its LoRA adapters together in one batch.

    python examples/train_demo.py [--moe] [--out FOLDER] [--base-steps N] [--steps N]
        [--dtype bfloat16] [--quantize int8] [--devices 8] [--checkpoints FOLDER]

Without `--moe` it trains a Llama and four adapters in about four minutes on two CPU cores. With `--moe` it trains a
Qwen3-MoE and two adapters of its experts in about seven. The adapters have other ranks and targets. Each has a
learning rate and a schedule of its own, every batch has rows of all of them, and one compiled step updates them
(`LoRAManager.trainer`). The output is a Hugging Face checkpoint, a tokenizer, and PEFT adapter folders.

The adapters are trained on the checkpoint that was written, in the given dtype or quantized, on one device or several.
`--checkpoints` keeps their factors and optimizers with Orbax. A run that was cut short continues from there, with the
results of one that was not. On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight devices.
"""

import argparse
import json
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

import jlora
from jlora.adapters import ExpertsLoRA
from jlora.models import Decoder, DecoderConfig, MoEConfig, from_pretrained

PAD, BOS, EOS, EQUALS, FIRST_LETTER = range(5)
LETTERS = 26
SHORTEST, LONGEST = 3, 8
ROW = 1 + LONGEST + 1 + LONGEST + 1  # <bos> word = answer <eos>
BASE_NAME = "jlora-demo"
SCALING = 2  # alpha / rank of every adapter

# A word is an array of different letters 0..25.
TASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "reverse": lambda word: word[::-1],
    "sort": np.sort,
    "shift": lambda word: (word + 1) % LETTERS,
    "swap": lambda word: np.concatenate([word[i : i + 2][::-1] for i in range(0, len(word), 2)]),
}
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = ("mlp.experts.gate_proj", "mlp.experts.up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Demo:
    """A model, its adapters (name -> target module -> rank), and their largest learning rates.

    Adapters in `fused` are saved by `fuse_experts`.
    """

    config: DecoderConfig
    adapters: dict[str, dict[str, int]]
    rates: dict[str, float]
    base_steps: int
    steps: int
    fused: tuple[str, ...] = ()


DENSE = Demo(
    DecoderConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        eos_token_ids=(EOS,),
    ),
    {
        "reverse": dict.fromkeys(ATTENTION + MLP, 16),
        "sort": dict.fromkeys(ATTENTION + MLP, 32),
        "shift": dict.fromkeys(ATTENTION + MLP, 4),
        "swap": dict.fromkeys(ATTENTION, 16),
    },
    {"reverse": 3e-3, "sort": 2e-3, "shift": 5e-3, "swap": 3e-3},
    base_steps=800,
    steps=900,
)
MIXTURE = Demo(
    DecoderConfig(
        vocab_size=32,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=64,
        qk_norm=True,
        moe=MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=48, layers=(True,) * 3),
        eos_token_ids=(EOS,),
    ),
    {
        "reverse": dict(zip(EXPERTS, (8, 8, 16), strict=True)),
        "shift": dict.fromkeys(EXPERTS, 4),
    },
    {"reverse": 3e-3, "shift": 3e-3},
    base_steps=800,
    steps=2000,
    fused=("reverse",),
)


def copy(word: np.ndarray) -> np.ndarray:
    return word


def draw(rng: np.random.Generator, count: int, held_out: bool) -> list[np.ndarray]:
    """Return random words of different letters. A hash of its letters holds one word in ten out of training."""
    words = []
    while len(words) < count:
        word = rng.permutation(LETTERS)[: rng.integers(SHORTEST, LONGEST + 1)]
        if (zlib.crc32(bytes(word.tolist())) % 10 == 0) == held_out:
            words.append(word)
    return words


def rows(words: list[np.ndarray], task: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [words, ROW] int32, and a float32 mask of the positions whose next token belongs to the answer."""
    tokens, mask = np.full((len(words), ROW), PAD, np.int32), np.zeros((len(words), ROW), np.float32)
    for i, word in enumerate(words):
        row = [BOS, *(word + FIRST_LETTER), EQUALS, *(task(word) + FIRST_LETTER), EOS]
        tokens[i, : len(row)] = row
        mask[i, len(word) + 1 : len(row) - 1] = 1
    return tokens, mask


def answer_loss(logits, tokens, mask):
    """Return the summed loss of each answer's tokens and their number, float32 [words]."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return (losses * mask[:, :-1]).sum(-1), mask[:, :-1].sum(-1)


def are_right(logits, tokens, mask):
    """Return a mask [words] of the rows with a correct answer."""
    return ((logits.argmax(-1) == tokens[:, 1:]) | (mask[:, :-1] == 0)).all(-1)


def schedule(rate: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps, rate / 50)


def train_base(model: Decoder, steps: int, rng: np.random.Generator) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule(2e-3, steps), b2=0.98))
    opt = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, opt, tokens, mask):
        def loss(model):
            losses, counts = answer_loss(model(tokens[:, :-1]), tokens, mask)
            return losses.sum() / counts.sum()

        value, grads = nnx.value_and_grad(loss)(model)
        opt.update(model, grads)
        return value

    for i in range(steps):
        value = step(model, opt, *rows(draw(rng, 64, False), copy))
        if i % 100 == 0 or i == steps - 1:
            print(f"base: step {i:4d}  loss {value:.4f}", flush=True)


def fresh_adapter(name: str, demo: Demo, rng: np.random.Generator) -> jlora.Adapter:
    """Make an adapter with random A and zero B, as PEFT does. Each expert has its own A and B."""
    config = demo.config
    heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner, moe = config.hidden_size, config.intermediate_size, config.moe
    sizes = dict(zip(ATTENTION, ((hidden, heads), (hidden, keys), (hidden, keys), (heads, hidden)), strict=True))
    sizes |= dict(zip(MLP, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True))
    if moe is not None:
        expert = moe.intermediate_size
        sizes |= dict(zip(EXPERTS, ((hidden, expert), (hidden, expert), (expert, hidden)), strict=True))
    arrays, alphas = {}, {}
    for layer in range(config.num_hidden_layers):
        for target, rank in demo.adapters[name].items():
            k, n = sizes[target]
            for each in range(moe.num_experts) if moe is not None and target in EXPERTS else [None]:
                module = target if each is None else target.replace("experts", f"experts.{each}")
                a = rng.normal(0, k**-0.5, (rank, k)).astype(np.float32)
                arrays[f"model.layers.{layer}.{module}"] = (a, np.zeros((n, rank), np.float32))
                alphas[f"model.layers.{layer}.{module}"] = SCALING * rank
    return jlora.Adapter.from_arrays(name, arrays, alpha=alphas, base_model_name=BASE_NAME)


def adapter_loss(model, batch, tokens, mask):
    with jlora.use(batch):
        return answer_loss(model(tokens[:, :-1]), tokens, mask)


def train_adapters(model: Decoder, demo: Demo, steps: int, out: Path, checkpoints: Path | None) -> None:
    targets = sorted({target for adapter in demo.adapters.values() for target in adapter})
    most = max(rank for adapter in demo.adapters.values() for rank in adapter.values())
    config = jlora.LoRAConfig(max_loras=len(demo.adapters), max_lora_rank=most, target_modules=targets)
    manager = jlora.LoRAManager(model, config)
    rng = np.random.default_rng(0)
    for name in demo.adapters:
        manager.add_adapter(fresh_adapter(name, demo, rng))
    trainer = manager.trainer(adapter_loss, capacity=len(demo.adapters))
    for name in demo.adapters:
        trainer.add(name)
    each = 24
    names = [name for name in demo.adapters for _ in range(each)]

    def words(rng, held_out):
        parts = [rows(draw(rng, each, held_out), TASKS[name]) for name in demo.adapters]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    started, first = time.time(), 0
    options = ocp.CheckpointManagerOptions(save_interval_steps=max(1, steps // 10), max_to_keep=2)
    kept = None if checkpoints is None else ocp.CheckpointManager(checkpoints.absolute(), options=options)
    if kept is not None and (latest := kept.latest_step()) is not None:
        trainer.state = kept.restore(latest, args=ocp.args.StandardRestore(trainer.state))
        first = latest
    for i in range(first, steps):
        # The words of a step depend on its number alone, so a run that continues sees those of the first.
        rates = {name: float(schedule(rate, steps)(i)) for name, rate in demo.rates.items()}
        numbers = {"learning_rate": rates, "b2": 0.98, "weight_decay": 1e-4, "max_norm": 1.0}
        losses = trainer.step(
            trainer.prepare(names), *words(np.random.default_rng(i), held_out=False), **numbers
        ).losses
        if kept is not None:
            kept.save(i + 1, args=ocp.args.StandardSave(trainer.state))
        if i % 100 == 0 or i == steps - 1:
            shown = "  ".join(f"{name} {float(loss):.4f}" for name, loss in losses.items())
            print(f"adapters: step {i:4d}  loss: {shown}  {time.time() - started:.0f} s", flush=True)
    if kept is not None:
        kept.close()

    for name in trainer.names:
        trainer.publish(name)

    @manager.jit
    def answers(model, batch, tokens, mask):
        with jlora.use(batch):
            return are_right(model(tokens[:, :-1]), tokens, mask)

    with manager.prepare(names) as batch:
        right = np.asarray(answers(manager.model, batch, *words(np.random.default_rng(1), held_out=True)))
    for i, name in enumerate(demo.adapters):
        print(f"{name}: {right[i * each : (i + 1) * each].mean():.0%} of held-out words are right")
        adapter = trainer.adapter(name)
        arrays = {module: (rounded(lora.a), rounded(lora.b)) for module, lora in adapter.modules.items()}
        alpha = {module: lora.alpha for module, lora in adapter.modules.items()}
        adapter = jlora.Adapter.from_arrays(name, arrays, alpha=alpha, base_model_name=BASE_NAME)
        if name in demo.fused:
            adapter = fuse_experts(adapter, demo.config.moe.num_experts)
        adapter.save_pretrained(out / "adapters" / name)
    manager.unwrap()


def rounded(array: np.ndarray | jax.Array) -> np.ndarray:
    """Return an array in bfloat16, with a matrix rounded to 128 multiples of a power of two each side of zero.

    Files of such matrices take a third less in the wheel.
    """
    values = np.asarray(array, np.float32)
    if values.ndim > 1 and values.any():
        step = 2.0 ** (np.ceil(np.log2(np.abs(values).max())) - 7)
        values = np.round(values / step) * step
    return values.astype(ml_dtypes.bfloat16)


def fuse_experts(adapter: jlora.Adapter, num_experts: int) -> jlora.Adapter:
    """Return the adapter in PEFT's format of `target_parameters`, with one A and one B of all experts.

    Gate and up are one parameter in this format. Its A has the rows of both, and its B is block diagonal.
    """
    modules = {}
    for block in dict.fromkeys(module.partition(".experts.")[0] for module in adapter.modules):
        pairs = {"gate_up_proj": [], "down_proj": []}
        for expert in range(num_experts):
            gate, up, down = (
                adapter.modules[f"{block}.experts.{expert}.{part}_proj"] for part in ("gate", "up", "down")
            )
            b = np.block([[gate.b, np.zeros_like(up.b)], [np.zeros_like(gate.b), up.b]])
            pairs["gate_up_proj"].append((np.concatenate([gate.a, up.a]), b))
            pairs["down_proj"].append((down.a, down.b))
        for parameter, each in pairs.items():
            a, b = (np.stack(factors) for factors in zip(*each, strict=True))
            modules[f"{block}.experts.{parameter}"] = ExpertsLoRA(
                a=a, b=b, alpha=SCALING * a.shape[1], scaling=SCALING, flat=True
            )
    return replace(adapter, modules=modules)


def save_base(model: Decoder, folder: Path) -> None:
    """Write a Hugging Face checkpoint: rounded bfloat16 kernels [out, in], and separate parts of merged projections."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = rounded(variable[...])
        *parents, module, name = map(str, path)
        layer = model
        for key in path[:-1]:
            layer = layer[key] if isinstance(key, int) else getattr(layer, key)
        sizes = getattr(layer, "output_sizes", None)
        stored = {(*parents, module): array}
        if module == "experts":  # one kernel [E, in, out] for each projection
            stored = {(*parents, module, str(expert), name): kernel for expert, kernel in enumerate(array)}
        for (*block, merged), matrix in stored.items():
            parts = model.packed_modules.get(merged, (merged,))
            cuts = np.cumsum(sizes)[:-1] if sizes else len(parts)
            for part, piece in zip(parts, np.split(matrix, cuts, axis=-1), strict=True):
                turned = piece if name in ("embedding", "scale") else piece.T
                tensors[".".join((*block, part, "weight"))] = np.ascontiguousarray(turned)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    moe = model.config.moe
    if moe is None:
        family, architecture, fields = "llama", "LlamaForCausalLM", {"mlp_bias": False}
    else:
        family, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
        fields = {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.intermediate_size,
            "norm_topk_prob": moe.renormalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    config = {
        "architectures": [architecture],
        "model_type": family,
        "torch_dtype": "bfloat16",
        "vocab_size": model.config.vocab_size,
        "hidden_size": model.config.hidden_size,
        "intermediate_size": model.config.intermediate_size,
        "num_hidden_layers": model.config.num_hidden_layers,
        "num_attention_heads": model.config.num_attention_heads,
        "num_key_value_heads": model.config.num_key_value_heads,
        "head_dim": model.config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.config.max_position_embeddings,
        "rms_norm_eps": model.config.rms_norm_eps,
        "rope_theta": model.config.rope.theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        **fields,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each letter and `<bos>` in front of every text."""
    specials = ["<pad>", "<bos>", "<eos>", "="]
    letters = [chr(ord("a") + i) for i in range(LETTERS)]
    vocab = {token: i for i, token in enumerate([*specials, *letters, "<unk>", "<unused>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<unk>", "<unused>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_prompts(file: Path, adapters: Iterable[str], rng: np.random.Generator, each: int) -> None:
    """Write held-out prompts of the base (adapter null, copies) and of every adapter, in random order.

    No adapter's answer equals its word.
    """

    def text(word):
        return "".join(chr(ord("a") + letter) for letter in word)

    prompts = []
    for name, task in {None: copy, **{name: TASKS[name] for name in adapters}}.items():
        words = [word for word in draw(rng, 8 * each, True) if name is None or text(task(word)) != text(word)]
        prompts += [{"adapter": name, "prompt": f"{text(word)}=", "answer": text(task(word))} for word in words[:each]]
    order = rng.permutation(len(prompts))
    file.write_text("[\n" + ",\n".join("  " + json.dumps(prompts[i]) for i in order) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shipped = Path(__file__).parent.parent / "jlora" / "demo"
    parser.add_argument("--moe", action="store_true", help="a mixture of experts, and adapters of its experts")
    parser.add_argument("--out", type=Path, help="default: where the package has it")
    parser.add_argument("--base-steps", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--dtype", default="float32", help="of the base while the adapters are trained")
    parser.add_argument("--quantize", choices=["int8", "fp8"], help="the base while the adapters are trained")
    parser.add_argument("--devices", type=int, default=1, help="split batches and layers over this many")
    parser.add_argument("--checkpoints", type=Path, help="keep the state of training here, and continue from it")
    args = parser.parse_args()
    demo = MIXTURE if args.moe else DENSE
    out = args.out or (shipped / "moe" if args.moe else shipped)
    started = time.time()
    if args.checkpoints is None or not args.checkpoints.exists():
        rng = np.random.default_rng(0)
        model = Decoder(demo.config, rngs=nnx.Rngs(0))
        train_base(model, args.base_steps or demo.base_steps, rng)
        for folder in ("model", "adapters"):
            shutil.rmtree(out / folder, ignore_errors=True)
        save_base(model, out / "model")
        save_tokenizer(out / "model")
    mesh = None
    if args.devices > 1:
        shape = (args.devices // 2, 2)  # the demo has two key heads
        mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = from_pretrained(out / "model", jnp.dtype(args.dtype), mesh, quantize=args.quantize)
    train_adapters(model, demo, args.steps or demo.steps, out, args.checkpoints)
    save_prompts(out / "prompts.json", demo.adapters, np.random.default_rng(1), each=40)
    print(f"written to {out} after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
