"""Data: which samples make which update, and how they are read."""

from evenstep.data.batch import Data, DataFault, GlobalBatch, Microbatch, Position
from evenstep.data.map_data import MapData
from evenstep.data.order import order
from evenstep.data.stream import samples_in
from evenstep.data.stream_data import StreamData

__all__ = ["Data", "DataFault", "GlobalBatch", "MapData", "Microbatch", "Position", "StreamData", "order", "samples_in"]
