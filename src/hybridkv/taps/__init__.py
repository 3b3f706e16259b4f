"""Hidden states on disk: written by `hybridkv extract`, read by trainers with `hybridkv.taps.open(directory)`.

The package needs torch and safetensors. It knows no engine: rows come in as tensors and go out as tensors.
"""

from hybridkv.taps.folder import TapFolder
from hybridkv.taps.manifest import VERSION, Manifest
from hybridkv.taps.reader import TapDataset, TapStream, open
from hybridkv.taps.writer import TapWriter

__all__ = ["VERSION", "Manifest", "TapDataset", "TapFolder", "TapStream", "TapWriter", "open"]
