"""`hybridkv extract --dry-run`: bytes and hours of a run, from some samples that are computed and written for it."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from hybridkv.cli.extract_input import Prompts
from hybridkv.cli.extract_run import Done, Extraction, Ready, Taps
from hybridkv.errors import DiskError, ReplyError
from hybridkv.units import format_bytes

if TYPE_CHECKING:
    from hybridkv.taps import Manifest, TapFolder

_MOST_TOKENIZED = 1000
_MOST_COMPUTED = 64
_SECONDS = 5.0
_IN_FLIGHT_BYTES = 1 << 30


def estimate(extraction: Extraction, prompts: Prompts, folder: TapFolder, manifest: Manifest, taps: Taps) -> str:
    """What is left to do, in words. Samples are drawn at equal distances."""
    there = folder.places()
    left = prompts.count - len(there)
    if left <= 0:
        return f"{folder.directory} is complete: all {prompts.count:,} samples are there"
    step = -(-left // _MOST_TOKENIZED)
    some = list(extraction.tokenize(itertools.islice(prompts.without(there), 0, None, step)))
    tokens = round(sum(one.prompt.num_tokens for one in some) / len(some) * left)
    done, speed = _measure(extraction, some[:: -(-len(some) // _MOST_COMPUTED)], folder.directory, manifest, taps)
    measured = sum(one.ready.prompt.num_tokens for one in done)
    nbytes = sum(one.nbytes for one in done) / measured * tokens
    about = "" if step == 1 else "about "
    free = shutil.disk_usage(_existing(folder.directory)).free
    layers = ",".join(map(str, manifest.layers))
    return (
        f"{left:,} samples, {about}{tokens:,} tokens, layers {layers} as {manifest.dtype}\n"
        f"bytes: about {format_bytes(nbytes)}; {format_bytes(free)} are free{': too little' if nbytes > free else ''}\n"
        f"time: about {_duration(tokens / speed)}, at {speed:,.0f} tokens/s, as {len(done)} samples show"
    )


def _measure(
    extraction: Extraction, samples: Sequence[Ready], out: Path, manifest: Manifest, taps: Taps
) -> tuple[list[Done], float]:
    """Compute and write samples on the disk of `out`, in batches of 1, 2, 4 ..., for some seconds.

    Returns what was done, and the tokens a second of the last batch, which is the largest.
    """
    from hybridkv.taps import TapFolder, TapWriter

    done: list[Done] = []
    began, speed = time.monotonic(), 0.0
    with ExitStack() as stack:
        try:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix=".hybridkv-", dir=_existing(out)))
        except OSError as error:
            raise DiskError(f"cannot write beside {out}: {error.strerror}") from None
        writer = stack.enter_context(TapWriter(stack.enter_context(TapFolder(place)), manifest))
        while len(done) < len(samples) and time.monotonic() - began < _SECONDS:
            batch = samples[len(done) : 2 * len(done) + 1]
            start = time.monotonic()
            extraction.run(
                batch,
                writer.submit,
                done.append,
                bytes_per_token=taps.bytes_per_token(),
                in_flight_bytes=_IN_FLIGHT_BYTES,
            )
            speed = sum(one.prompt.num_tokens for one in batch) / (time.monotonic() - start)
    errors = [one.error for one in done if one.error is not None]
    if errors:
        raise ReplyError(f"{len(errors)} of {len(done)} samples failed: {errors[0]}")
    return done, speed


def _duration(seconds: float) -> str:
    if seconds < 3600:
        return f"{seconds / 60:,.1f} minutes"
    return f"{seconds / 3600:,.1f} hours"


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())
