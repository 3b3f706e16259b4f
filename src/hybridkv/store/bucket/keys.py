"""Keys of a store's objects in a bucket.

<prefix>/hybridkv-v1/objects/<namespace>/<group>/<two digits>/<key>   objects
<prefix>/hybridkv-v1/about/<namespace>.json                           descriptions
<prefix>/hybridkv-v1/used/<milliseconds>-<writer>-<kind>              notes of uses (notes.py)
"""

from __future__ import annotations

from hybridkv.store.names import ObjectName, is_group, is_key, is_namespace

ROOT = "hybridkv-v1"


class Keys:
    def __init__(self, prefix: str) -> None:
        root = f"{prefix}/{ROOT}" if prefix else ROOT
        self.objects = f"{root}/objects"
        self.about = f"{root}/about"
        self.used = f"{root}/used"

    def object(self, name: ObjectName) -> str:
        return f"{self.objects}/{name.path}"

    def description(self, namespace: str) -> str:
        return f"{self.about}/{namespace}.json"

    def name(self, key: str) -> ObjectName | None:
        """None: the key is not one of an object of ours."""
        parts = key.removeprefix(f"{self.objects}/").split("/")
        if not key.startswith(f"{self.objects}/") or len(parts) != 4:
            return None
        namespace, group, digits, digest = parts
        if not (is_namespace(namespace) and is_group(group) and is_key(digest) and digest.startswith(digits)):
            return None
        return ObjectName(namespace, group, digest) if len(digits) == 2 else None

    def namespace(self, key: str) -> str | None:
        """The namespace whose description lies under this key."""
        stem = key.removeprefix(f"{self.about}/").removesuffix(".json")
        return stem if is_namespace(stem) and key == self.description(stem) else None

    def listed(self, namespace: str | None, group: str | None) -> str:
        """The longest prefix that all objects of this namespace and group share."""
        if namespace is None:
            return self.objects
        return f"{self.objects}/{namespace}" if group is None else f"{self.objects}/{namespace}/{group}"
