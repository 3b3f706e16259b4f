"""Matching: what one engine can send to another. The reason why not is an error that names the first difference."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.cache import Role
from hybridkv.link.errors import LinkMismatch
from hybridkv.link.geometry import Geometry
from hybridkv.link.places import GroupGeometry


class Match(NamedTuple):
    """A group on both sides, and the heads or slices that the source sends, as the whole model numbers them."""

    source: GroupGeometry
    target: GroupGeometry
    pieces: range


def match(source: Geometry, target: Geometry) -> dict[str, Match]:
    """By name: the groups that `source` sends to `target`. Raises `LinkMismatch` if there is none, or if they differ.

    A group is left out if another rank of the source sends it: if the shares do not overlap, or if several ranks hold
    the same and `source` is not the first of them. Groups of tapped layers may exist on one side only.
    """
    _check_equal("model type", source.model_type, target.model_type)
    _check_equal("identity of the weights", source.identity, target.identity)
    _check_equal("groups", _needed(source), _needed(target))
    found = {}
    for name, theirs in target.groups.items():
        ours = source.groups.get(name)
        if ours is None:
            continue
        _check_groups(ours, theirs)
        pieces = _overlap(ours.pieces, theirs.pieces)
        if ours.is_writer and pieces:
            found[name] = Match(ours, theirs, pieces)
    if not found:
        shares = {name: (source.groups[name].share, target.groups[name].share) for name in _needed(target)}
        raise LinkMismatch(
            f"the source has nothing to send: no share of a group that it writes overlaps the target's, {shares}; "
            f"connect the target to another rank"
        )
    return found


def _needed(geometry: Geometry) -> list[str]:
    return sorted(name for name, group in geometry.groups.items() if group.role is not Role.TAP)


def _check_groups(ours: GroupGeometry, theirs: GroupGeometry) -> None:
    name = ours.name
    _check_equal(f"role of group {name!r}", ours.role.value, theirs.role.value)
    _check_equal(f"sight of group {name!r}", ours.sight, theirs.sight)
    _check_equal(f"slices of group {name!r}", ours.slices, theirs.slices)
    _check_equal(f"layers of group {name!r}", sorted(ours.layers), sorted(theirs.layers))
    for number, (_, layer) in ours.layers.items():
        other = theirs.layers[number][1]
        _check_equal(f"parts of layer {number} of group {name!r}", layer.parts, other.parts)


def _check_equal(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise LinkMismatch(
            f"{what}: {ours} at the source, {theirs} at the target; serve the same model with the same types on both"
        )


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
