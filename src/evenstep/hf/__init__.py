"""Training models of `transformers`: tasks, packed rows, adapters, and folders as the hub has them.

The core never imports this; it is loaded when a script or a run file names it, and needs the extra `hf`.
"""

from typing import TYPE_CHECKING

from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.hf.classification import Classification
    from evenstep.hf.language import CausalLM, Seq2Seq
    from evenstep.hf.models import from_config, from_pretrained
    from evenstep.hf.packing import Packing
    from evenstep.hf.pretrained import SavePretrained
    from evenstep.hf.saving import save_pretrained

__all__ = [
    "CausalLM",
    "Classification",
    "Packing",
    "SavePretrained",
    "Seq2Seq",
    "from_config",
    "from_pretrained",
    "save_pretrained",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".classification": "Classification",
        ".language": "CausalLM Seq2Seq",
        ".models": "from_config from_pretrained",
        ".packing": "Packing",
        ".pretrained": "SavePretrained",
        ".saving": "save_pretrained",
    },
)
