/* What the instructions of riscv_dot4.py do, for the simulator. */
#include <stdint.h>

uint32_t dovetail_execute(uint32_t word, uint32_t first, uint32_t second, uint32_t *result)
{
    const uint32_t opcode = word & 0x7Fu, funct3 = word >> 12 & 7u, funct7 = word >> 25;
    const int dot4 = opcode == 0x0Bu && funct3 == 0u && funct7 == 0u;
    const int sdotsp_b = opcode == 0x7Bu && funct3 == 1u && funct7 == 0x54u;
    if (!dot4 && !sdotsp_b) {
        return 0;
    }
    for (uint32_t lane = 0; lane < 32u; lane += 8u) {
        *result += (uint32_t)((int8_t)(first >> lane & 0xFFu) * (int8_t)(second >> lane & 0xFFu));
    }
    return 1;
}
