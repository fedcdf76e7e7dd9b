"""Public names of this package and the modules they come from."""

from evenstep.integrations.hf.models import (
    from_config as from_config,
)
from evenstep.integrations.hf.models import (
    from_pretrained as from_pretrained,
)
from evenstep.integrations.hf.packing import (
    Packing as Packing,
)
from evenstep.integrations.hf.saved import (
    SavePretrained as SavePretrained,
)
from evenstep.integrations.hf.saved import (
    save_pretrained as save_pretrained,
)
from evenstep.integrations.hf.stages import (
    layers_of as layers_of,
)
from evenstep.integrations.hf.tasks import (
    CausalLM as CausalLM,
)
from evenstep.integrations.hf.tasks import (
    Classification as Classification,
)
from evenstep.integrations.hf.tasks import (
    Seq2Seq as Seq2Seq,
)

__all__: list[str]
