"""Streaming between pages and stores: rows are loaded and dumped layer by layer, and store faults fail no request.

The package knows no requests and imports no torch. Callers with pages in a torch buffer import `torch_io`.
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
