"""Requantisation as a short sum: one product, one addition and one shift in place of several roundings.

Each module finds the numbers for one kind of operand; kernels, legalisation and meshes only use them.

| module | finds | equal to the operators |
|---|---|---|
| `pairs` | (a * m + b * n + c) >> s for one or two values of 8 bits | on every pair of operands |
| `raised` | (upper half of sum * m + c) >> s for sums of int8 products with weights of 16 bits | on every sum |
| `staircase` | the same for sums in memory that are cut off at zero | on every int32 |
| `lines` | ((sum << r) + c) * m >> 48 for each channel of a MAC array | on every sum within reach |
| `engine` | (sum * m + c) >> s within an engine's few bits | to within a stated error |

`bounds` has what they share: how far sums reach, and where a staircase has its steps.
"""
