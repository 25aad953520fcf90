// Clocks a core in Verilog beside the simulated chip, for core_rtl.py: memories here, everything else asked of Python.
//
// Compiled together with what Verilator made of cores/*.sv, whose module dovetail_core has one port for instructions and
// one for data. A request is granted at once and answered in the next cycle. In a cycle the clock is low first: inputs
// settle and requests are looked at. Then it rises, and answers appear.
#include <cstdint>
#include <cstring>
#include <memory>

#include "Vdut.h"
#include "verilated.h"
#include "dovetail_ports.h"

namespace {

enum Stop : uint32_t { ASLEEP = 0, DEADLINE = 1, LIMIT = 2, TRAPPED = 4 };

constexpr uint32_t RESET_AT = 0xFFFFFF80u;

struct Memory {
    uint64_t base, size;
    uint8_t *data;
};

// Answers a read or write of something that is no memory: address of a word, byte enables, value.
using Answer = uint32_t (*)(uint32_t write, uint32_t address, uint32_t enables, uint32_t value);

// Mirrors core_rtl.py's _State.
struct State {
    uint64_t cycles, instructions, deadline, instruction_limit;
    uint32_t interrupt, stop_reason, pc, access_pc;
    // Address of the instruction where traps go; cores that take only multiples of 256 for it, and have the entry
    // there, begin anew.
    uint32_t trap;
    uint32_t trapped; // how often that was executed
};

struct Core {
    State state{};
    const Memory *memories;
    uint32_t count;
    const Memory *code, *recent; // where the last fetch and the last access were
    Answer answer;
    uint32_t boot[2]{}, begins = 0;
    bool begun = false;
    VerilatedContext context;
    std::unique_ptr<Vdut> dut;

    Core(const Memory *all, uint32_t n, Answer given) : memories(all), count(n), code(all), recent(all), answer(given) {
        context.randReset(2);
        context.randSeed(1);
        dut = std::make_unique<Vdut>(&context);
        state.deadline = state.instruction_limit = UINT64_MAX;
    }

    ~Core() { dut->final(); }

    uint8_t *find(uint32_t address, const Memory *&last) {
        if (address - last->base < last->size) return last->data + (address - last->base);
        for (uint32_t i = 0; i < count; i++) {
            if (address - memories[i].base < memories[i].size) {
                last = &memories[i];
                return last->data + (address - last->base);
            }
        }
        return nullptr;
    }

    // The core begins at RESET_AT, where two instructions go to `entry`.
    void reset(uint32_t entry) {
        const uint32_t upper = (entry + 0x800u) & 0xFFFFF000u;
        begins = entry;
        boot[0] = upper | 0x2B7u;                   // lui t0, upper
        boot[1] = (entry - upper) << 20 | 0x28067u; // jalr zero, lower(t0)
        dut->clk = 0;
        dut->rst_n = 1;
        dut->eval();
        dut->rst_n = 0;
        for (int i = 0; i < 8; i++) {
            dut->clk = 0;
            dut->eval();
            dut->clk = 1;
            dut->eval();
        }
        dut->rst_n = 1;
    }

    uint32_t access(uint32_t address, bool write, uint32_t enables, uint32_t value) {
        uint8_t *place = find(address & ~3u, recent);
        uint32_t read = 0;
        if (place == nullptr) {
            state.access_pc = dut->access_pc;
            state.pc = dut->pc;
            return answer(write, address & ~3u, enables, value);
        }
        if (!write) {
            std::memcpy(&read, place, 4);
        } else {
            for (uint32_t i = 0; i < 4; i++) {
                if ((enables >> i & 1u) != 0) place[i] = static_cast<uint8_t>(value >> 8 * i);
            }
        }
        return read;
    }

    // A cycle; false where the core sleeps, and nothing has been clocked.
    bool cycle() {
        dut->irq = state.interrupt != 0;
        dut->clk = 0;
        dut->eval();
        if (dut->asleep && state.interrupt == 0) return false;
        const bool fetches = dut->instr_req, accesses = dut->data_req;
        uint32_t word = 0, data = 0;
        if (fetches) {
            const uint8_t *place = find(dut->instr_addr & ~3u, code);
            if (place != nullptr) std::memcpy(&word, place, 4);
            else if ((dut->instr_addr & ~7u) == RESET_AT) word = boot[dut->instr_addr >> 2 & 1u];
        }
        if (accesses) data = access(dut->data_addr, dut->data_we, dut->data_be, dut->data_wdata);
        state.instructions += dut->retired;
        if (dut->retired) {
            state.trapped += dut->pc == state.trap || (begun && dut->pc == begins);
            begun = begun || dut->pc == begins;
        }
        dut->clk = 1;
        dut->eval();
        dut->instr_rvalid = fetches;
        dut->instr_rdata = word;
        dut->data_rvalid = accesses;
        dut->data_rdata = data;
        state.cycles++;
        return true;
    }

    void run() {
        for (;;) {
            if (state.cycles >= state.deadline) {
                state.stop_reason = DEADLINE;
            } else if (state.instructions >= state.instruction_limit) {
                state.stop_reason = LIMIT;
            } else if (state.trapped != 0) {
                state.stop_reason = TRAPPED;
            } else if (cycle()) {
                continue;
            } else {
                state.stop_reason = ASLEEP;
            }
            state.pc = dut->pc;
            return;
        }
    }
};

}  // namespace

extern "C" {

// A core before its reset. The memories must live as long as it does.
Core *dovetail_core_new(const Memory *memories, uint32_t count, Answer answer) {
    return new Core(memories, count, answer);
}

void dovetail_core_delete(Core *core) { delete core; }

State *dovetail_core_state(Core *core) { return &core->state; }

void dovetail_core_reset(Core *core, uint32_t entry) { core->reset(entry); }

// Clocks until it sleeps, the deadline or the limit of instructions is reached, or a trap is taken.
void dovetail_core_run(Core *core) { core->run(); }
}
