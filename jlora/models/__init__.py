"""Reference decoder: Llama, Mistral, Qwen2 and Qwen3 checkpoints as a Flax NNX module, with a generation loop."""

from jlora.models.checkpoint import from_pretrained as from_pretrained
from jlora.models.config import DecoderConfig as DecoderConfig
from jlora.models.config import ModelError as ModelError
from jlora.models.config import RopeConfig as RopeConfig
from jlora.models.decoder import Decoder as Decoder
from jlora.models.generation import generate as generate
