// The sum of two elements: both raised by 20 bits and brought to one scale, as TensorFlow Lite does.
module macarray_adder (
    input  wire        clk,
    input  wire        rst_n,
    input  wire        advance,

    input  wire        emit,
    input  wire [31:0] pair,           // two operands without their zero points, the first in the lower half
    input  wire [63:0] multipliers,
    input  wire [11:0] shifts,
    input  wire [31:0] address,

    output reg         valid,          // in the cycle after
    output wire [31:0] total,
    output reg  [31:0] total_address
);
    /* verilator lint_off UNUSEDSIGNAL */  // operands have 9 bits; the total wraps
    wire signed [33:0] first, second;
    wire [31:0] operands = pair;
    /* verilator lint_on UNUSEDSIGNAL */
    wire        step = advance && emit;

    assign total = first[31:0] + second[31:0];

    macarray_scale scale_first (
        .clk(clk), .step(step), .value({operands[11:0], 20'd0}),
        .multiplier(multipliers[31:0]), .shift(shifts[5:0]), .scaled(first)
    );
    macarray_scale scale_second (
        .clk(clk), .step(step), .value({operands[27:16], 20'd0}),
        .multiplier(multipliers[63:32]), .shift(shifts[11:6]), .scaled(second)
    );

    always @(posedge clk) begin
        if (step) total_address <= address;
    end

    always @(posedge clk or negedge rst_n) begin
        if (!rst_n) valid <= 1'b0;
        else if (advance) valid <= emit;
    end
endmodule
