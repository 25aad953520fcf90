// The multipliers with their weights, the parameters of 8 output channels, and the sums of up to 64 pixels.
module macarray_lanes (
    input  wire        clk,
    input  wire [63:0] data,        // what the memory gives in this cycle,
    input  wire [1:0]  kind,        // and what it is: see macarray_sequencer
    input  wire [3:0]  index,       // which parameters or weights
    input  wire [5:0]  pixel,
    input  wire        first,       // the pixel's sums begin
    input  wire        present,      // else the pixel is padding, and there are no data
    input  wire        joined,      // the 8 channels began in the word before
    input  wire [2:0]  offset,      // of the first channel within its word
    input  wire        is_depthwise,
    input  wire        is_sum,
    input  wire [7:0]  zero_point,
    input  wire [7:0]  second_zero_point,

    input  wire [5:0]  emit_pixel,
    input  wire [2:0]  emit_lane,
    output wire [31:0] sum,         // of a sum: its operands, 16 bits each
    output wire [31:0] multiplier,
    output wire [5:0]  shift,
    output wire [63:0] scales,      // multipliers of a sum's operands
    output wire [11:0] shifts
);
    localparam [1:0] PARAMETERS = 2'd1, WEIGHTS = 2'd2, PIXEL = 2'd3;

    reg [31:0]  bias [0:7];
    reg [31:0]  factor [0:7];
    reg [5:0]   power [0:7];
    reg [63:0]  weight [0:7];       // by output channel: 8 input channels
    reg [255:0] sums [0:63];        // by pixel: 8 output channels
    reg [63:0]  previous;

    wire [6:0]  down = {1'b0, offset, 3'd0};
    wire [63:0] tail = joined ? data << (7'd64 - down) : 64'd0;
    wire [63:0] x = ((joined ? previous : data) >> down) | tail;

    integer o, i;
    wire [7:0]        zero = is_sum && !first ? second_zero_point : zero_point;
    reg signed [8:0]  operand [0:7];
    reg signed [7:0]  factor_of;
    reg signed [31:0] total;
    reg [255:0]       old_sums, new_sums;

    always @(posedge clk) begin
        if (kind != 2'd0) previous <= data;
        if (kind == WEIGHTS) weight[index[2:0]] <= data;
        if (kind == PARAMETERS && !index[0]) begin
            bias[index[3:1]] <= data[31:0];
            factor[index[3:1]] <= data[63:32];
        end
        if (kind == PARAMETERS && index[0]) power[index[3:1]] <= data[5:0];
    end

    // Blocking assignments are for values used in this block only.
    /* verilator lint_off BLKSEQ */
    always @(posedge clk) begin
        if (kind == PIXEL && (present || first)) begin
            for (i = 0; i < 8; i = i + 1)
                operand[i] = present ? $signed(x[8*i +: 8]) - $signed(zero) : 9'sd0;
            old_sums = sums[pixel];
            for (o = 0; o < 8; o = o + 1) begin
                total = first ? bias[o] : old_sums[32*o +: 32];
                for (i = 0; i < 8; i = i + 1) begin
                    factor_of = !is_depthwise ? weight[o][8*i +: 8] : i == o ? weight[0][8*o +: 8] : 8'd0;
                    total = total + operand[i] * factor_of;
                end
                if (is_sum) total = {{7{operand[o][8]}}, operand[o], first ? 16'd0 : old_sums[32*o+16 +: 16]};
                new_sums[32*o +: 32] = total;
            end
            sums[pixel] <= new_sums;
        end
    end
    /* verilator lint_on BLKSEQ */

    assign sum = sums[emit_pixel][32*emit_lane +: 32];
    assign multiplier = factor[is_sum ? 3'd0 : emit_lane];
    assign shift = power[is_sum ? 3'd0 : emit_lane];
    assign scales = {factor[2], factor[1]};
    assign shifts = {power[2], power[1]};
endmodule
