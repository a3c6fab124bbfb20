"""Arctic's LSTM speculator (Snowflake's Arctic Inference): the MLP speculator's recurrence with gates and a cell.

Every gate reads the state and the token before the one that a step guesses: g_x = P_x state + a E_x[token], with the
MLP speculator's a (arXiv 2404.19124); tie_lstm_embs has one E for all. Then

    cell = sigmoid(g_forget) * cell + sigmoid(g_input) * GELU(LN(g_cell))
    state = sigmoid(g_output) * GELU(LN'(cell)), logits = H state

The cell starts as zeros. All steps share their weights, but the first has projections of its own: it reads the target's
hidden state.
"""

from __future__ import annotations

import torch

from kernels.cpu.panels import Change, Weight, unpacked
from proposers.heads.recurrence import Recurrence
from proposers.heads.speculator_norms import NormedGelu
from proposers.heads.speculator_shape import SpeculatorShape
from runner.engine.linear import WeightTarget
from runner.engine.operations import gate, head_logits, linear

GATES = ("forget", "input", "output", "cell")  # in the order in which their projections are multiplied together


class LstmSpeculator(Recurrence):
    """State and cell of a row lie side by side, so that whoever keeps and picks rows knows of one tensor.

    The first state has no cell yet.
    """

    def __init__(self, shape: SpeculatorShape, dtype: torch.dtype) -> None:
        super().__init__(shape)
        self.width = shape.inner_sizes[0]
        embedded = GATES[:1] if shape.ties_gates else GATES
        self.embeddings = {name: torch.empty(shape.vocab_size, self.width, dtype=dtype) for name in embedded}
        self.head: Weight = torch.empty(shape.vocab_size, self.width, dtype=dtype)
        sizes = (shape.hidden_size, self.width)
        self.projections: list[Weight] = [torch.empty(len(GATES) * self.width, size, dtype=dtype) for size in sizes]
        self.cell_norm, self.state_norm = NormedGelu(self.width, dtype), NormedGelu(self.width, dtype)

    def next_state(self, step: int, state: torch.Tensor, token_ids: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, hidden], later [num_rows, 2 * width], and tokens [num_rows] -> [num_rows, 2 * width].

        num_rows a multiple of tile; a row's state first, then its cell.
        """
        seen = state if step == 0 else self._state_of(state)
        tables = self.embeddings.values()
        told = torch.stack([table.index_select(0, token_ids) for table in tables], dim=1)  # of one for all, or of each
        projected = linear(seen, self.projections[min(step, 1)], None, tile).view(-1, len(GATES), self.width)
        forget, take, give, candidate = torch.add(projected, told, alpha=self.token_weight).unbind(dim=1)
        cell = gate(self.cell_norm(candidate.contiguous()), take, "sigmoid")
        if step > 0:
            cell = gate(state[:, self.width :], forget, "sigmoid") + cell
        return torch.cat((gate(self.state_norm(cell), give, "sigmoid"), cell), dim=1)

    def logits(self, step: int, state: torch.Tensor, tile: int | None) -> torch.Tensor:
        """[num_rows, 2 * width] (num_rows a multiple of tile) -> [num_rows, vocab] float32."""
        return head_logits(self._state_of(state), self.head, tile)

    def _state_of(self, state: torch.Tensor) -> torch.Tensor:
        return state[:, : self.width].contiguous()

    @property
    def product_weights(self) -> list[Weight]:
        return [*self.projections, self.head]

    def convert(self, change: Change) -> None:
        self.projections = [change(weight) for weight in self.projections]
        self.head = change(self.head)

    def weight_targets(self) -> dict[str, WeightTarget]:
        targets = {f"{name}_emb.0.weight": WeightTarget(view=table) for name, table in self.embeddings.items()}
        for step, weight in enumerate(self.projections):
            rows = unpacked(weight).view(len(GATES), self.width, -1)
            targets |= {f"{name}_proj.{step}.weight": WeightTarget(view=rows[i]) for i, name in enumerate(GATES)}
        targets |= self.cell_norm.weight_targets("cell_ln.0") | self.state_norm.weight_targets("state_ln.0")
        return {**targets, "head.0.weight": WeightTarget(view=unpacked(self.head))}
