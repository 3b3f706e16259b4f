"""Layerwise traffic between pages and stores: rows in, rows out, every fault survived. Knows no requests, and no torch.

`torch_io`, for pages of a torch buffer, is imported by those who have one.
"""

from hybridkv.stream.catalogue import Catalogue
from hybridkv.stream.dump import Outgoing
from hybridkv.stream.dump_rule import DumpPoint, DumpRule
from hybridkv.stream.finder import Fetch, Finder
from hybridkv.stream.keys import BlockKeys
from hybridkv.stream.load import Load
from hybridkv.stream.mover import LOAD_TIMEOUT_S, Mover
from hybridkv.stream.requests import PageRequest, Progress
from hybridkv.stream.row_io import Copy, HostPages, PageBytes
from hybridkv.stream.stats import StreamStats
from hybridkv.stream.step import StepTransfers
from hybridkv.stream.streamer import Streamer

__all__ = [
    "LOAD_TIMEOUT_S",
    "BlockKeys",
    "Catalogue",
    "Copy",
    "DumpPoint",
    "DumpRule",
    "Fetch",
    "Finder",
    "HostPages",
    "Load",
    "Mover",
    "Outgoing",
    "PageBytes",
    "PageRequest",
    "Progress",
    "StepTransfers",
    "StreamStats",
    "Streamer",
]
