// The ports core_host.cpp clocks, of the module around every core.
    input  logic        clk, rst_n, irq,
    output logic        instr_req,
    output logic [31:0] instr_addr,
    input  logic        instr_rvalid,
    input  logic [31:0] instr_rdata,
    output logic        data_req, data_we,
    output logic [ 3:0] data_be,
    output logic [31:0] data_addr, data_wdata,
    input  logic        data_rvalid,
    input  logic [31:0] data_rdata,
    output logic        asleep, retired,
    output logic [31:0] pc,        // of the instruction retired, or else the next
    output logic [31:0] access_pc  // of the instruction that accesses data
