// lowRISC's Ibex in its configuration "small" behind the ports core_host.cpp clocks: ibex_core, its registers, and the
// part of ibex_top that stops its clock.
module dovetail_core (
`include "core_ports.svh"
);
    import ibex_pkg::*;
    logic [4:0] first, second, written;
    logic [31:0] first_value, second_value, written_value;
    logic write, pending;
    ibex_mubi_t busy, was_busy;
    logic [IC_TAG_SIZE-1:0] tags[IC_NUM_WAYS];
    logic [IC_LINE_SIZE-1:0] lines[IC_NUM_WAYS];
    assign tags = '{default: '0};
    assign lines = '{default: '0};

    ibex_core u_ibex_core (
        .clk_i(clk), .rst_ni(rst_n), .hart_id_i(32'd0), .boot_addr_i(32'hffff_ff00),
        .instr_req_o(instr_req), .instr_gnt_i(1'b1), .instr_rvalid_i(instr_rvalid), .instr_addr_o(instr_addr),
        .instr_rdata_i(instr_rdata), .instr_err_i(1'b0),
        .data_req_o(data_req), .data_gnt_i(1'b1), .data_rvalid_i(data_rvalid), .data_we_o(data_we),
        .data_be_o(data_be), .data_addr_o(data_addr), .data_wdata_o(data_wdata), .data_rdata_i(data_rdata),
        .data_err_i(1'b0),
        .dummy_instr_id_o(), .dummy_instr_wb_o(), .rf_raddr_a_o(first), .rf_raddr_b_o(second),
        .rf_waddr_wb_o(written), .rf_we_wb_o(write), .rf_wdata_wb_ecc_o(written_value),
        .rf_rdata_a_ecc_i(first_value), .rf_rdata_b_ecc_i(second_value),
        .ic_tag_req_o(), .ic_tag_write_o(), .ic_tag_addr_o(), .ic_tag_wdata_o(), .ic_tag_rdata_i(tags),
        .ic_data_req_o(), .ic_data_write_o(), .ic_data_addr_o(), .ic_data_wdata_o(), .ic_data_rdata_i(lines),
        .ic_scr_key_valid_i(1'b1), .ic_scr_key_req_o(),
        .irq_software_i(1'b0), .irq_timer_i(1'b0), .irq_external_i(irq), .irq_fast_i(15'd0), .irq_nm_i(1'b0),
        .irq_pending_o(pending), .debug_req_i(1'b0), .crash_dump_o(), .double_fault_seen_o(),
        .fetch_enable_i(IbexMuBiOn), .alert_minor_o(), .alert_major_internal_o(), .alert_major_bus_o(),
        .core_busy_o(busy)
    );
    ibex_register_file_ff registers (
        .clk_i(clk), .rst_ni(rst_n), .test_en_i(1'b0), .dummy_instr_id_i(1'b0), .dummy_instr_wb_i(1'b0),
        .raddr_a_i(first), .rdata_a_o(first_value), .raddr_b_i(second), .rdata_b_o(second_value),
        .waddr_a_i(written), .wdata_a_i(written_value), .we_a_i(write), .err_o()
    );
    always_ff @(posedge clk or negedge rst_n) was_busy <= !rst_n ? IbexMuBiOn : busy;
    assign asleep = !was_busy[0] && !pending;
    assign retired = u_ibex_core.perf_instr_ret_wb;
    assign pc = u_ibex_core.pc_id;
    assign access_pc = u_ibex_core.pc_id;
endmodule

// Named in parts of the sources that this configuration leaves out.
module prim_buf #(parameter int Width = 1) (input [Width-1:0] in_i, output [Width-1:0] out_o);
    assign out_o = in_i;
endmodule
