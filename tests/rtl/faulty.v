// A device for tests that does whatever is written to it: register 0x00 is a mode, 0x04 counts accesses.
//   1: busy for ever. 2: reads at 0x40000000. 3: reads at 0x10000002. 4: its register port no longer answers.
//   5: writes 0x01020304 to 0x10000010, then raises its interrupt; reading register 0x04 lowers it.
// Register 0x08 does not exist.
module faulty (
    input  wire        clock,
    input  wire        reset,          // active high
    input  wire        psel,
    input  wire        penable,
    input  wire        pwrite,
    input  wire [11:0] paddr,
    input  wire [31:0] pwdata,
    output wire [31:0] prdata,
    output wire        pready,
    output wire        pslverr,
    output wire        m_req,
    input  wire        m_gnt,
    output wire        m_wen,          // low: write
    output wire [31:0] m_add,
    output wire [31:0] m_data,
    input  wire [31:0] m_r_data,
    output wire        busy,
    output reg         done
);
    parameter [31:0] VERSION = 32'd7;

    reg [2:0]  mode;
    reg [31:0] accesses;
    wire access = psel && penable;

    assign pready = mode != 3'd4;
    assign pslverr = access && paddr > 12'd7;
    assign prdata = paddr == 12'd0 ? VERSION + m_r_data : accesses;
    assign busy = mode != 3'd0 && mode != 3'd4;
    assign m_req = mode == 3'd2 || mode == 3'd3 || mode == 3'd5;
    assign m_wen = mode != 3'd5;
    assign m_add = mode == 3'd2 ? 32'h40000000 : mode == 3'd3 ? 32'h10000002 : 32'h10000010;
    assign m_data = 32'h01020304;

    always @(posedge clock) begin
        if (reset) begin
            mode <= 3'd0;
            accesses <= 32'd0;
            done <= 1'b0;
        end else begin
            if (access && pready) accesses <= accesses + 32'd1;
            if (access && pwrite && paddr == 12'd0) mode <= pwdata[2:0];
            if (mode == 3'd5 && m_gnt) mode <= 3'd0;
            done <= (mode == 3'd5 && m_gnt) || (done && !(access && !pwrite && paddr == 12'd4));
        end
    end
endmodule
