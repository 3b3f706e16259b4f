"""Pages by number, on the device and on the host, and writing to them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pages(NamedTuple):
    on_device: Tensor
    """[n]"""
    on_host: list[int]

    def write(self, values: Tensor, view: Tensor) -> None:
        """values: [n, *shape], view: [pages, *shape]"""
        if view.device.type == "cpu":
            # Several times faster there than index_copy_, which is not made for rows that lie apart.
            for page, value in zip(self.on_host, values.unbind(0), strict=True):
                view[page].copy_(value)
        elif self.on_host:
            view.index_copy_(0, self.on_device, values.to(view.dtype))
