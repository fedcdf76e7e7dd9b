"""Data: which samples make which update, and how they are read."""

from typing import TYPE_CHECKING

from evenstep.data.order import order
from evenstep.lazy import lazy_names

if TYPE_CHECKING:
    from evenstep.data.batch import Data, DataFault, GlobalBatch, Microbatch, Part, Position
    from evenstep.data.fetch import Reading
    from evenstep.data.map_data import MapData
    from evenstep.data.mixture import AllTasks, Mixing, Mixture, RoundRobin, Sampled
    from evenstep.data.resolve import data_of
    from evenstep.data.split import samples_in
    from evenstep.data.stream_data import StreamData
    from evenstep.data.update_data import Batch, UpdateData, batches_in

__all__ = [
    "AllTasks",
    "Batch",
    "Data",
    "DataFault",
    "GlobalBatch",
    "MapData",
    "Microbatch",
    "Mixing",
    "Mixture",
    "Part",
    "Position",
    "Reading",
    "RoundRobin",
    "Sampled",
    "StreamData",
    "UpdateData",
    "batches_in",
    "data_of",
    "order",
    "samples_in",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".batch": "Data DataFault GlobalBatch Microbatch Part Position",
        ".map_data": "MapData",
        ".mixture": "AllTasks Mixing Mixture RoundRobin Sampled",
        ".fetch": "Reading",
        ".resolve": "data_of",
        ".split": "samples_in",
        ".stream_data": "StreamData",
        ".update_data": "Batch UpdateData batches_in",
    },
)
