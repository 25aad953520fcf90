// VexRiscv as LiteX's "full+cfu" (RV32IM, 4 KiB of instruction cache, 4 KiB of data cache that writes through, products
// in three stages) behind the ports core_host.cpp clocks, and a function unit on its bus: the module DOVETAIL_UNIT, where
// that is defined, with the port names of the unit that CFU Playground's systems expect.
module dovetail_core (
`include "core_ports.svh"
);
    logic instr_asks, data_asks, instr_more, data_more, asks, taken, answers, accepted;
    logic [2:0] instr_kind, data_kind;
    logic [9:0] which;
    logic [29:0] instr_at, data_at;
    logic [31:0] first, second, answer, fetched;
    VexRiscv core (
        .clk, .reset(!rst_n), .externalResetVector(32'hffff_ff60), .timerInterrupt(1'b0), .softwareInterrupt(1'b0),
        .externalInterruptArray({31'd0, irq}),
        .CfuPlugin_bus_cmd_valid(asks), .CfuPlugin_bus_cmd_ready(taken),
        .CfuPlugin_bus_cmd_payload_function_id(which),
        .CfuPlugin_bus_cmd_payload_inputs_0(first), .CfuPlugin_bus_cmd_payload_inputs_1(second),
        .CfuPlugin_bus_rsp_valid(answers), .CfuPlugin_bus_rsp_ready(accepted),
        .CfuPlugin_bus_rsp_payload_outputs_0(answer),
        .iBusWishbone_CYC(), .iBusWishbone_STB(instr_asks), .iBusWishbone_ACK(instr_rvalid), .iBusWishbone_WE(),
        .iBusWishbone_ADR(instr_at), .iBusWishbone_DAT_MISO(fetched), .iBusWishbone_DAT_MOSI(),
        .iBusWishbone_SEL(), .iBusWishbone_ERR(1'b0), .iBusWishbone_CTI(instr_kind), .iBusWishbone_BTE(),
        .dBusWishbone_CYC(), .dBusWishbone_STB(data_asks), .dBusWishbone_ACK(data_rvalid), .dBusWishbone_WE(data_we),
        .dBusWishbone_ADR(data_at), .dBusWishbone_DAT_MISO(data_rdata), .dBusWishbone_DAT_MOSI(data_wdata),
        .dBusWishbone_SEL(data_be), .dBusWishbone_ERR(1'b0), .dBusWishbone_CTI(data_kind), .dBusWishbone_BTE()
    );
`ifdef DOVETAIL_UNIT
    `DOVETAIL_UNIT unit (
        .cmd_valid(asks), .cmd_ready(taken), .cmd_payload_function_id(which), .cmd_payload_inputs_0(first),
        .cmd_payload_inputs_1(second), .rsp_valid(answers), .rsp_ready(accepted), .rsp_payload_outputs_0(answer),
        .reset(!rst_n), .clk
    );
`else
    assign {taken, answers, answer} = {1'b1, asks, 32'd0};
`endif
    // Start-up code has to switch the unit's bus on (bit 31 of the control register 0xbc0): the words before the two that
    // jump to the firmware do.
    always_comb
        case (instr_at)
            30'h3fff_ffd8: fetched = 32'h8000_02b7;  // lui t0, 0x80000
            30'h3fff_ffd9: fetched = 32'hbc02_9073;  // csrw 0xbc0, t0
            30'h3fff_ffda, 30'h3fff_ffdb, 30'h3fff_ffdc, 30'h3fff_ffdd, 30'h3fff_ffde, 30'h3fff_ffdf:
                fetched = 32'h0000_0013;  // nop
            default: fetched = instr_rdata;
        endcase
    // The harness writes inputs into memory behind the core's back when it is told to (a write to its first register):
    // no line of the data cache is kept over that.
    always @(posedge clk)
        if (data_req && data_we && data_addr == 32'h1a00_0000)
            for (int line = 0; line < 128; line++) core.dataCache_1.ways_0_tags[line] = '0;
    // A word of a burst is answered while the next one is asked for.
    assign {instr_more, data_more} = {instr_rvalid && instr_kind == 3'd2, data_rvalid && data_kind == 3'd2};
    assign {instr_addr, data_addr} = {instr_at + 30'(instr_more), 2'd0, data_at + 30'(data_more), 2'd0};
    assign {instr_req, data_req} = {instr_asks && (!instr_rvalid || instr_more), data_asks && (!data_rvalid || data_more)};
    assign asleep = 1'b0;
    assign retired = core.lastStageIsFiring;
    assign pc = core.lastStagePc;
    assign access_pc = core.memory_PC;
endmodule
