# ruff: noqa: I001 - it would write a statement per name

from evenstep.integrations.hf.models import from_config as from_config, from_pretrained as from_pretrained
from evenstep.integrations.hf.packing import Packing as Packing
from evenstep.integrations.hf.saved import SavePretrained as SavePretrained, save_pretrained as save_pretrained
from evenstep.integrations.hf.stages import layers_of as layers_of
from evenstep.integrations.hf.tasks import CausalLM as CausalLM, Classification as Classification, Seq2Seq as Seq2Seq

__all__: list[str]
