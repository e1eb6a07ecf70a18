"""Continuous batching for requests that each have their own adapter. Needs no HTTP package."""

from jlora.serve.client import push as push
from jlora.serve.engine.engine import Engine as Engine
from jlora.serve.engine.generation import Generation as Generation
from jlora.serve.engine.model import ScoringModel as ScoringModel
from jlora.serve.engine.model import ServableModel as ServableModel
from jlora.serve.engine.options import EngineOptions as EngineOptions
from jlora.serve.engine.request import MAX_LOGPROBS as MAX_LOGPROBS
from jlora.serve.engine.request import AdapterExistsError as AdapterExistsError
from jlora.serve.engine.request import Completion as Completion
from jlora.serve.engine.request import EngineBusyError as EngineBusyError
from jlora.serve.engine.request import EngineClosedError as EngineClosedError
from jlora.serve.engine.request import EngineStats as EngineStats
from jlora.serve.engine.request import FinishReason as FinishReason
from jlora.serve.engine.request import PauseMode as PauseMode
from jlora.serve.engine.request import Piece as Piece
from jlora.serve.engine.request import RegisteredLoRA as RegisteredLoRA
from jlora.serve.engine.request import RequestTimeoutError as RequestTimeoutError
from jlora.serve.engine.request import SamplingParams as SamplingParams
from jlora.serve.engine.request import StepFailedError as StepFailedError
from jlora.serve.engine.request import TokenLogprob as TokenLogprob
from jlora.serve.engine.resolvers import Resolve as Resolve
