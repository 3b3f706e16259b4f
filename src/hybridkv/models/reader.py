"""Find a model's config, read it, and turn it into a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridkv.errors import ConfigError, HybridKVError, ParallelismError
from hybridkv.files import FileError, read_json
from hybridkv.models import families as _families  # noqa: F401  (fills FAMILIES)
from hybridkv.models.catalogue import find, similar
from hybridkv.models.config import Config
from hybridkv.models.families.refused import check_known_past
from hybridkv.models.families.unknown import family_of
from hybridkv.models.family import FAMILIES, make_layers
from hybridkv.models.layers import hidden_tap
from hybridkv.models.mtp import mtp_specs, num_mtp_layers
from hybridkv.spec import DType, ModelSpec

# Sizes tried when we say which tensor-parallel sizes would work.
_COMMON_TP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32)

_RENAMED_TEXT = {"kimi_k2": "deepseek_v3"}
"""Types of text configs as published -> as transformers reads them."""


@dataclass(frozen=True, slots=True)
class Source:
    """A config and where it came from."""

    name: str
    config: Mapping[str, Any]
    text: str
    verified: bool


def load_model(
    model: str | Path,
    *,
    tp: int = 1,
    rank: int = 0,
    kv_cache_dtype: DType | None = None,
    state_dtype: DType | None = None,
    taps: Sequence[int] = (),
    mtp: bool = False,
) -> ModelSpec:
    """The spec of `model`: a directory with a config.json, such a file, or a name of the catalogue."""
    source = locate(model)
    return read_config(
        source.config,
        name=source.name,
        tp=tp,
        rank=rank,
        kv_cache_dtype=kv_cache_dtype,
        state_dtype=state_dtype,
        taps=taps,
        mtp=mtp,
        source=source.text,
        verified=source.verified,
    )


def read_config(
    config: Mapping[str, Any],
    *,
    name: str,
    tp: int = 1,
    rank: int = 0,
    kv_cache_dtype: DType | None = None,
    state_dtype: DType | None = None,
    taps: Sequence[int] = (),
    mtp: bool = False,
    source: str = "a config",
    verified: bool = True,
) -> ModelSpec:
    """The spec of a config that is already in memory.

    KV takes the model's dtype unless `kv_cache_dtype` says otherwise. Recurrent states take `state_dtype`, else what
    the config asks for, else float32: rounding errors in them live as long as the sequence. `mtp`: with the past of its
    layers for multi-token prediction.
    """
    if not isinstance(tp, int) or not 1 <= tp <= 4096 or not 0 <= rank < tp:
        raise ParallelismError(f"rank {rank} of tensor-parallel size {tp}: the size is 1 to 4096, ranks count from 0")
    cfg = open_config(config, name)
    cfg = replace(
        cfg, tp=tp, rank=rank, kv_cache_dtype=kv_cache_dtype or cfg.dtype, state_dtype=state_dtype or cfg.state_dtype
    )
    layers = family_of(cfg.model_type).describe(cfg)
    num_layers = len(layers.types)
    try:
        specs = make_layers(cfg, layers)
        if mtp:
            specs += mtp_specs(cfg, layers, specs)
    except ParallelismError as error:
        raise ParallelismError(f"{error}; sizes that work: {_working_sizes(cfg)}") from None
    for tap in taps:
        if not 0 <= tap <= num_layers:
            raise ConfigError(f"{name} has no layer {tap} to tap: choose from 0 to {num_layers}")
    return ModelSpec(
        name=name,
        model_type=cfg.model_type,
        num_layers=num_layers,
        hidden_size=cfg.integer("hidden_size"),
        dtype=cfg.dtype,
        tp=tp,
        rank=rank,
        layers=(*specs, *(hidden_tap(tap, cfg.integer("hidden_size"), cfg.dtype) for tap in sorted(set(taps)))),
        source=source,
        verified=verified,
        num_mtp_layers=num_mtp_layers(cfg) if mtp else 0,
        has_record=cfg.model_type in FAMILIES,
    )


def open_config(config: Mapping[str, Any], name: str) -> Config:
    """The config of the language model (multimodal models nest it), with its family's defaults and its own dtypes.

    Raises ConfigError for types that keep a past of a kind that hybridkv does not know.
    """
    whole = config
    config = _object(whole, "thinker_config", name) or whole  # of Qwen3-Omni: the part that writes text
    outer = config.get("model_type")
    if not isinstance(outer, str):
        raise ConfigError(f"config of {name}: model_type is {outer!r}; is it the config.json of a transformers model?")
    text, model_type = config, outer
    if outer not in FAMILIES and ("text_config" in config or f"{outer}_text" in FAMILIES):
        text = _object(config, "text_config", name)
        model_type = text.get("model_type") or f"{outer}_text"
        if isinstance(model_type, str):
            model_type = _RENAMED_TEXT.get(model_type, model_type)
        if "tie_word_embeddings" in config:  # the composite model has the head
            text = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
    elif outer in FAMILIES and "layer_types" in config:
        model_type = FAMILIES[outer].with_layer_types or outer
    if not isinstance(model_type, str):
        raise ConfigError(f"{name} is of the unknown model type {model_type!r}: we read {', '.join(sorted(FAMILIES))}")
    for one in (outer, model_type):
        check_known_past(one, name)
    stated = next((c[key] for c in (text, config, whole) for key in ("dtype", "torch_dtype") if c.get(key)), None)
    cfg = Config(
        name, model_type, text, family_of(model_type).defaults, dtype=_dtype(name, "dtype", stated, DType.BFLOAT16)
    )
    wanted = cfg.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default=None)
    return replace(cfg, state_dtype=_dtype(name, "mamba_ssm_cache_dtype", wanted, DType.FLOAT32))


def _object(config: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """A config inside another one; null or nothing is an empty one."""
    inner = config.get(key) or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config of {name}: {key} is {inner!r}, expected an object")
    return inner


def _dtype(name: str, key: str, stated: Any, default: DType) -> DType:
    if stated is None:
        return default
    if not isinstance(stated, str):
        raise ConfigError(f"config of {name}: {key} is {stated!r}, expected a name such as 'bfloat16'")
    try:
        return DType.parse(stated)
    except HybridKVError as error:
        raise ConfigError(f"config of {name}: {key}: {error}") from None


def _working_sizes(cfg: Config) -> str:
    def works(tp: int) -> bool:
        probe = replace(cfg, tp=tp, rank=0)
        try:
            make_layers(probe, family_of(cfg.model_type).describe(probe))
        except ParallelismError:
            return False
        return True

    return ", ".join(str(tp) for tp in _COMMON_TP if works(tp))


def locate(model: str | Path) -> Source:
    """The config of `model`: a directory with a config.json, such a file, or a name of the catalogue."""
    path = _config_path(Path(model))
    if path is not None:
        config = read_config_file(path)
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return Source(name, _as_transformers_reads(config), str(path), verified=True)
    entry = find(str(model))
    if entry is not None:
        return Source(entry.name, entry.config, entry.source, verified=entry.verified_by is not None)
    close = similar(str(model))
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise ConfigError(
        f"unknown model {str(model)[:200]!r}: {hint}name a directory with a config.json, or a model that "
        "'hybridkv models' lists"
    )


def _as_transformers_reads(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a published type under that of transformers. For plans: the engine runs a type as it is, or not."""
    written = config.get("model_type")
    return {**config, "model_type": _RENAMED_TEXT[written]} if written in _RENAMED_TEXT else config


def _config_path(path: Path) -> Path | None:
    """The config.json that `path` names, if it names anything on disk."""
    try:
        if path.is_dir():
            path = path / "config.json"
            if not _is_there(path):
                raise ConfigError(
                    f"{path.parent} has no config.json: name a directory a transformers model was saved to"
                )
        return path if _is_there(path) else None
    except PermissionError as error:
        raise ConfigError(f"cannot look into {path}: {error.strerror}; check its permissions") from None
    except OSError:  # too long for a path: it can still be a name
        return None


def _is_there(path: Path) -> bool:
    """Whether anything is at `path`, be it a link to nothing: reading it says what is wrong with it."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null byte
        return False
    return True


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the content of a config.json. Raises ConfigError if it cannot be read or is no object."""
    try:
        config = read_json(path)
    except FileError as error:
        raise ConfigError(f"cannot read {path}: {error}; it must be the config.json of a transformers model") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object: name a model's config.json")
    return config
