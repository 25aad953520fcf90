// PicoRV32, RV32IMC with a multiplier of one step, behind the ports core_host.cpp clocks. Its look-ahead signals ask a
// cycle before the memory port does, so a memory of one cycle answers at once. It has no control registers and no wfi:
// a co-processor takes writes of those, reads zeros, and waits for the interrupt line; handlers it cannot enter.
module dovetail_core (
`include "core_ports.svh"
);
    logic read, write, fetch, asked, control, waits;
    logic [31:0] address, word;

    picorv32 #(
        .COMPRESSED_ISA(1), .ENABLE_FAST_MUL(1), .ENABLE_DIV(1), .BARREL_SHIFTER(1), .ENABLE_PCPI(1),
        .PROGADDR_RESET(32'hffff_ff80)
    ) core (
        .clk, .resetn(rst_n), .trap(), .mem_valid(), .mem_instr(), .mem_ready(instr_rvalid || data_rvalid),
        .mem_addr(), .mem_wdata(), .mem_wstrb(), .mem_rdata(instr_rvalid ? instr_rdata : data_rdata),
        .mem_la_read(read), .mem_la_write(write), .mem_la_addr(address), .mem_la_wdata(data_wdata),
        .mem_la_wstrb(data_be),
        .pcpi_valid(asked), .pcpi_insn(word), .pcpi_rs1(), .pcpi_rs2(), .pcpi_wr(control && word[14:12] != 3'd0),
        .pcpi_rd(32'd0), .pcpi_wait(control), .pcpi_ready(control && !(waits && !irq)),
        .irq(32'd0), .eoi(), .trace_valid(), .trace_data()
    );
    assign control = asked && (word[6:0] == 7'h73 && word[14:12] != 3'd0 || waits);
    assign waits = word == 32'h1050_0073;
    assign asleep = control && waits && !irq;
    assign fetch = core.mem_do_rinst || core.mem_do_prefetch;
    assign instr_req = read && fetch;
    assign instr_addr = address;
    assign data_req = write || read && !fetch;
    assign data_we = write;
    assign data_addr = address;
    assign retired = core.launch_next_insn;
    assign pc = core.next_pc;
    assign access_pc = core.dbg_insn_addr;
endmodule
