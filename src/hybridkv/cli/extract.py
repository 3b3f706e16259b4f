"""`hybridkv extract`: hidden states of many prompts to files, for the training of draft models and probes."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybridkv.cli.engine_options import EngineOptions, ModelArgument, import_engine, takes_engine_options
from hybridkv.cli.extract_dataset import write_dataset
from hybridkv.cli.extract_estimate import estimate
from hybridkv.cli.extract_input import DatasetPrompts, Prompts, open_input
from hybridkv.cli.extract_progress import SampleBar
from hybridkv.cli.extract_run import Extraction, Taps
from hybridkv.cli.interrupts import INTERRUPTED
from hybridkv.cli.layers import parse_layers
from hybridkv.cli.tables import write
from hybridkv.errors import DiskError, InputError, ReplyError
from hybridkv.units import format_bytes, parse_size

if TYPE_CHECKING:
    from hybridkv.taps import Manifest, TapFolder


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for, checked."""

    prompts: Prompts
    out: Path
    layers: list[int | str]
    dtype: str
    max_tokens: int | None
    shard_bytes: int | None
    queue_bytes: int
    is_in_place: bool
    """Whether the folder is the input's own, which has a dataset already."""

    def manifest(self, engine: Any, adapter: str | None, taps: Taps) -> Manifest:
        from hybridkv.taps import Manifest

        return Manifest(
            model=engine.model_name if adapter is None else f"{engine.model_name} with adapter {adapter}",
            model_digest=engine.model_digest(adapter),
            layers=taps.layers,
            hidden_size=taps.hidden_size,
            **self.known(),
        )

    def known(self) -> dict[str, Any]:
        """Fields of the manifest that are known before the model is loaded."""
        return {
            "input_digest": self.prompts.digest,
            "dtype": self.dtype,
            "num_samples": self.prompts.count,
            "max_tokens": self.max_tokens,
        }


@takes_engine_options("dtype", "graphs", "seed")
def extract_command(
    model: ModelArgument,
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE|DIR",
            help="A .jsonl file with 'prompt', 'input_ids' or 'messages' a line, or a dataset folder.",
        ),
    ],
    layers: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Layers, such as 2,18,34: i is what enters decoder layer i, -1 the output of the last layer, "
            "final that after the final norm.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the files. One that exists is completed.")
    ],
    max_tokens: Annotated[int | None, typer.Option(help="Cut prompts to so many tokens. Default: cut none.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the files: bf16, fp32, or fp8 with a scale a token and layer.")
    ] = "bf16",
    shard: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Pack samples into files of this size: 1GiB ...")
    ] = None,
    queue: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for samples that are being computed or written.")
    ] = "2GiB",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; measure some samples, and say how much it would be.")
    ] = False,
    model_dtype: Annotated[str, typer.Option(help="Type of the weights: auto, bfloat16, float32 ...")] = "auto",
    *,
    options: EngineOptions,
) -> None:
    """Write hidden states of prompts to files, one a sample, as trainers of draft models read them.

    Interrupted, killed, or out of disk space: run the same command again, and it goes on where it was.
    """
    adapter = options.only_adapter()
    job = _checked(source, out, layers, dtype, max_tokens, shard, queue)
    engines = import_engine()
    params = engines.SamplingParams(max_tokens=1, temperature=0, hidden_layers=job.layers, hidden_tokens="prompt")
    at_once = min(options.max_num_seqs, job.prompts.count)
    with ExitStack() as stack:
        folder = _open_folder(job, stack, is_new=not dry_run)
        engine = stack.enter_context(
            replace(options, dtype=model_dtype, graphs=False, max_num_seqs=at_once).start(model)
        )
        extraction = Extraction(engine, params, max_tokens, adapter)
        taps = extraction.try_one()
        manifest = job.manifest(engine, adapter, taps)
        _check_same(folder, asdict(manifest))
        if dry_run:
            write(estimate(extraction, job.prompts, folder, manifest, taps))
        else:
            _extract(job, folder, manifest, extraction, taps)


def _checked(
    source: Path, out: Path, layers: str, dtype: str, max_tokens: int | None, shard: str | None, queue: str
) -> _Job:
    """Refuse what can be refused before torch is imported."""
    if dtype not in ("bf16", "fp32", "fp8"):
        raise InputError(f"--dtype {dtype}: choose bf16, fp32 or fp8")
    if max_tokens is not None and max_tokens < 1:
        raise InputError(f"--max-tokens {max_tokens}: a prompt has at least 1 token")
    shard_bytes = None if shard is None else parse_size(shard)
    if shard_bytes == 0:
        raise InputError(f"--shard {shard}: give a size such as 1GiB")
    parsed, queue_bytes = parse_layers("--layers", layers), parse_size(queue)
    prompts = open_input(source)
    is_in_place = isinstance(prompts, DatasetPrompts) and source.resolve() == out.resolve()
    if is_in_place and max_tokens is not None:
        raise InputError(
            f"--max-tokens with --out {out}, the dataset's own folder, would not fit it: name another --out"
        )
    return _Job(prompts, out, parsed, dtype, max_tokens, shard_bytes, queue_bytes, is_in_place)


def _open_folder(job: _Job, stack: ExitStack, *, is_new: bool) -> TapFolder:
    """Lock the folder, and compare it with what is known before the model is loaded."""
    from hybridkv.taps import TapFolder

    folder = TapFolder(job.out)
    if is_new:
        stack.enter_context(folder)
    _check_same(folder, job.known())
    return folder


def _check_same(folder: TapFolder, wanted: dict[str, Any]) -> None:
    from hybridkv.taps.manifest import check_same

    found = folder.manifest()
    if found is not None:
        check_same(folder.directory, found, wanted)


def _extract(job: _Job, folder: TapFolder, manifest: Manifest, extraction: Extraction, taps: Taps) -> None:
    from hybridkv.taps import TapWriter
    from hybridkv.taps.tensors import bytes_per_token

    began = time.monotonic()
    there = folder.recover()
    if folder.manifest() is None:
        for _ in extraction.tokenize(job.prompts):  # a bad line stops the command before anything is written
            pass
        folder.write_manifest(manifest)
    bar = SampleBar(job.prompts.count, len(there))
    stored = bytes_per_token(manifest.dtype, len(manifest.layers), manifest.hidden_size)
    try:
        with bar, TapWriter(folder, manifest, shard_bytes=job.shard_bytes) as writer:
            extraction.run(
                extraction.tokenize(job.prompts.without(there)),
                writer.submit,
                bar.count,
                bytes_per_token=taps.bytes_per_token() + stored,
                in_flight_bytes=job.queue_bytes,
            )
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {_kept(job, folder)}; run the same command again to go on", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except DiskError as error:
        raise DiskError(f"{error}; {_kept(job, folder)}: make room and run the same command again") from error
    if bar.errors:
        raise ReplyError(
            f"{len(bar.errors)} of {job.prompts.count} samples failed: {bar.errors[0]}; {_kept(job, folder)}"
        )
    note = "" if job.is_in_place else write_dataset(job.out, extraction.tokenize(job.prompts))
    write(_summary(job, bar, len(there), time.monotonic() - began) + note)


def _kept(job: _Job, folder: TapFolder) -> str:
    return f"{len(folder.places())} of {job.prompts.count} samples are in {job.out}"


def _summary(job: _Job, bar: SampleBar, num_before: int, seconds: float) -> str:
    remarks = []
    if num_before:
        remarks.append(f"{num_before:,} were there before")
    if bar.num_cut:
        remarks.append(f"{bar.num_cut:,} were cut to {job.max_tokens:,} tokens")
    text = f"{bar.num_written:,} samples, {bar.num_tokens:,} tokens, {format_bytes(bar.nbytes)} in {seconds:,.1f} s"
    return f"{job.out}: {text}" + (f" ({'; '.join(remarks)})" if remarks else "")
