// TensorFlow Lite's requantisation of one 32-bit sum per cycle, in two steps: the doubled high half of a product, halves
// rounded up, then a shift to the right, halves rounded away from zero; zero point and limits last.
module macarray_requantise (
    input  wire        clk,
    input  wire        rst_n,
    input  wire        advance,

    input  wire        emit,
    input  wire [31:0] sum,
    input  wire [31:0] multiplier,  // below 2^31
    input  wire [5:0]  shift,       // signed; to the left where positive
    input  wire [31:0] address,

    input  wire [7:0]  zero_point,
    input  wire [7:0]  low,
    input  wire [7:0]  high,

    output reg         write,
    output reg  [31:0] write_address,
    output reg  [7:0]  write_value,
    output wire        draining     // something is still on its way
);
    wire        is_left = !shift[5];
    wire [31:0] raised = is_left ? sum << shift[4:0] : sum;
    wire signed [63:0] wide = {{32{raised[31]}}, raised};
    wire signed [63:0] factor = {32'd0, multiplier};

    reg         valid;
    reg  [31:0] target;
    reg  [4:0]  right;
    /* verilator lint_off UNUSEDSIGNAL */  // of the lowest bits only their rounding is left
    reg  signed [63:0] product;
    /* verilator lint_on UNUSEDSIGNAL */

    wire signed [32:0] doubled = product[63:31] + {32'd0, product[30]};
    wire        [32:0] mask = (33'd1 << right) - 33'd1;
    wire        [32:0] remainder = doubled & mask;
    wire        [32:0] threshold = (mask >> 1) + {32'd0, doubled[32]};
    wire signed [32:0] quotient = doubled >>> right;
    wire signed [33:0] value = {quotient[32], quotient} + {33'd0, remainder > threshold}
                             + {{26{zero_point[7]}}, zero_point};
    wire signed [33:0] least = {{26{low[7]}}, low};
    wire signed [33:0] most = {{26{high[7]}}, high};

    assign draining = valid || write;

    always @(posedge clk) begin
        if (advance && emit) begin
            product <= wide * factor;
            right <= is_left ? 5'd0 : 5'd0 - shift[4:0];
            target <= address;
        end
        if (advance && valid) begin
            write_value <= value < least ? low : value > most ? high : value[7:0];
            write_address <= target;
        end
    end

    always @(posedge clk or negedge rst_n) begin
        if (!rst_n) begin
            valid <= 1'b0;
            write <= 1'b0;
        end else if (advance) begin
            valid <= emit;
            write <= valid;
        end
    end
endmodule
