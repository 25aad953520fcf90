// An int8 convolution engine: 8 x 8 multipliers, 8 channels in by 8 channels out in every cycle.
//
// A job is a convolution with a kernel of up to 15 x 15, stride 1 or 2 and padding with the zero point, 32-bit sums that
// begin with a bias, and TensorFlow Lite's requantisation per output channel. Images are NHWC with any strides; weights
// are packed as [C_out/8][rows][columns][C_in/8][8 out][8 in], 0 for channels that are not there; parameters are 16 bytes
// per output channel: bias, multiplier, shift, 0. Depthwise, weights are [C/8][rows][columns][8]. A sum of two images is
// a job of a 2 x 1 kernel without weights; its first three parameters are the result's and the operands' scales.
//
// Registers (APB, no wait states):
//   0x00 START     write: begin the job the registers below describe; only while ROOM is 1
//   0x04 FINISHED  read: jobs finished since reset; lowers the interrupt line
//   0x08 ROOM      read: 1 when a job can be started
//   0x10 ...       the job, see the wires below
//
// Memory port (TCDM): a request is held until granted; read data come in the cycle after the grant. Words of 8 bytes.
module macarray (
    input  wire        clk,
    input  wire        rst_n,

    input  wire        psel,
    input  wire        penable,
    input  wire        pwrite,
    input  wire [7:0]  paddr,
    input  wire [31:0] pwdata,
    output wire [31:0] prdata,
    output wire        pready,
    output wire        pslverr,

    output wire        tcdm_req,
    input  wire        tcdm_gnt,
    output wire        tcdm_we,
    output wire [31:0] tcdm_addr,
    output wire [63:0] tcdm_wdata,
    output wire [7:0]  tcdm_be,
    input  wire [63:0] tcdm_rdata,

    output wire        busy,
    output wire        irq
);
    localparam integer WORDS = 16;

    // ---- registers

    reg [31:0] job [0:WORDS-1];
    reg [31:0] finished;
    reg        raised;
    wire       done;

    wire       access = psel && penable;
    wire [5:0] word = paddr[7:2];
    wire [3:0] place = paddr[5:2] - 4'd4;
    wire       is_start = word == 6'd0;
    wire       is_finished = word == 6'd1;
    wire       is_room = word == 6'd2;
    wire       is_job = word >= 6'd4 && word < 6'd4 + WORDS[5:0];
    wire       start = access && pwrite && is_start && !busy;

    assign pready = 1'b1;
    assign pslverr = access && (paddr[1:0] != 2'd0 || (pwrite ? !(is_job || is_start) || busy
                                                              : !(is_job || is_finished || is_room)));
    assign prdata = is_job ? job[place] : is_finished ? finished : {31'd0, is_room && !busy};
    assign irq = raised;

    always @(posedge clk) begin
        if (access && pwrite && is_job && !busy) job[place] <= pwdata;
    end

    always @(posedge clk or negedge rst_n) begin
        if (!rst_n) begin
            finished <= 32'd0;
            raised <= 1'b0;
        end else begin
            if (done) finished <= finished + 32'd1;
            raised <= done || (raised && !(access && !pwrite && is_finished));
        end
    end

    // ---- the job

    wire [31:0] source = job[0];
    wire [31:0] source_row = job[1];          // bytes between rows, and between pixels
    wire [31:0] source_pixel = job[2];
    wire [31:0] source_size = job[3];         // rows, columns << 16
    wire [31:0] result = job[4];
    wire [31:0] result_row = job[5];
    wire [31:0] result_pixel = job[6];
    wire [31:0] result_size = job[7];
    wire [31:0] channels = job[8];            // in, out << 16
    wire [31:0] weights = job[9];             // a multiple of 8
    wire [31:0] parameters = job[10];         // a multiple of 8
    /* verilator lint_off UNUSEDSIGNAL */
    wire [31:0] kernel = job[11];             // rows, columns, rows of padding above, columns left, stride: 4 bits each;
                                              // 1 << 20 depthwise, 2 << 20 a sum; a sum's second zero point << 24
    /* verilator lint_on UNUSEDSIGNAL */
    wire [31:0] bounds = job[12];             // bytes: zero point in, zero point out, lowest and highest result
    wire [31:0] second = job[13];             // a sum's other operand
    wire [31:0] second_row = job[14];
    wire [31:0] second_pixel = job[15];
    wire        is_sum = kernel[21];

    // ---- what the parts say to each other

    wire        advance;                      // a request may leave: there is none, or it is granted
    wire        read;
    wire [31:3] read_address;
    wire        write;
    wire [31:0] write_address;
    wire [7:0]  write_value;

    wire [1:0]  kind;                         // of the data that arrive: see macarray_sequencer
    wire [3:0]  index;
    wire [5:0]  pixel;
    wire        first, present, joined;
    wire [2:0]  offset;

    wire        emit;                         // a sum goes to the requantiser
    wire [5:0]  emit_pixel;
    wire [2:0]  emit_lane;
    wire [31:0] emit_address;
    wire        draining;
    wire [31:0] sum;

    wire [31:0] multiplier;
    wire [5:0]  shift;
    wire [63:0] scales;
    wire [11:0] shifts;

    wire        added;                        // a sum's operands have been added
    wire [31:0] total, total_address;

    assign tcdm_req = read || write;
    assign tcdm_we = write;
    assign tcdm_addr = {write ? write_address[31:3] : read_address, 3'd0};
    assign tcdm_wdata = {8{write_value}};
    assign tcdm_be = write ? 8'd1 << write_address[2:0] : 8'hFF;
    assign advance = !tcdm_req || tcdm_gnt;

    macarray_sequencer sequencer (
        .clk(clk), .rst_n(rst_n), .start(start), .busy(busy), .done(done),
        .source(source), .source_row(source_row), .source_pixel(source_pixel), .source_size(source_size),
        .second(second), .second_row(second_row), .second_pixel(second_pixel),
        .result(result), .result_row(result_row), .result_pixel(result_pixel), .result_size(result_size),
        .channels(channels), .weights(weights), .parameters(parameters), .kernel(kernel[21:0]),
        .advance(advance), .read(read), .address(read_address),
        .kind(kind), .index(index), .pixel(pixel), .first(first), .present(present), .joined(joined), .offset(offset),
        .emit(emit), .emit_pixel(emit_pixel), .emit_lane(emit_lane), .emit_address(emit_address),
        .draining(draining || added)
    );

    macarray_lanes lanes (
        .clk(clk), .data(tcdm_rdata), .kind(kind), .index(index), .pixel(pixel), .first(first), .present(present),
        .joined(joined), .offset(offset), .is_depthwise(kernel[20]), .is_sum(is_sum),
        .zero_point(bounds[7:0]), .second_zero_point(kernel[31:24]),
        .emit_pixel(emit_pixel), .emit_lane(emit_lane), .sum(sum), .multiplier(multiplier), .shift(shift),
        .scales(scales), .shifts(shifts)
    );

    macarray_adder adder (
        .clk(clk), .rst_n(rst_n), .advance(advance), .emit(emit && is_sum), .pair(sum), .multipliers(scales),
        .shifts(shifts), .address(emit_address), .valid(added), .total(total), .total_address(total_address)
    );

    macarray_requantise requantise (
        .clk(clk), .rst_n(rst_n), .advance(advance), .emit(is_sum ? added : emit), .sum(is_sum ? total : sum),
        .multiplier(multiplier), .shift(shift), .address(is_sum ? total_address : emit_address), .zero_point(bounds[15:8]), .low(bounds[23:16]), .high(bounds[31:24]),
        .write(write), .write_address(write_address), .write_value(write_value), .draining(draining)
    );
endmodule
