"""Every public name of jlora, imported. `jlora/__init__.py` hands them out when the first of them is used."""

from jlora.adapters import Adapter as Adapter
from jlora.adapters import ModuleLoRA as ModuleLoRA
from jlora.config import LoRAConfig as LoRAConfig
from jlora.config import LoRARequest as LoRARequest
from jlora.errors import AdapterFormatError as AdapterFormatError
from jlora.errors import AdapterInUseError as AdapterInUseError
from jlora.errors import AdapterMismatchError as AdapterMismatchError
from jlora.errors import AdapterNotFoundError as AdapterNotFoundError
from jlora.errors import LoadTimeoutError as LoadTimeoutError
from jlora.errors import LoRAError as LoRAError
from jlora.errors import LoRAUsageError as LoRAUsageError
from jlora.errors import NoFreeSlotError as NoFreeSlotError
from jlora.layers.batch import LoRABatch as LoRABatch
from jlora.layers.linear import LinearLayer as LinearLayer
from jlora.layers.rows import RowMap as RowMap
from jlora.layers.rows import rows as rows
from jlora.layers.scope import use as use
from jlora.layers.site import SlotParam as SlotParam
from jlora.layers.site import SlotRanks as SlotRanks
from jlora.layers.wrap import register_layer as register_layer
from jlora.manager.leases import AdapterHandle as AdapterHandle
from jlora.manager.leases import LeaseInfo as LeaseInfo
from jlora.manager.manager import LoRAManager as LoRAManager
from jlora.manager.report import AdapterInfo as AdapterInfo
from jlora.manager.report import Stats as Stats
