// An engine that is a published core: START (0x00) lets it run the program at 0x10000000 until it stores to address 0,
// which raises the interrupt; reading FINISHED (0x04) lowers it. Built with one of the macros SERV, PICORV32, CV32E40P.
`include "control.svh"

package engine_types;
    typedef enum logic [1:0] {IDLE, RUNNING, DONE} state_t;
    typedef struct packed {
        logic        req, we;
        logic [ 3:0] be;
        logic [31:0] addr, wdata;
    } request_t;
endpackage

// A core's way to memory: a request is held until it is granted, `valid` comes with what is read a cycle later.
interface memory_bus;
    import engine_types::*;
    request_t ask;
    logic gnt, valid;
    logic [31:0] rdata;
    modport core(output ask, input gnt, valid, rdata);
    modport port(input ask, output gnt, valid, rdata);
endinterface

module core_engine import engine_types::*; (
    input  logic        clk, rst_n,
    input  logic        psel, penable, pwrite,
    input  logic [ 7:0] paddr,
    input  logic [31:0] pwdata,
    output logic [31:0] prdata,
    output logic        busy, irq,
    output logic        req, we,
    input  logic        gnt,
    output logic [ 3:0] be,
    output logic [31:0] addr, wdata,
    input  logic [31:0] rdata,
    output logic        f_req,
    input  logic        f_gnt,
    output logic [31:0] f_addr,
    input  logic [31:0] f_rdata
);
    memory_bus data(), fetch();
    state_t state;
    logic ends;
    logic [31:0] finished = 32'd7;  // what registers begin with is kept by a reset that leaves it alone

    assign ends = data.ask.req && data.ask.we && data.ask.addr == 32'd0;
    assign busy = state == RUNNING;
    assign irq = state == DONE;
    assign prdata = `CONTROL_REGISTER(paddr) == 6'd1 ? finished : 32'd0;
    assign {req, we, be, wdata} = {data.ask.req && !ends, data.ask.we, data.ask.be, data.ask.wdata};
    assign addr = {data.ask.addr[31:2], 2'b00};
    assign {data.gnt, data.rdata} = {gnt || ends, rdata};
    assign {f_req, f_addr} = {fetch.ask.req, fetch.ask.addr};
    assign {fetch.gnt, fetch.rdata} = {f_gnt, f_rdata};
    always_ff @(posedge clk or negedge rst_n)
        if (!rst_n) begin
            state <= IDLE;
            {data.valid, fetch.valid} <= 2'b00;
        end else begin
            data.valid <= data.ask.req && data.gnt;
            fetch.valid <= fetch.ask.req && fetch.gnt;
            if (psel && penable && pwrite && `CONTROL_REGISTER(paddr) == 6'd0) state <= RUNNING;
            else if (psel && penable && !pwrite && state == DONE) state <= IDLE;
            else if (ends && state == RUNNING) begin
                state <= DONE;
                finished <= finished + 32'd1;
            end
        end

    embedded unit (.clk, .rst_n, .run(state == RUNNING), .data(data), .fetch(fetch));
endmodule

`ifdef CV32E40P
module embedded(input logic clk, rst_n, run, memory_bus.core data, memory_bus.core fetch);
    assign {fetch.ask.we, fetch.ask.be, fetch.ask.wdata} = '0;
    cv32e40p_core core (
        .clk_i(clk), .rst_ni(rst_n), .pulp_clock_en_i(1'b1), .scan_cg_en_i(1'b0), .boot_addr_i(32'h10000000),
        .mtvec_addr_i('0), .dm_halt_addr_i('0), .hart_id_i('0), .dm_exception_addr_i('0),
        .instr_req_o(fetch.ask.req), .instr_gnt_i(fetch.gnt), .instr_rvalid_i(fetch.valid),
        .instr_addr_o(fetch.ask.addr), .instr_rdata_i(fetch.rdata),
        .data_req_o(data.ask.req), .data_gnt_i(data.gnt), .data_rvalid_i(data.valid), .data_we_o(data.ask.we),
        .data_be_o(data.ask.be), .data_addr_o(data.ask.addr), .data_wdata_o(data.ask.wdata),
        .data_rdata_i(data.rdata),
        .apu_busy_o(), .apu_req_o(), .apu_gnt_i(1'b0), .apu_operands_o(), .apu_op_o(), .apu_flags_o(),
        .apu_rvalid_i(1'b0), .apu_result_i('0), .apu_flags_i('0), .irq_i('0), .irq_ack_o(), .irq_id_o(),
        .debug_req_i(1'b0), .debug_havereset_o(), .debug_running_o(), .debug_halted_o(),
        .fetch_enable_i(run), .core_sleep_o()
    );
endmodule
`endif

`ifdef SERV
module embedded(input logic clk, rst_n, run, memory_bus.core data, memory_bus.core fetch);
    logic fetches, accesses;
    assign {fetch.ask.we, fetch.ask.be, fetch.ask.wdata} = '0;
    assign fetch.ask.req = fetches && run && !fetch.valid;
    assign data.ask.req = accesses && !data.valid;
    serv_rf_top #(.RESET_PC(32'h10000000), .WITH_CSR(0)) core (
        .clk, .i_rst(!rst_n), .i_timer_irq(1'b0),
        .o_ibus_adr(fetch.ask.addr), .o_ibus_cyc(fetches), .i_ibus_rdt(fetch.rdata), .i_ibus_ack(fetch.valid),
        .o_dbus_adr(data.ask.addr), .o_dbus_dat(data.ask.wdata), .o_dbus_sel(data.ask.be), .o_dbus_we(data.ask.we),
        .o_dbus_cyc(accesses), .i_dbus_rdt(data.rdata), .i_dbus_ack(data.valid),
        .o_ext_rs1(), .o_ext_rs2(), .o_ext_funct3(), .i_ext_rd('0), .i_ext_ready(1'b0), .o_mdu_valid()
    );
endmodule
`endif

`ifdef PICORV32
module embedded(input logic clk, rst_n, run, memory_bus.core data, memory_bus.core fetch);
    logic valid, instr;
    logic [3:0] strobes;
    assign {fetch.ask.we, fetch.ask.be, fetch.ask.wdata} = '0;
    assign fetch.ask.req = valid && instr && !fetch.valid;
    assign data.ask.req = valid && !instr && !data.valid;
    assign data.ask.we = strobes != 4'd0;
    assign data.ask.be = strobes;
    assign fetch.ask.addr = data.ask.addr;
    picorv32 #(.PROGADDR_RESET(32'h10000000)) core (
        .clk, .resetn(rst_n && run), .trap(), .mem_valid(valid), .mem_instr(instr),
        .mem_ready(instr ? fetch.valid : data.valid), .mem_addr(data.ask.addr), .mem_wdata(data.ask.wdata),
        .mem_wstrb(strobes), .mem_rdata(instr ? fetch.rdata : data.rdata), .mem_la_read(), .mem_la_write(),
        .mem_la_addr(), .mem_la_wdata(), .mem_la_wstrb(), .pcpi_valid(), .pcpi_insn(), .pcpi_rs1(), .pcpi_rs2(),
        .pcpi_wr(1'b0), .pcpi_rd('0), .pcpi_wait(1'b0), .pcpi_ready(1'b0), .irq('0), .eoi(), .trace_valid(),
        .trace_data()
    );
endmodule
`endif
