"""Distances of neighbours in rows of int8, times a factor."""

from dataclasses import dataclass

import numpy as np

from dovetail.operators import TensorType, UserOperator, require


@dataclass(frozen=True)
class RowDistance(UserOperator):
    """`factor` times the distance of each element of a row from the one before it, saturated."""

    factor: int
    custom_code, domain, op_type, function = "RowDistance", "osprey.lab", "RowDistance", "row_distance"
    c = """
static void row_distance(int8_t *out, const int8_t *x, int32_t rows, int32_t size, int32_t factor)
{
    for (int32_t row = 0; row < rows; ++row, x += size, out += size - 1) {
        for (int32_t i = 0; i < size - 1; ++i) {
            const int32_t step = factor * (x[i + 1] - x[i]);
            out[i] = (int8_t)(step < -128 ? -128 : step > 127 ? 127 : step);
        }
    }
}
"""

    def results(self, inputs):
        require(inputs[0].dtype.text == "int8" and inputs[0].shape[-1] > 1, f"expects rows of int8, got {inputs[0]}")
        return [TensorType((*inputs[0].shape[:-1], inputs[0].shape[-1] - 1), inputs[0].dtype)]

    def compute(self, inputs):
        return [np.clip(self.factor * np.diff(inputs[0].astype(np.int32)), -128, 127).astype(np.int8)]

    def numbers(self, inputs):
        return [inputs[0].elements // inputs[0].shape[-1], inputs[0].shape[-1], self.factor]
