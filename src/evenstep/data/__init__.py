"""Data: which samples make which update, and how they are read."""

from evenstep.data.batch import Batch, Data, DataFault, GlobalBatch, Microbatch, Part, Position, ReadOptions, batches_in
from evenstep.data.from_loader import data_of
from evenstep.data.iterable import StreamData, UpdateData
from evenstep.data.loader import Reading
from evenstep.data.map_data import MapData
from evenstep.data.mixture import AllTasks, Mixing, Mixture, RoundRobin, Sampled
from evenstep.data.order import order
from evenstep.data.split import samples_in

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
    "ReadOptions",
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
