"""Reference decoder for Llama, Mistral, Mixtral, Qwen2, Qwen3, their MoE forms and gpt-oss, and a generation loop."""

from jlora.models.checkpoint import from_pretrained as from_pretrained
from jlora.models.config import DecoderConfig as DecoderConfig
from jlora.models.config import MoEConfig as MoEConfig
from jlora.models.config import RopeConfig as RopeConfig
from jlora.models.decoder import Decoder as Decoder
from jlora.models.generation import generate as generate
from jlora.models.json_file import ModelError as ModelError
