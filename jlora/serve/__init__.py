"""A serving engine: continuous batching of requests that each have their own adapter. Needs no HTTP package."""

from jlora.serve.engine import Engine as Engine
from jlora.serve.lookups import Resolve as Resolve
from jlora.serve.model import ServableModel as ServableModel
from jlora.serve.options import EngineOptions as EngineOptions
from jlora.serve.request import MAX_LOGPROBS as MAX_LOGPROBS
from jlora.serve.request import AdapterExistsError as AdapterExistsError
from jlora.serve.request import Completion as Completion
from jlora.serve.request import EngineBusyError as EngineBusyError
from jlora.serve.request import EngineClosedError as EngineClosedError
from jlora.serve.request import EngineStats as EngineStats
from jlora.serve.request import FinishReason as FinishReason
from jlora.serve.request import Generation as Generation
from jlora.serve.request import Piece as Piece
from jlora.serve.request import RegisteredLoRA as RegisteredLoRA
from jlora.serve.request import RequestTimeoutError as RequestTimeoutError
from jlora.serve.request import SamplingParams as SamplingParams
from jlora.serve.request import StepFailedError as StepFailedError
from jlora.serve.request import TokenLogprob as TokenLogprob
