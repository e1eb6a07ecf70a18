"""Reference decoder for Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 3, gpt-oss and MoE forms; a generation loop."""

from jlora.models.checkpoint import LoadProgress as LoadProgress
from jlora.models.checkpoint import from_pretrained as from_pretrained
from jlora.models.checkpoint import read_skeleton as read_skeleton
from jlora.models.checkpoint import read_weight as read_weight
from jlora.models.config import DecoderConfig as DecoderConfig
from jlora.models.config import MoEConfig as MoEConfig
from jlora.models.config import Quantize as Quantize
from jlora.models.config import RopeConfig as RopeConfig
from jlora.models.config import quantized_config as quantized_config
from jlora.models.config import read_config as read_config
from jlora.models.decoder import Decoder as Decoder
from jlora.models.files import embedding_files as embedding_files
from jlora.models.files import model_folder as model_folder
from jlora.models.generation import cache_size as cache_size
from jlora.models.generation import check_context as check_context
from jlora.models.generation import compiled_variants as compiled_variants
from jlora.models.generation import generate as generate
from jlora.models.json_file import ModelError as ModelError
from jlora.models.pooling import Pooling as Pooling
from jlora.models.pooling import read_pooling as read_pooling
from jlora.models.pooling import token_weights as token_weights
from jlora.models.quantized import QuantizedLinear as QuantizedLinear
from jlora.models.sampling import HOTTEST as HOTTEST
from jlora.models.sampling import Sampling as Sampling
from jlora.models.sampling import choose as choose
from jlora.models.sampling import likeliest as likeliest
