"""Ways of mixing tasks: which of them an update takes batches of, one file each."""

from evenstep.data.mixing.all_tasks import AllTasks
from evenstep.data.mixing.mixing import Mixing
from evenstep.data.mixing.round_robin import RoundRobin
from evenstep.data.mixing.sampled import Sampled

__all__ = ["AllTasks", "Mixing", "RoundRobin", "Sampled"]
