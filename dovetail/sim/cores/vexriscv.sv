// VexRiscv as LiteX's "lite" (RV32IM, 2 KiB of instruction cache, no data cache, multiplier and divider of many steps)
// behind the ports core_host.cpp clocks. Its wfi does nothing, and its interrupt lines are masked by a register of its
// own, so firmware polls.
module dovetail_core (
`include "core_ports.svh"
);
    logic instr_asks, data_asks;
    VexRiscv core (
        .clk, .reset(!rst_n), .externalResetVector(32'hffff_ff80), .timerInterrupt(1'b0), .softwareInterrupt(1'b0),
        .externalInterruptArray({31'd0, irq}),
        .iBusWishbone_CYC(), .iBusWishbone_STB(instr_asks), .iBusWishbone_ACK(instr_rvalid), .iBusWishbone_WE(),
        .iBusWishbone_ADR(instr_addr[31:2]), .iBusWishbone_DAT_MISO(instr_rdata), .iBusWishbone_DAT_MOSI(),
        .iBusWishbone_SEL(), .iBusWishbone_ERR(1'b0), .iBusWishbone_CTI(), .iBusWishbone_BTE(),
        .dBusWishbone_CYC(), .dBusWishbone_STB(data_asks), .dBusWishbone_ACK(data_rvalid), .dBusWishbone_WE(data_we),
        .dBusWishbone_ADR(data_addr[31:2]), .dBusWishbone_DAT_MISO(data_rdata), .dBusWishbone_DAT_MOSI(data_wdata),
        .dBusWishbone_SEL(data_be), .dBusWishbone_ERR(1'b0), .dBusWishbone_CTI(), .dBusWishbone_BTE()
    );
    assign instr_addr[1:0] = 2'd0;
    assign data_addr[1:0] = 2'd0;
    assign instr_req = instr_asks && !instr_rvalid;
    assign data_req = data_asks && !data_rvalid;
    assign asleep = 1'b0;
    assign retired = core.lastStageIsFiring;
    assign pc = core.lastStagePc;
    assign access_pc = core.memory_PC;
endmodule
