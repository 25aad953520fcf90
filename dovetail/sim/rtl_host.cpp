// Clocks a Verilated model for rtl.py: register accesses, memory ports served from the simulated chip's memories, cycles.
//
// Compiled together with what Verilator made. dovetail_ports.h, written by rtl.py, names the model's signals:
// DUT_CLOCK, DUT_RESET and DUT_RESET_LEVEL where it has one, DUT_INTERRUPT, DUT_BUSY, one of DUT_APB and DUT_AXI_LITE
// with its signals, and DUT_MEMORY_PORTS(PORT), a list of PORT(number, request, grant, whether it writes, address, wdata, enables, rdata).
//
// In a cycle the clock is low first: inputs settle, requests and handshakes are looked at. Then it rises, and data
// granted to a read appear.
#include <cstdint>
#include <cstring>
#include <memory>

#include "Vdut.h"
#include "verilated.h"
#ifdef DUT_TRACE
#include "verilated_vcd_c.h"
#endif
#include "dovetail_ports.h"

namespace {

enum Fault : uint32_t { NONE = 0, OUTSIDE = 1, UNALIGNED = 2 };
enum Answer : int32_t { REFUSED = -1, SILENT = -2 };

struct Memory {
    uint64_t base, size;
    uint8_t *data;
};

// Mirrors rtl.py's _State.
struct State {
    uint64_t cycles;        // clocked since power-on
    uint64_t time;          // in half cycles, for the waves: rtl.py moves it on while the model sleeps
    uint32_t busy, interrupt;
    uint32_t fault, fault_write, fault_address, fault_bytes;
    uint32_t stall;         // of 256 grants, how many are withheld
    uint32_t random;
    uint64_t traced_cycles; // left to be written to the waves
    uint64_t busy_from;     // the value of `cycles` when busy rose last
};

struct Model {
    State state{};
    const Memory *memories;
    uint32_t count;
    const Memory *recent;   // where the last access was
    VerilatedContext context;
    std::unique_ptr<Vdut> dut;
#ifdef DUT_TRACE
    VerilatedVcdC waves;
#endif

    Model(const Memory *all, uint32_t n, const char *file, uint64_t traced, uint32_t initial)
        : memories(all), count(n), recent(all) {
        context.randReset(static_cast<int>(initial));  // 2: with anything, but every time with the same
        context.randSeed(1);
#ifdef DUT_TRACE
        context.traceEverOn(true);
#endif
        dut = std::make_unique<Vdut>(&context);
        state.traced_cycles = traced;
#ifdef DUT_TRACE
        if (traced != 0) {
            dut->trace(&waves, 99);
            waves.set_time_unit("1ns");
            waves.set_time_resolution("1ns");
            waves.open(file);
        }
#else
        (void)file;
#endif
        state.random = 1u;
    }

    ~Model() {
        dut->final();
#ifdef DUT_TRACE
        waves.close();
#endif
    }

    uint8_t *find(uint32_t address, uint32_t bytes, bool write) {
        if (state.fault != NONE) return nullptr;
        for (uint32_t i = 0; i <= count; i++) {
            const Memory *one = i == 0 ? recent : &memories[i - 1];
            if (address >= one->base && address - one->base + bytes <= one->size) {
                recent = one;
                if (address % bytes == 0) return one->data + (address - one->base);
            }
        }
        bool aligned = address % bytes == 0;
        state.fault = aligned ? OUTSIDE : UNALIGNED;
        state.fault_write = write;
        state.fault_address = address;
        state.fault_bytes = bytes;
        return nullptr;
    }

    bool granted() {
        if (state.stall == 0) return true;
        state.random = state.random * 1664525u + 1013904223u;
        return (state.random >> 24) >= state.stall;
    }

    template <class Data>
    void serve(bool write, uint32_t address, const Data &wdata, uint64_t enables, Data &held, bool &fresh) {
        constexpr uint32_t bytes = sizeof(Data);
        uint8_t *place = find(address, bytes, write);
        if (place == nullptr) return;
        if (!write) {
            std::memcpy(&held, place, bytes);
            fresh = true;
        } else {
            const uint8_t *content = reinterpret_cast<const uint8_t *>(&wdata);
            for (uint32_t i = 0; i < bytes; i++) {
                if (i >= 64 || (enables >> i & 1u) != 0) place[i] = content[i];
            }
        }
    }

    void low() {
        dut->DUT_CLOCK = 0;
        dut->eval();
        wave();
    }

    void wave() {
#ifdef DUT_TRACE
        if (state.traced_cycles != 0) waves.dump(5 * state.time);  // a cycle is 10 ns
#endif
        state.time++;
    }

    // Whatever happens next, what there is can be looked at.
    void flush() {
#ifdef DUT_TRACE
        if (state.traced_cycles != 0) waves.flush();
#endif
    }

    // The rising edge, with what happens at it in the memories.
    void high() {
#define PORT(N, REQUEST, GRANT, WRITES, ADDRESS, WDATA, ENABLES, RDATA)                                              \
    auto held_##N = RDATA;                                                                                          \
    bool fresh_##N = false;                                                                                         \
    if (REQUEST && GRANT) serve(WRITES, ADDRESS, WDATA, ENABLES, held_##N, fresh_##N);
        DUT_MEMORY_PORTS(PORT)
#undef PORT
        dut->DUT_CLOCK = 1;
        dut->eval();
        wave();
#define PORT(N, REQUEST, GRANT, WRITES, ADDRESS, WDATA, ENABLES, RDATA)                                              \
    if (fresh_##N) RDATA = held_##N;                                                                                \
    GRANT = granted();
        DUT_MEMORY_PORTS(PORT)
#undef PORT
        state.cycles++;
#ifdef DUT_TRACE
        if (state.traced_cycles != 0 && --state.traced_cycles == 0) waves.close();
#endif
        const uint32_t busy = DUT_BUSY;
        if (busy && !state.busy) state.busy_from = state.cycles;
        state.busy = busy;
        state.interrupt = DUT_INTERRUPT;
    }

    void cycle() {
        low();
        high();
    }

    // The reset signal has an edge before the clock has one. Without the signal it stands as after power-on.
    void reset() {
#ifdef DUT_RESET
        dut->DUT_CLOCK = 0;
        DUT_RESET = !DUT_RESET_LEVEL;
        dut->eval();
        DUT_RESET = DUT_RESET_LEVEL;
        for (int i = 0; i < 4; i++) cycle();
        DUT_RESET = !DUT_RESET_LEVEL;
#endif
        cycle();
    }

#ifdef DUT_APB
    int32_t access(bool write, uint32_t address, uint32_t *value, int32_t limit) {
        APB_PSEL(1);
        APB_PENABLE(0);
        APB_PWRITE(write);
        APB_PADDR(address);
        APB_PWDATA(write ? *value : 0);
        cycle();
        APB_PENABLE(1);
        for (int32_t cycles = 2; cycles <= limit; cycles++) {
            low();
            const bool ready = APB_PREADY;
            const bool refused = APB_PSLVERR;
            if (ready && !write) *value = APB_PRDATA;
            high();
            if (ready) {
                APB_PSEL(0);
                APB_PENABLE(0);
                return refused ? REFUSED : cycles;
            }
        }
        return SILENT;
    }
#endif

#ifdef DUT_AXI_LITE
    int32_t access(bool write, uint32_t address, uint32_t *value, int32_t limit) {
        bool asked = false, sent = !write;
        AXI_AWVALID(write);
        AXI_WVALID(write);
        AXI_BREADY(write);
        AXI_ARVALID(!write);
        AXI_RREADY(!write);
        AXI_AWADDR(address);
        AXI_ARADDR(address);
        AXI_WDATA(*value);
        AXI_WSTRB(15);
        for (int32_t cycles = 1; cycles <= limit; cycles++) {
            low();
            asked = asked || (write ? AXI_AWREADY : AXI_ARREADY);
            sent = sent || AXI_WREADY;
            const bool answered = write ? AXI_BVALID : AXI_RVALID;
            const uint32_t response = write ? AXI_BRESP : AXI_RRESP;
            if (answered && !write) *value = AXI_RDATA;
            high();
            if (asked) {
                AXI_AWVALID(0);
                AXI_ARVALID(0);
            }
            if (sent) AXI_WVALID(0);
            if (answered) {
                AXI_BREADY(0);
                AXI_RREADY(0);
                return response != 0 ? REFUSED : cycles;
            }
        }
        return SILENT;
    }
#endif
};

}  // namespace

extern "C" {

// Powers a model on. The memories, and the name of the file for the first `traced` cycles, must live as long as it does.
// Registers that nothing initialises begin with zeros (initial 0) or with anything (2).
Model *dovetail_rtl_new(const Memory *memories, uint32_t count, const char *file, uint64_t traced, uint32_t initial) {
    return new Model(memories, count, file, traced, initial);
}

void dovetail_rtl_delete(Model *model) { delete model; }

State *dovetail_rtl_state(Model *model) { return &model->state; }

void dovetail_rtl_reset(Model *model) { model->reset(); }

// Reads or writes a register; the cycles it took, or an Answer.
int32_t dovetail_rtl_access(Model *model, uint32_t write, uint32_t address, uint32_t *value, int32_t limit) {
    const int32_t cycles = model->access(write != 0, address, value, limit);
    model->flush();
    return cycles;
}

// Clocks until `cycles` are over, busy or interrupt change, or a memory port does what it must not.
void dovetail_rtl_run(Model *model, uint64_t cycles) {
    const uint32_t busy = model->state.busy, interrupt = model->state.interrupt;
    for (uint64_t i = 0; i < cycles; i++) {
        model->cycle();
        if (model->state.busy != busy || model->state.interrupt != interrupt || model->state.fault != NONE) break;
    }
    model->flush();
}
}
