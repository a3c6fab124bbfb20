"""How many registers a thread may have in kernels that read a row and hardly compute."""

from __future__ import annotations

MAX_REGISTERS = 128  # told so, ptxas lets a program ask for all that it reads before it waits for any of it
