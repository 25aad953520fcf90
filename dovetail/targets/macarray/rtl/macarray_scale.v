// A 32-bit number times a factor, in two steps: the doubled high half of a product, halves rounded up, then a shift to
// the right, halves rounded away from zero. The result comes in the cycle after.
module macarray_scale (
    input  wire        clk,
    input  wire        step,
    input  wire [31:0] value,
    input  wire [31:0] multiplier,  // below 2^31
    input  wire [5:0]  shift,       // signed; to the left where positive
    output wire signed [33:0] scaled
);
    wire        is_left = !shift[5];
    wire [31:0] raised = is_left ? value << shift[4:0] : value;
    wire signed [63:0] wide = {{32{raised[31]}}, raised};
    wire signed [63:0] factor = {32'd0, multiplier};

    reg  [4:0]  right;
    /* verilator lint_off UNUSEDSIGNAL */  // of the lowest bits only their rounding is left
    reg  signed [63:0] product;
    /* verilator lint_on UNUSEDSIGNAL */

    wire signed [32:0] doubled = product[63:31] + {32'd0, product[30]};
    wire        [32:0] mask = (33'd1 << right) - 33'd1;
    wire        [32:0] remainder = doubled & mask;
    wire        [32:0] threshold = (mask >> 1) + {32'd0, doubled[32]};
    wire signed [32:0] quotient = doubled >>> right;

    assign scaled = {quotient[32], quotient} + {33'd0, remainder > threshold};

    always @(posedge clk) begin
        if (step) begin
            product <= wide * factor;
            right <= is_left ? 5'd0 : 5'd0 - shift[4:0];
        end
    end
endmodule
