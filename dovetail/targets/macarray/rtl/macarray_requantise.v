// TensorFlow Lite's requantisation of one 32-bit sum per cycle: scaled, then zero point and limits.
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
    wire signed [33:0] scaled;
    wire signed [33:0] value = scaled + {{26{zero_point[7]}}, zero_point};
    wire signed [33:0] least = {{26{low[7]}}, low};
    wire signed [33:0] most = {{26{high[7]}}, high};

    reg         valid;
    reg  [31:0] target;

    assign draining = valid || write;

    macarray_scale scale (
        .clk(clk), .step(advance && emit), .value(sum), .multiplier(multiplier), .shift(shift), .scaled(scaled)
    );

    always @(posedge clk) begin
        if (advance && emit) begin
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
