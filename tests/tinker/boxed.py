r"""A tiny byte decoder that answers every prompt in the form "User: ...\n\nAssistant:" by `\boxed{digit}` at random.

    python -m tests.tinker.boxed FOLDER

The folder is a Hugging Face checkpoint of a Mistral with a tokenizer of bytes. It takes about 15 seconds of a core. Its
attention sees a short window, so prompts of any length up to 1,024 tokens are answered alike.
"""

import json
import sys
from pathlib import Path

import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jlora.models import Decoder, DecoderConfig

BYTES, BOS, EOS, PAD = 256, 256, 257, 258  # a byte is its own token
ASK, STOP = "\n\nAssistant:", "\n\nUser:"  # tinker_cookbook's renderer role_colon, of base models of Llama 3
WINDOW = 24  # positions that a token sees, so that rows of `LENGTH` train it for prompts of any length
CONFIG = DecoderConfig(
    vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, eos_token_ids=(EOS,),
    sliding_windows=(WINDOW, WINDOW),
)  # fmt: skip
STEPS, ROWS, LENGTH = 300, 16, 96
_WORDS = [
    b"How many",
    b"\n\nUser: ",
    b"\n\nAssistant: ",
    b"\\boxed{3}",
    b"inside \\boxed{}.",
    b"1) s 2) t",
    b"$12.\n",
    b"xxx",
]


def answer(digit: int) -> str:
    """Return the text that follows a prompt, up to the stop sequence."""
    return f" \\boxed{{{digit}}}{STOP}"


def write(folder: Path, steps: int = STEPS) -> float:
    """Train the decoder, and write it. Returns the mean loss of the last steps in nats for each token of an answer.

    The digit alone has a loss, ln 10, so the mean is at least ln 10 / 18.
    """
    rng, model = np.random.default_rng(0), Decoder(CONFIG, rngs=nnx.Rngs(0))
    rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, steps // 20, steps, 1e-4)
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, tokens, weights):
        def loss(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
            return (losses * weights[:, 1:]).sum() / weights.sum()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    last = []
    for _ in range(steps):
        value = step(model, optimizer, *_rows(rng))
        last = [*last[-15:], float(value)]
    _save(model, folder)
    return float(np.mean(last))


def _rows(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens [ROWS, LENGTH] int32 of prompts with an answer, and weights float32, 1 for those of the answer."""
    tokens, weights = np.full((ROWS, LENGTH), PAD, np.int32), np.zeros((ROWS, LENGTH), np.float32)
    for i in range(ROWS):
        end = [*answer(int(rng.integers(10))).encode(), EOS]
        head, room = [BOS, *b"User:"], LENGTH - len(end) - len(ASK)
        words = [*rng.choice(_WORDS, LENGTH // 8), *(bytes(rng.integers(32, 127, 5)) for _ in range(LENGTH // 8))]
        text = b" ".join(rng.permutation(words))[: rng.integers(1, room - len(head) + 1)]
        row = [*head, *text, *ASK.encode(), *end]
        tokens[i, : len(row)] = row
        weights[i, len(row) - len(end) : len(row)] = 1
    return tokens, weights


def _save(model: Decoder, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        *parents, module, name = map(str, path)
        matrix = np.asarray(variable[...], np.float32)
        layer = model
        for key in path[:-1]:
            layer = layer[key] if isinstance(key, int) else getattr(layer, key)
        parts = model.packed_modules.get(module, (module,))  # merged projections
        cuts = np.cumsum(layer.output_sizes)[:-1] if hasattr(layer, "output_sizes") else len(parts)
        for part, piece in zip(parts, np.split(matrix, cuts, axis=-1), strict=True):
            turned = piece if name in ("embedding", "scale") else piece.T
            tensors[".".join((*parents, part, "weight"))] = np.ascontiguousarray(turned)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
        **{name: getattr(CONFIG, name) for name in shape}, "rope_theta": CONFIG.rope.theta,
        "tie_word_embeddings": False, "sliding_window": WINDOW, "torch_dtype": "float32",
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes without a chat template, which adds `<bos>` to no text."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that stand for themselves
    rest = [byte for byte in range(BYTES) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG.max_position_embeddings,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    print(f"loss {write(Path(sys.argv[1])):.4f}, at least {np.log(10) / 18:.4f}")
