"""Layerwise traffic between the arena and stores: rows in, rows out, every fault survived. Knows no requests."""

from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.dump import Outgoing
from hybridkv.stream.keys import BlockKeys
from hybridkv.stream.load import Load
from hybridkv.stream.stats import StreamStats
from hybridkv.stream.step import StepTransfers
from hybridkv.stream.streamer import LOAD_TIMEOUT_S, Fetch, Streamer

__all__ = [
    "LOAD_TIMEOUT_S",
    "BlockKeys",
    "Catalogue",
    "Fetch",
    "Load",
    "Outgoing",
    "StepTransfers",
    "StreamStats",
    "Streamer",
]
