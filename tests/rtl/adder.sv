// An engine for tests with an AXI-Lite port of registers and a memory port of 128 bits: adds a byte to each byte of a
// range. Registers: 0x0 first byte, 0x4 words of 16 bytes, 0x8 what is added; writing it starts. 0xC reads jobs finished.
`include "adder_width.vh"
module adder (
    input  logic         clk,
    input  logic         rst_n,
    input  logic [7:0]   s_awaddr, s_araddr,
    input  logic         s_awvalid, s_wvalid, s_bready, s_arvalid, s_rready,
    output logic         s_awready, s_wready, s_bvalid, s_arready, s_rvalid,
    input  logic [31:0]  s_wdata,
    output logic [31:0]  s_rdata,
    output logic [1:0]   s_bresp, s_rresp,
    output logic         m_req, m_we,
    input  logic         m_gnt,
    output logic [31:0]  m_addr,
    output logic [`WIDTH-1:0] m_wdata,
    input  logic [`WIDTH-1:0] m_rdata,
    output logic         busy, irq
);
    logic [31:0] address, count, finished;
    logic [7:0]  addend, target, delay;
    logic        have_address, fetched;

    // A write's address and its data may come in any order; the answer takes three cycles.
    assign s_awready = !have_address && !s_bvalid;
    assign s_wready = have_address && !s_bvalid && delay == 0;
    assign s_arready = !s_rvalid;
    assign busy = count != 0;
    assign m_req = busy;
    assign m_we = fetched;
    assign m_addr = address;
    always_comb for (int i = 0; i < `WIDTH / 8; i++) m_wdata[8*i +: 8] = m_rdata[8*i +: 8] + addend;

    always_ff @(posedge clk or negedge rst_n) begin
        if (!rst_n) begin
            {count, finished, have_address, fetched, s_bvalid, s_rvalid, irq, delay} <= '0;
        end else begin
            if (s_awvalid && s_awready) {have_address, target, delay} <= {1'b1, s_awaddr, 8'd3};
            if (delay != 0) delay <= delay - 1;
            if (s_wvalid && s_wready) begin
                {have_address, s_bvalid} <= 2'b01;
                s_bresp <= target > 8 ? 2'd2 : 2'd0;
                if (target == 0) address <= s_wdata;
                if (target == 4) finished[31:16] <= s_wdata[15:0];
                if (target == 8) {count, addend} <= {16'd0, finished[31:16], s_wdata[7:0]};
            end
            if (s_bvalid && s_bready) s_bvalid <= 0;
            if (s_arvalid && s_arready) begin
                {s_rvalid, s_rresp, s_rdata} <= {1'b1, s_araddr == 12 ? 2'd0 : 2'd2, 16'd0, finished[15:0]};
                irq <= 0;
            end
            if (s_rvalid && s_rready) s_rvalid <= 0;
            if (busy && m_gnt) begin
                fetched <= !fetched;
                if (fetched) {address, count} <= {address + `WIDTH / 8, count - 32'd1};
                if (fetched && count == 1) {irq, finished[15:0]} <= {1'b1, finished[15:0] + 16'd1};
            end
        end
    end
endmodule
