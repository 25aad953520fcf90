// CV32E40P of the OpenHW Group behind the ports core_host.cpp clocks.
module dovetail_core #(
    parameter PULP = 0  // whether it has the CORE-V instructions
) (
`include "core_ports.svh"
);
    cv32e40p_core #(.COREV_PULP(PULP), .NUM_MHPMCOUNTERS(0)) core (
        .clk_i(clk), .rst_ni(rst_n), .pulp_clock_en_i(1'b1), .scan_cg_en_i(1'b0),
        .boot_addr_i(32'hffff_ff80), .mtvec_addr_i(32'd0), .dm_halt_addr_i(32'd0), .hart_id_i(32'd0),
        .dm_exception_addr_i(32'd0),
        .instr_req_o(instr_req), .instr_gnt_i(1'b1), .instr_rvalid_i(instr_rvalid),
        .instr_addr_o(instr_addr), .instr_rdata_i(instr_rdata),
        .data_req_o(data_req), .data_gnt_i(1'b1), .data_rvalid_i(data_rvalid), .data_we_o(data_we),
        .data_be_o(data_be), .data_addr_o(data_addr), .data_wdata_o(data_wdata), .data_rdata_i(data_rdata),
        .apu_busy_o(), .apu_req_o(), .apu_gnt_i(1'b0), .apu_operands_o(), .apu_op_o(), .apu_flags_o(),
        .apu_rvalid_i(1'b0), .apu_result_i(32'd0), .apu_flags_i(5'd0),
        .irq_i({20'd0, irq, 11'd0}), .irq_ack_o(), .irq_id_o(),
        .debug_req_i(1'b0), .debug_havereset_o(), .debug_running_o(), .debug_halted_o(),
        .fetch_enable_i(1'b1), .core_sleep_o(asleep)
    );
    assign retired = core.id_stage_i.minstret;
    assign pc = core.pc_id;
    // A load or store asks in the cycle after it has left the decoding stage, where it is counted.
    always_ff @(posedge clk) if (retired) access_pc <= pc;
endmodule
