"""Weights as the CPU kernels read them: in the checkpoint's layout, with what a call needs at hand.

Rows of a checkpoint's weights are read at memory speed as they lie, so nothing is copied. An
address is only valid while its tensor lives: each object keeps the tensor beside it.
"""

from __future__ import annotations

from torch import Tensor

_BYTES_PER_ITEM = 32 * 1024
"""Weight bytes that a thread takes at once."""


class PackedLinear:
    """A weight `[N, K]` and its sizes as plain integers."""

    __slots__ = (
        "address", "columns_per_item", "dtype", "length", "num_columns", "num_items", "tensor",
    )  # fmt: skip

    def __init__(self, weight_NK: Tensor) -> None:
        self.tensor = weight_NK.contiguous()
        self.dtype = weight_NK.dtype
        self.num_columns, self.length = weight_NK.shape
        self.address = self.tensor.data_ptr()
        row_bytes = max(1, self.length * self.tensor.element_size())
        self.columns_per_item = max(8, _BYTES_PER_ITEM // row_bytes // 8 * 8)
        self.num_items = -(-self.num_columns // self.columns_per_item)


class PackedHeads:
    """A weight per head `[N, A, B]`; one of its last two dimensions is contiguous."""

    __slots__ = ("address", "length", "num_heads", "strides", "tensor", "width")

    def __init__(self, weight_NAB: Tensor) -> None:
        is_dense = 1 in weight_NAB.stride()[1:]
        self.tensor = weight_NAB if is_dense else weight_NAB.contiguous()
        self.num_heads, self.length, self.width = self.tensor.shape
        self.strides = self.tensor.stride()
        self.address = self.tensor.data_ptr()


class PackedExperts:
    """The routed experts' weights: `[E, 2 I, H]` and `[E, H, I]`."""

    __slots__ = (
        "down", "down_address", "gate_up", "gate_up_address", "hidden", "inner", "num_experts",
    )  # fmt: skip

    def __init__(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> None:
        self.gate_up, self.down = gate_up_EJH.contiguous(), down_EHI.contiguous()
        self.num_experts, self.hidden, self.inner = self.down.shape
        self.gate_up_address, self.down_address = self.gate_up.data_ptr(), self.down.data_ptr()
