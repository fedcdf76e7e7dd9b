"""Data: which samples make which update, and how they are read."""

from evenstep.data.batch import Data, DataFault, GlobalBatch, Microbatch, Part, Position
from evenstep.data.given import data_of
from evenstep.data.map_data import MapData
from evenstep.data.mixing import AllTasks, Mixing, RoundRobin, Sampled
from evenstep.data.mixture import Mixture
from evenstep.data.order import order
from evenstep.data.stream import samples_in
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
    "RoundRobin",
    "Sampled",
    "StreamData",
    "UpdateData",
    "batches_in",
    "data_of",
    "order",
    "samples_in",
]
