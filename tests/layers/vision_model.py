"""A small vision-language model, its inputs, and its copies with merged weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora
from tests.layers.merging import Target, normal

PATCH, WIDTH, HIDDEN, VOCAB, LENGTH, POOL = 6, 8, 12, 16, 8, 4

TARGETS = (
    Target("visual.embed", PATCH, WIDTH, "visual.embed.kernel"),
    Target("visual.qkv", WIDTH, 3 * WIDTH, "visual.qkv.kernel"),
    Target("visual.merger.fc", POOL * WIDTH, HIDDEN, "visual.merger.fc.kernel"),
    Target("text.embed", VOCAB, HIDDEN, "text.embed.embedding", kind="embedding"),
    Target("text.q", HIDDEN, HIDDEN, "text.q.kernel"),
    Target("text.mlp", HIDDEN, HIDDEN, "text.mlp.kernel"),
    Target("text.lm_head", HIDDEN, VOCAB, "text.lm_head.kernel"),
)
ROW_GROUPS = {"visual": "images", "visual.merger": "merged"}


class Merger(nnx.Module):
    """Joins 4 consecutive patches of an image to one token."""

    def __init__(self, rngs):
        self.fc = nnx.Linear(POOL * WIDTH, HIDDEN, rngs=rngs)

    def __call__(self, x):
        return self.fc(x.reshape(*x.shape[:-2], x.shape[-2] // POOL, POOL * WIDTH))


class Visual(nnx.Module):
    """Attention among the patches of each image, over patches [..., patches, PATCH]."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(PATCH, WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.merger = Merger(rngs)

    def __call__(self, patches, image):
        x = self.embed(patches)
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        scores = jnp.where(image[..., :, None] == image[..., None, :], q @ jnp.swapaxes(k, -1, -2), -1e9)
        return self.merger(x + jax.nn.softmax(scores, axis=-1) @ v)


class Text(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.q = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.mlp = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.lm_head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, tokens, images, places):
        """Causal attention over `tokens` [B, L], where token t is image token `places[b, t]` if that is not -1."""
        x = self.embed(tokens)
        if images is not None:
            x = jnp.where((places >= 0)[..., None], images.reshape(-1, HIDDEN)[places], x)
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), self.q(x) @ jnp.swapaxes(x, 1, 2), -1e9)
        x = x + jax.nn.softmax(scores, axis=-1) @ x
        return self.lm_head(x + jnp.tanh(self.mlp(x)))


class VisionModel(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.visual = Visual(rngs)
        self.text = Text(rngs)

    def __call__(self, inputs):
        images = None if inputs["patches"] is None else self.visual(inputs["patches"], inputs["image"])
        return self.text(inputs["tokens"], images, inputs["places"])


@dataclass(frozen=True)
class Images:
    """Inputs with images, and the `items` of `prepare` for them."""

    inputs: dict
    items: dict


def image_inputs(
    patches: Sequence[int],
    owners: Sequence[int | None],
    *,
    sequences: int = 3,
    pad: int | None = None,
    flattened: bool = True,
    seed: int = 0,
) -> Images:
    """Return inputs of `sequences` sequences with images in the given order.

    Args:
      patches: patches of each image, multiples of 4.
      owners: the sequence that reads each image.
      sequences: B.
      pad: rows of patches with padding.
      flattened: patches [rows, PATCH] of all images. False: [images, patches, PATCH], of images of one size.
      seed: seed of tokens and patches.
    """
    rng = np.random.default_rng(seed)
    total = sum(patches) if pad is None else pad
    places = np.full((sequences, LENGTH), -1)
    ends = np.cumsum(patches) // POOL
    for size, end, owner in zip(patches, ends, owners, strict=True):
        if owner is not None:
            free = 1 + int((places[owner] >= 0).sum())
            places[owner, free : free + size // POOL] = np.arange(end - size // POOL, end)
    image = np.append(np.repeat(np.arange(len(patches)), patches), np.full(total - sum(patches), -1))
    pixels = normal(total, PATCH, seed=seed)
    if flattened:
        merged = jlora.Items(owners, [size // POOL for size in patches], total // POOL)
        items = {"images": jlora.Items(owners, patches, total), "merged": merged}
    else:
        items = dict.fromkeys(["images", "merged"], jlora.Items(owners))
        pixels, image = pixels.reshape(-1, patches[0], PATCH), image.reshape(-1, patches[0])
    tokens = rng.integers(0, VOCAB, (sequences, LENGTH))
    return Images({"patches": pixels, "image": image, "tokens": tokens, "places": places}, items)
