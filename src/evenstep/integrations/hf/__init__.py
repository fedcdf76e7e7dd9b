"""Training models of `transformers`: tasks, packed rows, adapters, and folders as the hub has them.

The core never imports this; it is loaded when a script or a run file names it, and needs the extra `hf`."""

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
