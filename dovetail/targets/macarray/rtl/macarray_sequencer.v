// The order of things: for each 8 output channels, for each block of 64 pixels, for each tap and 8 input channels: load
// the weights, then walk the block's pixels; at the end of the block walk it once more and send its sums to the
// requantiser. Depthwise and in a sum, 8 output channels are made from the same 8 input channels; a sum loads no weights,
// its taps are the pixels of both operands.
module macarray_sequencer (
    input  wire        clk,
    input  wire        rst_n,
    input  wire        start,
    output wire        busy,
    output wire        done,

    input  wire [31:0] source,        // of what the first tap of the first pixel reads, padding or not
    input  wire [31:0] source_row,
    input  wire [31:0] source_pixel,
    input  wire [31:0] source_size,
    input  wire [31:0] second,
    input  wire [31:0] second_row,
    input  wire [31:0] second_pixel,
    input  wire [31:0] result,
    input  wire [31:0] result_row,
    input  wire [31:0] result_pixel,
    input  wire [31:0] result_size,
    input  wire [31:0] channels,
    input  wire [31:0] weights,
    input  wire [31:0] parameters,
    input  wire [21:0] kernel,

    input  wire        advance,
    output wire        read,
    output wire [31:3] address,

    output reg  [1:0]  kind,          // of the data that arrive: 1 parameters, 2 weights, 3 a pixel's, 0 none
    output reg  [3:0]  index,
    output reg  [5:0]  pixel,
    output reg         first,
    output reg         present,
    output reg         joined,
    output reg  [2:0]  offset,

    output wire        emit,
    output wire [5:0]  emit_pixel,
    output wire [2:0]  emit_lane,
    output wire [31:0] emit_address,
    input  wire        draining
);
    localparam [2:0] IDLE = 3'd0, PARAMETERS = 3'd1, WEIGHTS = 3'd2, WALK = 3'd3, WAIT = 3'd4, EMIT = 3'd5, DRAIN = 3'd6;

    reg  [2:0]  state;
    reg  [3:0]  count;                // words loaded, or lanes sent
    reg  [3:0]  ky, kx;
    reg  [15:0] c, o;                 // the first of the 8 channels
    reg  [31:0] tap_row, tap_column, tap;
    reg  [31:0] weight_address, group_weights, parameter_address, group_result;
    reg         half;                 // the second of two words is due
    reg         image_done;

    wire [3:0]  kernel_rows = kernel[3:0];
    wire [3:0]  kernel_columns = kernel[7:4];
    wire [3:0]  stride = kernel[19:16];
    wire        is_depthwise = kernel[20];
    wire        is_sum = kernel[21];
    wire        own = is_depthwise || is_sum;  // every channel is made from its own
    wire [15:0] c_left = channels[15:0] - c;
    wire [15:0] o_left = channels[31:16] - o;
    wire [3:0]  o_here = o_left > 16'd8 ? 4'd8 : o_left[3:0];
    wire [3:0]  c_here = own ? o_here : c_left > 16'd8 ? 4'd8 : c_left[3:0];
    wire        c_last = own || c_left <= 16'd8;
    wire        loaded = count == (is_depthwise ? 4'd0 : 4'd7);
    wire        kx_last = kx == kernel_columns - 4'd1;
    wire        last_pass = c_last && kx_last && ky == kernel_rows - 4'd1;
    wire        last_group = o_left <= 16'd8;

    wire [31:0] source_place, second_place, result_place;
    wire [16:0] y, x;
    wire [5:0]  walked;
    wire        last, ending;

    wire [16:0] tap_y = y + {13'd0, ky};
    wire [16:0] tap_x = x + {13'd0, kx};
    wire        is_present = is_sum || tap_y < {1'b0, source_size[15:0]} && tap_x < {1'b0, source_size[31:16]};
    wire [31:0] place = is_sum && ky[0] ? second + {16'd0, o} + second_place : tap + source_place;
    wire        is_two = {2'd0, place[2:0]} + {1'b0, c_here} > 5'd8;

    wire        walk_step = state == WALK && advance && (!is_present || half == is_two);
    wire        emit_step = state == EMIT && advance && count == o_here - 4'd1;
    wire        drained = state == DRAIN && !draining;
    wire        next_group = drained && image_done && !last_group;
    wire [15:0] o_next = start ? 16'd0 : next_group ? o + 16'd8 : o;
    wire [31:0] first_tap = source + (own ? {16'd0, o_next} : 32'd0);

    assign busy = state != IDLE;
    assign done = drained && image_done && last_group;
    assign read = state == PARAMETERS || state == WEIGHTS || (state == WALK && is_present);
    assign address = state == PARAMETERS ? parameter_address[31:3] : state == WEIGHTS ? weight_address[31:3]
                   : place[31:3] + {28'd0, half};
    assign emit = state == EMIT;
    assign emit_pixel = walked;
    assign emit_lane = count[2:0];
    assign emit_address = group_result + result_place + {28'd0, count};

    macarray_walker walker (
        .clk(clk), .load(start || next_group), .restart(walk_step && last), .keep(emit_step && last),
        .step(walk_step || emit_step),
        .source_row(source_row << (stride == 4'd2)), .source_pixel(source_pixel << (stride == 4'd2)),
        .second_row(second_row), .second_pixel(second_pixel), .result_row(result_row), .result_pixel(result_pixel),
        .rows(result_size[15:0]), .columns(result_size[31:16]), .stride(stride[1:0]),
        .top(17'd0 - {13'd0, kernel[11:8]}), .left(17'd0 - {13'd0, kernel[15:12]}),
        .source_place(source_place), .second_place(second_place), .result_place(result_place), .y(y), .x(x), .pixel(walked),
        .last(last), .ending(ending)
    );

    // What arrives in the next cycle.
    always @(posedge clk or negedge rst_n) begin
        if (!rst_n) kind <= 2'd0;
        else kind <= !advance ? 2'd0 : state == PARAMETERS ? 2'd1 : state == WEIGHTS ? 2'd2 : state == WALK ? 2'd3 : 2'd0;
    end

    always @(posedge clk) begin
        index <= count;
        pixel <= walked;
        first <= walk_step && c == 16'd0 && ky == 4'd0 && kx == 4'd0;
        present <= walk_step && is_present;
        joined <= half;
        offset <= place[2:0];
    end

    // Loops: words or lanes, taps and input channels, blocks, output channels.
    always @(posedge clk or negedge rst_n) begin
        if (!rst_n) begin
            state <= IDLE;
        end else case (state)
            IDLE: if (start) state <= PARAMETERS;
            PARAMETERS: if (advance && count == 4'd15) state <= is_sum ? WALK : WEIGHTS;
            WEIGHTS: if (advance && loaded) state <= WALK;
            WALK: if (walk_step && last) state <= last_pass ? WAIT : is_sum ? WALK : WEIGHTS;
            WAIT: state <= EMIT;
            EMIT: if (emit_step && last) state <= DRAIN;
            DRAIN: if (drained) state <= done ? IDLE : is_sum ? WALK : image_done ? PARAMETERS : WEIGHTS;
            default: state <= IDLE;
        endcase
    end

    always @(posedge clk) begin
        o <= o_next;
        if (start) begin
            group_result <= result;
            group_weights <= weights;
            parameter_address <= parameters;
        end
        if (start || drained) begin
            count <= 4'd0;
            half <= 1'b0;
            image_done <= 1'b0;
            {ky, kx, c} <= 24'd0;
            tap_row <= first_tap;
            tap_column <= first_tap;
            tap <= first_tap;
            weight_address <= start ? weights : image_done ? weight_address : group_weights;
        end else if (advance) begin
            if (state == PARAMETERS || state == WEIGHTS) begin
                count <= state == WEIGHTS && loaded ? 4'd0 : count + 4'd1;
            end
            if (state == PARAMETERS) parameter_address <= parameter_address + 32'd8;
            if (state == WEIGHTS) weight_address <= weight_address + 32'd8;
            if (state == WALK) half <= !walk_step;
            if (state == EMIT) count <= emit_step ? 4'd0 : count + 4'd1;
            if (emit_step && last) image_done <= ending;
        end
        if (next_group) begin
            group_result <= group_result + 32'd8;
            group_weights <= weight_address;
        end
        if (walk_step && last) begin
            c <= c_last ? 16'd0 : c + 16'd8;
            tap <= !c_last ? tap + 32'd8 : !kx_last ? tap_column + source_pixel : tap_row + source_row;
            if (c_last) begin
                kx <= kx_last ? 4'd0 : kx + 4'd1;
                tap_column <= !kx_last ? tap_column + source_pixel : tap_row + source_row;
            end
            if (c_last && kx_last) begin
                ky <= ky + 4'd1;
                tap_row <= tap_row + source_row;
            end
        end
    end
endmodule
