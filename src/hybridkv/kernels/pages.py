"""Pages by number, on the device and on the host: reading and writing them. `PADDED` numbers are passed over."""

from __future__ import annotations

from torch import Tensor

from hybridkv.kernels.spans import PADDED


class PageNumbers:
    __slots__ = ("is_padded", "on_device", "on_host")

    def __init__(self, on_device: Tensor, on_host: list[int]) -> None:
        self.on_device = on_device
        """[n]"""
        self.on_host = on_host
        self.is_padded = PADDED in on_host

    def read(self, view: Tensor) -> Tensor:
        """view: [pages, *shape] -> [n, *shape]. Padding reads the null page."""
        return view.index_select(0, self._places())

    def write(self, values: Tensor, view: Tensor) -> None:
        """values: [n, *shape], view: [pages, *shape]. Padding changes nothing."""
        if view.device.type == "cpu":
            # Several times faster there than index_copy_, which is not made for rows that lie apart.
            for page, value in zip(self.on_host, values.unbind(0), strict=True):
                if page != PADDED:
                    view[page].copy_(value)
        elif self.on_host:
            self.write_together(values, view)

    def write_together(self, values: Tensor, view: Tensor) -> None:
        values = values.to(view.dtype, copy=self.is_padded)
        if self.is_padded:  # no row can be left out here: padding puts zeros in the null page, which has no others
            blank(values, self.on_device < 0)
        view.index_copy_(0, self._places(), values)

    def _places(self) -> Tensor:
        return self.on_device.clamp(min=0) if self.is_padded else self.on_device


def blank(x: Tensor, is_padding: Tensor) -> Tensor:
    """Make it zero where `is_padding`, whatever was there. x: [n, ...], is_padding: [n] of bool"""
    return x.masked_fill_(is_padding.view(-1, *[1] * (x.dim() - 1)), 0)
