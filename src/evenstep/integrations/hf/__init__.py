"""Training models of `transformers`: tasks, packed rows, adapters, and folders as the hub has them.

The core never imports this; it is loaded when a script or a run file names it, and needs the extra `hf`.
"""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.integrations.hf.models import from_config, from_pretrained
    from evenstep.integrations.hf.packing import Packing
    from evenstep.integrations.hf.saved import SavePretrained, save_pretrained
    from evenstep.integrations.hf.stages import layers_of
    from evenstep.integrations.hf.tasks import CausalLM, Classification, Seq2Seq

__all__ = [
    "CausalLM",
    "Classification",
    "Packing",
    "SavePretrained",
    "Seq2Seq",
    "from_config",
    "from_pretrained",
    "layers_of",
    "save_pretrained",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".models": "from_config from_pretrained",
        ".packing": "Packing",
        ".saved": "SavePretrained save_pretrained",
        ".stages": "layers_of",
        ".tasks": "CausalLM Classification Seq2Seq",
    },
)
