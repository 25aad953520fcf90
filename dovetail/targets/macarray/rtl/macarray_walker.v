// Walks over the output pixels in raster order, and over the input pixels below them, with additions only.
//
// A block of at most 64 pixels is walked several times: `restart` goes back to where the block began, `keep` begins the
// next block behind this pixel.
module macarray_walker (
    input  wire        clk,
    input  wire        load,          // begin with the first pixel of the image
    input  wire        restart,
    input  wire        keep,
    input  wire        step,

    input  wire [31:0] source_row,    // bytes in the source from one row (pixel) of the result to the next
    input  wire [31:0] source_pixel,
    input  wire [31:0] second_row,    // ... in the second operand
    input  wire [31:0] second_pixel,
    input  wire [31:0] result_row,
    input  wire [31:0] result_pixel,
    input  wire [15:0] rows,          // of the result
    input  wire [15:0] columns,
    input  wire [1:0]  stride,
    input  wire [16:0] top,           // source row and column of the first pixel, negative in the padding
    input  wire [16:0] left,

    output wire [31:0] source_place,  // bytes from the first pixel
    output wire [31:0] second_place,
    output wire [31:0] result_place,
    output reg  [16:0] y,             // source row and column
    output reg  [16:0] x,
    output reg  [5:0]  pixel,         // number within the block
    output wire        last,          // of the block
    output wire        ending         // ... and of the image
);
    reg [15:0] row, column, row_kept, column_kept;
    reg [16:0] y_kept, x_kept;
    reg [31:0] source_down, source_right, source_down_kept, source_right_kept;
    reg [31:0] second_down, second_right, second_down_kept, second_right_kept;
    reg [31:0] result_down, result_right, result_down_kept, result_right_kept;

    wire at_edge = column == columns - 16'd1;

    // The pixel behind this one.
    wire [15:0] row_next = at_edge ? row + 16'd1 : row;
    wire [15:0] column_next = at_edge ? 16'd0 : column + 16'd1;
    wire [16:0] y_next = at_edge ? y + {15'd0, stride} : y;
    wire [16:0] x_next = at_edge ? left : x + {15'd0, stride};
    wire [31:0] source_down_next = at_edge ? source_down + source_row : source_down;
    wire [31:0] source_right_next = at_edge ? 32'd0 : source_right + source_pixel;
    wire [31:0] second_down_next = at_edge ? second_down + second_row : second_down;
    wire [31:0] second_right_next = at_edge ? 32'd0 : second_right + second_pixel;
    wire [31:0] result_down_next = at_edge ? result_down + result_row : result_down;
    wire [31:0] result_right_next = at_edge ? 32'd0 : result_right + result_pixel;

    assign source_place = source_down + source_right;
    assign second_place = second_down + second_right;
    assign result_place = result_down + result_right;
    assign ending = at_edge && row == rows - 16'd1;
    assign last = ending || pixel == 6'd63;

    always @(posedge clk) begin
        if (load || restart) begin
            row <= load ? 16'd0 : row_kept;
            column <= load ? 16'd0 : column_kept;
            y <= load ? top : y_kept;
            x <= load ? left : x_kept;
            source_down <= load ? 32'd0 : source_down_kept;
            source_right <= load ? 32'd0 : source_right_kept;
            second_down <= load ? 32'd0 : second_down_kept;
            second_right <= load ? 32'd0 : second_right_kept;
            result_down <= load ? 32'd0 : result_down_kept;
            result_right <= load ? 32'd0 : result_right_kept;
            pixel <= 6'd0;
        end else if (keep || step) begin
            row <= row_next;
            column <= column_next;
            y <= y_next;
            x <= x_next;
            source_down <= source_down_next;
            source_right <= source_right_next;
            second_down <= second_down_next;
            second_right <= second_right_next;
            result_down <= result_down_next;
            result_right <= result_right_next;
            pixel <= keep ? 6'd0 : pixel + 6'd1;
        end
        if (load || keep) begin
            row_kept <= load ? 16'd0 : row_next;
            column_kept <= load ? 16'd0 : column_next;
            y_kept <= load ? top : y_next;
            x_kept <= load ? left : x_next;
            source_down_kept <= load ? 32'd0 : source_down_next;
            source_right_kept <= load ? 32'd0 : source_right_next;
            second_down_kept <= load ? 32'd0 : second_down_next;
            second_right_kept <= load ? 32'd0 : second_right_next;
            result_down_kept <= load ? 32'd0 : result_down_next;
            result_right_kept <= load ? 32'd0 : result_right_next;
        end
    end
endmodule
