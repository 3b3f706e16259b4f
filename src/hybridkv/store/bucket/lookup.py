"""Looking up many names: HEAD requests in parallel, and listings where many names share a directory.

Keys are digests, so the names of a large lookup spread evenly over the directories of their group (256 of them). One
LIST request tells which names exist in a directory of up to 1,000 objects. S3 charges for it as for 12 HEAD requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from hybridkv.errors import StoreError
from hybridkv.store.bucket.client import PAGE, Client
from hybridkv.store.bucket.parallel import Call, Parallel

_NAMES_PER_LISTING = 16
"""A page of a listing is asked for if it settles about so many names or more."""

Sizes = dict[str, int]


def sizes(client: Client, parallel: Parallel, keys: Sequence[str]) -> Sizes:
    """Sizes of those objects that exist, in one round trip. Raises StoreFault."""
    if len(keys) <= 1:
        return {key: size for key in keys if (size := client.size(key)) is not None}
    directories: defaultdict[str, list[str]] = defaultdict(list)
    for key in set(keys):
        directories[key.rpartition("/")[0]].append(key)
    client.counted(0)
    calls: list[Call[Sizes]] = []
    for directory, wanted in directories.items():
        if len(wanted) >= _NAMES_PER_LISTING:
            calls.append(partial(_listed, client, directory, set(wanted)))
        else:
            calls += [partial(_asked, client, [key]) for key in wanted]
    found: Sizes = {}
    for result in parallel.run(calls):
        if isinstance(result, StoreError):
            raise result
        found.update(result)
    return found


async def _asked(client: Client, keys: Sequence[str]) -> Sizes:
    found = {}
    for key in keys:
        size = await client.size_async(key)
        if size is not None:
            found[key] = size
    return found


async def _listed(client: Client, directory: str, wanted: set[str]) -> Sizes:
    """List a directory as long as each page settles many names. The rest are asked for one by one."""
    found: Sizes = {}
    pages = client.listing(f"{directory}/")
    while True:
        client.counted(1, round_trips=0)
        page = await client.page(pages)
        keys = [one.key for one in page]
        found.update((one.key, one.nbytes) for one in page if one.key in wanted)
        if len(page) < PAGE:
            return found
        if sorted(keys) != keys:  # then nothing is known about keys that did not come
            break
        settled = {key for key in wanted if key <= keys[-1]}
        wanted = wanted - settled
        if len(settled) < _NAMES_PER_LISTING:
            break
    return found | await _asked(client, sorted(wanted - found.keys()))
