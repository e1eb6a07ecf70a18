"""Train the demo: a small Llama that copies letters, and four LoRA adapters trained at once, in one batch.

    python examples/train_demo.py [--out jlora/demo] [--base-steps 800] [--steps 900]

Takes about four minutes on two CPU cores. The adapters are trained through jlora's own layers: each of the four has its
slot, every batch holds rows of all four, and one optimizer step updates all slots. What is written is what anybody
would have: a Hugging Face checkpoint, a tokenizer, and PEFT adapter folders.
"""

import argparse
import json
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

import jlora
from jlora.models import Decoder, DecoderConfig

PAD, BOS, EOS, EQUALS, FIRST_LETTER = range(5)
LETTERS = 26
SHORTEST, LONGEST = 3, 8
ROW = 1 + LONGEST + 1 + LONGEST + 1  # <bos> word = answer <eos>

CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=448,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    eos_token_ids=(EOS,),
)

# A word is an array of different letters 0..25.
TASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "reverse": lambda word: word[::-1],
    "sort": np.sort,
    "shift": lambda word: (word + 1) % LETTERS,
    "swap": lambda word: np.concatenate([word[i : i + 2][::-1] for i in range(0, len(word), 2)]),
}
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# name -> (rank, target modules)
ADAPTERS = {
    "reverse": (16, ATTENTION + MLP),
    "sort": (32, ATTENTION + MLP),
    "shift": (4, ATTENTION + MLP),
    "swap": (16, ATTENTION),
}


def copy(word: np.ndarray) -> np.ndarray:
    return word


def draw(rng: np.random.Generator, count: int, held_out: bool) -> list[np.ndarray]:
    """Random words of different letters. One word in ten is held out of training, decided by its letters alone."""
    words = []
    while len(words) < count:
        word = rng.permutation(LETTERS)[: rng.integers(SHORTEST, LONGEST + 1)]
        if (zlib.crc32(bytes(word.tolist())) % 10 == 0) == held_out:
            words.append(word)
    return words


def rows(words: list[np.ndarray], task: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [words, ROW], and a mask of the positions whose next token belongs to the answer."""
    tokens, mask = np.full((len(words), ROW), PAD, np.int32), np.zeros((len(words), ROW), np.float32)
    for i, word in enumerate(words):
        row = [BOS, *(word + FIRST_LETTER), EQUALS, *(task(word) + FIRST_LETTER), EOS]
        tokens[i, : len(row)] = row
        mask[i, len(word) + 1 : len(row) - 1] = 1
    return tokens, mask


def answer_loss(logits, tokens, mask):
    """Mean loss of the answers' tokens, and which rows are answered without a mistake."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    mask = mask[:, :-1]
    right = ((logits.argmax(-1) == tokens[:, 1:]) | (mask == 0)).all(-1)
    return (losses * mask).sum() / mask.sum(), right


def optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps, rate / 50)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))


def train(name: str, steps: int, rate: float, split: tuple, loss: Callable, batches: Callable) -> None:
    """AdamW on the variables of `split` = (model, filter); the trained values are put back into the model."""
    model, trained = split
    graphdef, params, rest = nnx.split(model, trained, ...)
    opt = optimizer(rate, steps)
    state = opt.init(params)

    @jax.jit
    def step(params, rest, state, *batch):
        def of(params):
            return loss(nnx.merge(graphdef, params, rest), *batch)

        (value, right), grads = jax.value_and_grad(of, has_aux=True)(params)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, right

    started = time.time()
    for i in range(steps):
        params, state, value, right = step(params, rest, state, *batches())
        if i % 100 == 0 or i == steps - 1:
            seconds = time.time() - started
            print(f"{name}: step {i:4d}  loss {value:.4f}  right {right.mean():.3f}  {seconds:.0f} s", flush=True)
    nnx.update(model, params)


def train_base(model: Decoder, steps: int, rng: np.random.Generator) -> None:
    def loss(model, tokens, mask):
        return answer_loss(model(tokens[:, :-1]), tokens, mask)

    train("base", steps, 2e-3, (model, nnx.Param), loss, lambda: rows(draw(rng, 64, False), copy))


def fresh_adapter(name: str, rng: np.random.Generator) -> jlora.Adapter:
    """A random and B zero, as PEFT starts."""
    rank, targets = ADAPTERS[name]
    heads, keys = CONFIG.num_attention_heads * CONFIG.head_dim, CONFIG.num_key_value_heads * CONFIG.head_dim
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    sizes = dict(zip(ATTENTION, ((hidden, heads), (hidden, keys), (hidden, keys), (heads, hidden)), strict=True))
    sizes |= dict(zip(MLP, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True))
    arrays = {}
    for layer in range(CONFIG.num_hidden_layers):
        for target in targets:
            k, n = sizes[target]
            a = rng.normal(0, k**-0.5, (rank, k)).astype(np.float32)
            arrays[f"model.layers.{layer}.{target}"] = (a, np.zeros((n, rank), np.float32))
    return jlora.Adapter.from_arrays(name, arrays, alpha=2 * rank, base_model_name="jlora-demo")


def train_adapters(model: Decoder, steps: int, rng: np.random.Generator, out: Path) -> None:
    projections = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    config = jlora.LoRAConfig(max_loras=4, max_lora_rank=32, target_modules=projections)
    manager = jlora.LoRAManager(model, config)
    for name in ADAPTERS:
        manager.add_adapter(fresh_adapter(name, rng))
    each = 24
    batch = manager.prepare([name for name in ADAPTERS for _ in range(each)])

    def loss(model, batch, tokens, mask):
        with jlora.use(batch):
            return answer_loss(model(tokens[:, :-1]), tokens, mask)

    def batches():
        parts = [rows(draw(rng, each, False), TASKS[name]) for name in ADAPTERS]
        return batch, *(np.concatenate(column) for column in zip(*parts, strict=True))

    def factors(_, variable):
        return isinstance(variable, jlora.SlotParam) and not isinstance(variable, jlora.SlotRanks)

    train("adapters", steps, 3e-3, (model, factors), loss, batches)
    for name in ADAPTERS:
        adapter = manager.export_adapter(name)
        arrays = {
            module: (lora.a.astype(ml_dtypes.bfloat16), lora.b.astype(ml_dtypes.bfloat16))
            for module, lora in adapter.modules.items()
        }
        alpha = {module: lora.alpha for module, lora in adapter.modules.items()}
        jlora.Adapter.from_arrays(name, arrays, alpha=alpha, base_model_name="jlora-demo").save_pretrained(
            out / "adapters" / name
        )
    batch.close()
    manager.unwrap()


def save_base(model: Decoder, folder: Path) -> None:
    """The checkpoint as Hugging Face has it: kernels [out, in], merged projections apart, bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    leaf = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.asarray(variable[...]).astype(ml_dtypes.bfloat16)
        *parents, module, name = map(str, path)
        parts = model.packed_modules.get(module, (module,))
        layer = model
        for key in path[:-1]:
            layer = layer[key] if isinstance(key, int) else getattr(layer, key)
        cuts = np.cumsum(getattr(layer, "output_sizes", ()))[:-1] if len(parts) > 1 else []
        for part, piece in zip(parts, np.split(array, cuts, axis=-1), strict=True):
            stored = piece.T if name == "kernel" else piece
            tensors[".".join((*parents, part, leaf[name]))] = np.ascontiguousarray(stored)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": CONFIG.vocab_size,
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_hidden_layers": CONFIG.num_hidden_layers,
        "num_attention_heads": CONFIG.num_attention_heads,
        "num_key_value_heads": CONFIG.num_key_value_heads,
        "head_dim": CONFIG.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope.theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_tokenizer(folder: Path) -> None:
    """One token a letter; `<bos>` is put in front of every text."""
    specials = ["<pad>", "<bos>", "<eos>", "="]
    letters = [chr(ord("a") + i) for i in range(LETTERS)]
    vocab = {token: i for i, token in enumerate([*specials, *letters, "<unk>", "<unused>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<unk>", "<unused>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_prompts(file: Path, rng: np.random.Generator, each: int) -> None:
    """Held-out prompts for the base (adapter null: copy) and every adapter, mixed; no answer equals its word."""

    def text(word):
        return "".join(chr(ord("a") + letter) for letter in word)

    prompts = []
    for name, task in {None: copy, **TASKS}.items():
        words = [word for word in draw(rng, 8 * each, True) if name is None or text(task(word)) != text(word)]
        prompts += [{"adapter": name, "prompt": f"{text(word)}=", "answer": text(task(word))} for word in words[:each]]
    order = rng.permutation(len(prompts))
    file.write_text("[\n" + ",\n".join("  " + json.dumps(prompts[i]) for i in order) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "jlora" / "demo")
    parser.add_argument("--base-steps", type=int, default=800)
    parser.add_argument("--steps", type=int, default=900)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    started = time.time()
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    train_base(model, args.base_steps, rng)
    # The adapters are trained on the weights that are shipped: rounded to bfloat16.
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), nnx.state(model, nnx.Param)))
    for folder in ("model", "adapters"):
        shutil.rmtree(args.out / folder, ignore_errors=True)
    save_base(model, args.out / "model")
    save_tokenizer(args.out / "model")
    train_adapters(model, args.steps, rng, args.out)
    save_prompts(args.out / "prompts.json", np.random.default_rng(1), each=40)
    print(f"written to {args.out} after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
