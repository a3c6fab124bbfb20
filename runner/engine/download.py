"""Device values to the host: the copy is queued behind the work that yields them, and waited for when they are read."""

from __future__ import annotations

from torch import Tensor
from torch.cuda import Event


class Download:
    def __init__(self, values: Tensor) -> None:
        self._event: Event | None = None
        if values.is_cuda:
            self._values = values.to("cpu", non_blocking=True)  # into pinned memory, which torch allocates for this
            self._event = Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values = values.clone()

    def read(self) -> Tensor:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
